"""A tier over a Mooncake Store, a distributed object store that runs apart from kvladder."""
