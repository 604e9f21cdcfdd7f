"""What vLLM and its users are told: metrics, events, log lines."""
