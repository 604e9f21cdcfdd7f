"""vLLM's requests as the scheduler half knows them: their states, searches, times and sessions."""
