"""Fetches and saves that their owner lost before it released them: their slots are given back."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable

from kvladder.notices import Notices

HINT = "call release(), commit(), abort() or close() in a finally block"


class Unreleased:
    """A queue that finalizers fill and that the next fetch, save or ``stats`` empties.

    A finalizer may run at any moment, also in the middle of code that holds the stack's lock. So it
    only appends here.

    Parameters
    ----------
    notices:
        Where the loss is logged.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self.lost = deque[tuple[str, Callable[[], object]]]()
        """What ``settle`` has to give back: its kind, and the call that does it."""
        self._lock = threading.Lock()
        self._closed = False
        self.counts = Counter[str]()
        """Number of lost objects so far, by kind."""

    def add(
        self,
        kind: str,
        give_back: Callable[[], object],
        warn: Callable[..., object] = warnings.warn,  # bound now: modules end before objects
    ) -> None:
        """Queue ``give_back`` of an unreleased object, and warn; for ``__del__``."""
        if not self._closed:
            self.lost.append((kind, give_back))
            warn(f"a {kind} was not released: {HINT}", ResourceWarning, stacklevel=3)

    def settle(self) -> None:
        """Give back all that was lost. The stack's lock is not held."""
        while self.lost:
            try:
                kind, give_back = self.lost.popleft()
            except IndexError:  # another thread was faster
                return
            with self._lock:
                self.counts[kind] += 1
            self._notices.say(
                "unreleased", f"a {kind} was garbage-collected before its release: {HINT}"
            )
            give_back()

    def close(self, pinned: int, reserved: int) -> None:
        """Report how many blocks are still held when the cache closes. Later losses are ignored."""
        self.settle()
        self._closed = True
        if pinned or reserved:
            what = f"{pinned} blocks of fetches and {reserved} of saves were not released"
            self._notices.say("unreleased", f"closing: {what}: {HINT}")
