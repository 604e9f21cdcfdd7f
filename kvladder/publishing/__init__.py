"""What a cache publishes: events as a stream, and metrics."""
