"""The prefix index in columns: nodes, children and the order of eviction."""
