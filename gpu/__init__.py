"""The device side: copying blocks between an engine's KV tensors and arena slots."""
