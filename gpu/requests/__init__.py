"""Running requests, their sequences and shared prefixes."""
