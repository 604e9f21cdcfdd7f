"""A soak on real parts: two vLLM over every kind of tier, whose far ends and networks fail."""
