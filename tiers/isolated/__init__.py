"""Any tier in a process of its own, which maps the arena; killing it is the fence."""
