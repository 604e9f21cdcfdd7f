"""What others are told: events as a stream, metrics as text."""
