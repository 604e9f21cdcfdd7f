"""The time that tests wait for an expected event.

A machine may be ten times slower or busier than another, so a late event must not fail a test. A
test waits this long for an answer, a thread or a server, however short that is on a quiet machine.
``tests/stuck.py`` finds tests that wait idly; this limit finds tests that poll.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE_S = float(os.environ.get("KVLADDER_PATIENCE_S", "300"))
"""The limit for one event: a quiet machine takes seconds. Lower it to make tests fail sooner."""
RUN_S = 1200.0
"""The limit for an engine's start or a long process: up to a minute on a quiet machine."""


def until(
    holds: Callable[[], object], *, every_s: float = 0.005, within_s: float = PATIENCE_S
) -> None:
    """Return when a condition holds, polled repeatedly; fail if it never does."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(every_s)
