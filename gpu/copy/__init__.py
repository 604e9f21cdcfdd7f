"""Batched copies between an engine's KV tensors and arena slots, on CPU and on device streams."""
