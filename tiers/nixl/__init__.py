"""A tier whose blocks are in other caches: kvladder on other machines, reached by NIXL."""
