"""How long tests wait for what must happen.

A machine may be twenty times slower than another, or as busy. So nothing that is only late fails: a
test waits this long for a process, a thread or a server, whatever that takes on a quiet machine.
What never happens is found sooner, by ``tests/stuck.py``.
"""

PATIENCE_S = 1800.0
