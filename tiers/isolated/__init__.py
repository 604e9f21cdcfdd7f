"""Runs any tier in a child process that maps the arena; killing it ends all its access to slots."""
