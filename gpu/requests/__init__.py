"""Running requests, their sequences and shared prefixes, and groups of layers."""
