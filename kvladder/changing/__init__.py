"""Changes of a cache while it serves: another stack, a drain before its end, a warm start."""
