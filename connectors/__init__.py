"""What engines call: the neutral interface, the inline reference and one adapter per engine."""
