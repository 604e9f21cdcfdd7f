"""Delays anywhere, as on a machine that has much else to do: ``pytest -p tests.kit.jitter``.

What a test takes for granted, and only a quiet machine gives, fails with it sooner: each turn of an
event loop in real time and each piece of work of a thread pool or thread of its own begins late now
and then, mostly by milliseconds, some by half a second. The delays differ from run to run.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as pools
from typing import Any

from kvladder.testing.sim import SimLoop

SHARE = 0.3
"""Of all beginnings, these are late."""
SHORT_S, LONG_S = 0.02, 0.5
LONG_SHARE = 0.002
"""Of those that are late, these by ``LONG_S``."""


def delay() -> None:
    """Be late, or not."""
    if random.random() < SHARE:
        longer = random.random() < LONG_SHARE
        time.sleep(LONG_S if longer else random.uniform(0, SHORT_S))


def late(begin: Callable[..., Any]) -> Callable[..., Any]:
    """The same, now and then later."""

    def begin_late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, SimLoop):
            delay()
        return begin(self, *args, **kwargs)

    return begin_late


for owner, name in (
    (asyncio.base_events.BaseEventLoop, "_run_once"),
    (pools._WorkItem, "run"),
    (threading.Thread, "run"),
):
    setattr(owner, name, late(getattr(owner, name)))
