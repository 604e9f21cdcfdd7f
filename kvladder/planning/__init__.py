"""Finds out from a published model's configuration what its KV cache keeps."""
