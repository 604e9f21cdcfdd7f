"""A tier over files: segments of blocks, an index log, threads that read and write."""
