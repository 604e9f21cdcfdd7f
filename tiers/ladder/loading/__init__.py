"""Loads: each block is read once for all fetches that want it, if the wait is worth it."""
