"""Pure decisions: what is evicted first, what a level takes, how long a priority lasts."""
