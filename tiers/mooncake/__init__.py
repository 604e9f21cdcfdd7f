"""A tier of a Mooncake Store, the distributed engine that others operate."""
