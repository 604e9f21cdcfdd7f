"""The control socket of a running cache: its server, its name and its clients."""
