"""The connectors that engines call: the neutral interface, a reference, and one per engine."""
