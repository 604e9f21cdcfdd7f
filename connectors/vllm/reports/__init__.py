"""Reports to vLLM and its users: metrics, events, log lines."""
