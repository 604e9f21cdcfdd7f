"""Random delays, as on a busy machine: ``pytest -p tests.kit.jitter``.

Assumptions that hold only on a quiet machine fail sooner with it. Each turn of an event loop in
real time, and each piece of work of a thread pool or thread, sometimes begins late, mostly by
milliseconds, some by half a second. One process started by tests at a time, servers included, is
stopped for about as long. The delays differ from run to run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as pools
from contextlib import suppress
from typing import Any

import pytest

from kvladder.testing.sim import SimLoop
from tests import stuck

CHANCE = random.Random()
"""A separate generator: Hypothesis seeds that of the module ``random``, and checks its users."""
SHARE = 0.3
"""The share of all beginnings that are late."""
SHORT_S, LONG_S = 0.02, 0.5
LONG_SHARE = 0.002
"""The share of late ones that are late by ``LONG_S``."""
STILL_S, STILL_LONG_S = 0.2, 1.5
STILL_LONG_SHARE = 0.1
PAUSE_S = 0.2
"""Up to so long until the next process stands still."""


def delay() -> None:
    """Be late, or not."""
    if CHANCE.random() < SHARE:
        longer = CHANCE.random() < LONG_SHARE
        time.sleep(LONG_S if longer else CHANCE.uniform(0, SHORT_S))


def late(begin: Callable[..., Any]) -> Callable[..., Any]:
    """The same, now and then later."""

    def begin_late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, SimLoop):
            delay()
        return begin(self, *args, **kwargs)

    return begin_late


class Stills(threading.Thread):
    """Stops processes started by this process for a while, except those that a test has stopped."""

    def __init__(self) -> None:
        super().__init__(name="stills", daemon=True)
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._kill = os.kill
        self._over = threading.Event()

    def kill(self, pid: int, sent: int) -> None:
        """Replace ``os.kill`` for tests."""
        with self._lock:
            self._kill(pid, sent)
            if sent == signal.SIGSTOP:
                self._held.add(pid)
            elif sent == signal.SIGCONT:
                self._held.discard(pid)

    def run(self) -> None:
        """Until it is ended."""
        while not self._over.wait(CHANCE.uniform(0, PAUSE_S)):
            if begun := stuck.below(os.getpid()) - {os.getpid()}:
                self.still(CHANCE.choice([*begun]))

    def still(self, pid: int) -> None:
        """Have a process stand still for a while."""
        longer = CHANCE.random() < STILL_LONG_SHARE
        with self._lock, suppress(ProcessLookupError):
            if pid not in self._held:
                self._kill(pid, signal.SIGSTOP)
        time.sleep(STILL_LONG_S if longer else CHANCE.uniform(0, STILL_S))
        with self._lock, suppress(ProcessLookupError):
            if pid not in self._held:
                self._kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """Resume all stopped processes."""
        self._over.set()
        self.join()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        return  # each worker does that for itself
    for owner, name in (
        (asyncio.base_events.BaseEventLoop, "_run_once"),
        (pools._WorkItem, "run"),
        (threading.Thread, "run"),
    ):
        setattr(owner, name, late(getattr(owner, name)))
    stills = Stills()
    os.kill = stills.kill
    config.add_cleanup(stills.end)
    stills.start()
