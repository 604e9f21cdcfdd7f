"""Publishes events of a cache as a stream, and its metrics."""
