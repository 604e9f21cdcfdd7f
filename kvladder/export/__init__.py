"""Lets other caches read from and write to a cache: its offers, and the process for its clients."""
