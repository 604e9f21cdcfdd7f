"""Makes one self-contained page of results, with plots; it opens without a network."""
