"""Child processes: start one and end it reliably, and calls between it and its parent."""
