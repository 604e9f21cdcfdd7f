"""The calls of a tier: deadlines, breakers, and what is left behind."""
