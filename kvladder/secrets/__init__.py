"""Secrets that operators change while caches run."""
