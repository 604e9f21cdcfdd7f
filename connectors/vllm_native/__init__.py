"""kvladder beneath vLLM's own offloading: a secondary tier and a cache policy."""
