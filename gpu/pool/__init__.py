"""The block pool: slots, who holds them, what leaves and what comes back."""
