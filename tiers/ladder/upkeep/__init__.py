"""What an operator asks of the ladder: to find blocks, to check them, to evict them."""
