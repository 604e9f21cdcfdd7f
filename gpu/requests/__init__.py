"""Running requests: their sequences, the prefixes they share, groups of layers."""
