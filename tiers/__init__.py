"""Places for blocks below the GPU: the tier interface, its implementations and their stack."""
