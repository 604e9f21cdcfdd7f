"""The index of prefixes, in columns: nodes, children, the order of eviction."""
