"""The blocks that go to a tier, and those that it is to forget."""
