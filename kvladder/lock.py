"""The lock of a cache's bookkeeping: it is held briefly, and an engine's thread gets it next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

STEP: Final = 64
"""Blocks looked at one by one before the lock is released: a fraction of a millisecond."""
BATCH: Final = 128
"""The same where the blocks go to a tier, or come from it, in one batch."""
BULK_STEP: Final = 2048
"""The same where built-in functions process all blocks at once; see ``Shared.bulk_step``."""

_locks: WeakSet[StackLock] = WeakSet()


class StackLock:
    """A reentrant lock that patient threads leave to all others first.

    A background thread calls ``be_patient`` once. All other threads then have priority: when the
    holder releases the lock, a waiting one of them is next. Patient threads, the holder included,
    wait until it has had the lock. A thread that is not patient waits at most for other such
    threads that came before it.

    Without contention, taking it costs one attempt to acquire a lock that is written in C.
    """

    __slots__ = ("__weakref__", "_acquire", "_gate", "_patient", "_release", "held", "wanted")

    def __init__(self) -> None:
        lock: Any = threading.RLock()
        self._acquire: Callable[..., bool] = lock.acquire
        self._release: Callable[[], None] = lock.release
        self.held: Callable[[], bool] = lock._is_owned
        """Returns whether the calling thread holds the lock."""
        self._gate = threading.RLock()  # reentrant: a finalizer may need the lock while it waits
        """Held by the one thread that is next."""
        self.wanted = False
        """True if there is one: a thread that waits and is not patient."""
        self._patient: set[int] = set()
        _locks.add(self)

    def __enter__(self) -> None:
        if self.wanted or not self._acquire(False):
            self._wait()

    def __exit__(self, _type: object, _error: object, _traceback: object) -> None:
        self._release()

    def be_patient(self) -> None:
        """Let all other threads go before the calling thread from now on."""
        self._patient.add(threading.get_ident())

    def _wait(self) -> None:
        if self.held():
            self._acquire()
        elif threading.get_ident() in self._patient:
            self._wait_behind()
        else:
            with self._gate:
                self.wanted = True
                try:
                    self._acquire()
                finally:
                    self.wanted = False

    def _wait_behind(self) -> None:
        """Acquire the lock once no other thread wants it."""
        while True:
            if self.wanted:
                with self._gate:  # until that thread has the lock
                    pass
            self._acquire()
            if not self.wanted:
                return
            self._release()


def holding() -> bool:
    """Return whether the calling thread holds the lock of some cache; for tests."""
    return any(lock.held() for lock in _locks)
