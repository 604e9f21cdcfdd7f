"""A tier whose blocks are in other kvladder caches, e.g. on other machines, reached by NIXL."""
