"""What a published model's configuration says of its KV cache."""
