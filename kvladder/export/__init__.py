"""A cache that others read from and write to: what it offers, and the process that serves them."""
