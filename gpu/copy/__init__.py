"""Batched copies between an engine's KV tensors and slots, on CPU and on device streams."""
