"""Settings: read, checked, explained; what they name is found here."""
