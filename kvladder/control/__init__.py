"""The control socket of a running cache: what is answered there, and its name and clients."""
