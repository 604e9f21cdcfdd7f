"""Foreign benchmark clients, unchanged, against vLLM alone and vLLM with kvladder."""
