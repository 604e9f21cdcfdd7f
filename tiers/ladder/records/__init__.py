"""Records of a level about its blocks: places, the order of eviction, expiry, quotas."""
