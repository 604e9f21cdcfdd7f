"""The block pool: slots, references to them, and moves of blocks to and from the tiers."""
