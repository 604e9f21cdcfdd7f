"""Pure decisions: what to evict first, what a level takes, how long a priority lasts."""
