"""The levels together: where a block goes, what is read for a request, what is written when."""
