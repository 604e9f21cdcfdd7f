"""How long tests wait for what must happen.

A machine may be ten times slower than another, or as busy. So nothing that is only late fails: a
test waits this long for an answer, a thread or a server, whatever that takes on a quiet machine.
Who waits and does nothing else is found by ``tests/stuck.py``; who asks again and again, by this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE_S = float(os.environ.get("KVLADDER_PATIENCE_S", "300"))
"""For one thing: a quiet machine takes seconds. Less is for runs in which tests are to fail."""
RUN_S = 1200.0
"""For an engine's start, or a process of many steps: a quiet machine takes up to a minute."""


def until(
    holds: Callable[[], object], *, every_s: float = 0.005, within_s: float = PATIENCE_S
) -> None:
    """Return when something is true, asked again and again; fails if it never is."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(every_s)
