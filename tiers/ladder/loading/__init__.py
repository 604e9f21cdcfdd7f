"""What a request gets from the levels: read once for all who ask, if it is worth waiting for."""
