"""What a level knows of its blocks: places, the order of eviction, expiry, quotas."""
