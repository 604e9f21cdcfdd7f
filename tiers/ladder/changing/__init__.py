"""Changes of the levels while they serve: attach, detach, and other settings."""
