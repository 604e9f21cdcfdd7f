"""The lock of a cache's bookkeeping: short holds, and an engine's thread gets it next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

STEP: Final = 64
"""Blocks that are looked at one by one before the lock is released: a fraction of a millisecond."""
BATCH: Final = 128
"""The same where they go to a tier at once, or come from it."""
BULK_STEP: Final = 2048
"""The same where built-in functions run over all of them at once; see ``Shared.bulk_step``."""

_locks: WeakSet[StackLock] = WeakSet()


class StackLock:
    """A reentrant lock of which patient threads get out of the way of all others.

    Whoever works in the background calls ``be_patient`` in its thread, once. A thread that does
    not wait for others in vain: when the holder releases the lock it is next, and the patient
    ones, the holder included, wait until it has had its turn. Among threads that are not patient
    each waits for at most those that came before it.

    The path without contention is one attempt to acquire a lock that is written in C.
    """

    __slots__ = ("__weakref__", "_acquire", "_gate", "_patient", "_release", "held", "wanted")

    def __init__(self) -> None:
        lock: Any = threading.RLock()
        self._acquire: Callable[..., bool] = lock.acquire
        self._release: Callable[[], None] = lock.release
        self.held: Callable[[], bool] = lock._is_owned
        """Whether the calling thread holds the lock."""
        self._gate = threading.RLock()  # for finalizers that need the lock while it waits
        """Held by the one thread that is next."""
        self.wanted = False
        """Whether there is one: a thread that waits and is not patient."""
        self._patient: set[int] = set()
        _locks.add(self)

    def __enter__(self) -> None:
        if self.wanted or not self._acquire(False):
            self._wait()

    def __exit__(self, _type: object, _error: object, _traceback: object) -> None:
        self._release()

    def be_patient(self) -> None:
        """From now on the calling thread lets others go first."""
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
        """Acquire the lock once nobody else wants it."""
        while True:
            if self.wanted:
                with self._gate:  # until that thread has got it
                    pass
            self._acquire()
            if not self.wanted:
                return
            self._release()


def holding() -> bool:
    """Whether the calling thread holds the lock of some cache; for tests."""
    return any(lock.held() for lock in _locks)
