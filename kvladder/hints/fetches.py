"""Fetches that hints begin: a few at once, the others wait for these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from kvladder.hints.scopes import Scoped
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager, Fetch
from kvladder.policy.fetch_cost import ANYTHING

PREFETCHES_MAX = 16
"""Number of fetches for hints in flight at once."""
WAITING_MAX = 256
"""Number of actions that may wait until such a fetch may begin."""


@dataclass(slots=True, eq=False)
class Fetching:
    """A fetch for a hint, and what to do with the blocks once it is done."""

    message: tuple[str, str]
    begin: Callable[[], Fetch]
    then: Callable[[], object] | None
    is_begun: bool = False
    fetch: Fetch | None = None


class HintFetches:
    """Brings blocks to host memory for hints. Any thread may call it; no call waits for a tier."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._lock = Lock()
        self._fetching: list[Fetching] = []
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """True if a fetch is in flight, or waits."""
        return bool(self._fetching)

    @property
    def in_flight(self) -> int:
        """Number of fetches that have begun and are not ended."""
        with self._lock:
            return sum(one.fetch is not None for one in self._fetching)

    def begin(
        self,
        message: tuple[str, str],
        keys: Sequence[BlockKey],
        scope: Scoped,
        then: Callable[[], object] | None = None,
        deadline_s: float | None = None,
    ) -> bool | None:
        """Bring blocks up now or later, then run ``then``.

        Returns whether it has to wait for others; None if too many wait.
        """

        def begin() -> Fetch:
            return self._manager.fetch(
                keys, salt=scope.salt, saves=ANYTHING, is_use=False, deadline_s=deadline_s
            )

        one = Fetching(message, begin, then)
        with self._lock:
            if self._is_closed or len(self._fetching) >= PREFETCHES_MAX + WAITING_MAX:
                return None
            self._fetching.append(one)
        self._begin_waiting()
        return one.fetch is None

    def _begin_waiting(self) -> None:
        """Begin fetches, oldest first, while fewer than the limit are in flight."""
        while True:
            with self._lock:
                waiting = [one for one in self._fetching if not one.is_begun]
                if not waiting or len(self._fetching) - len(waiting) >= PREFETCHES_MAX:
                    return
                one = waiting[0]
                one.is_begun = True
            fetch = one.begin()
            with self._lock:
                one.fetch = fetch
                is_wanted = one in self._fetching
            if not is_wanted:  # cancelled, or closed, meanwhile
                fetch.release()

    def poll(self) -> None:
        """End the fetches that are done, and begin those that waited for them."""
        with self._lock:
            ended = [one for one in self._fetching if one.fetch is not None and one.fetch.done]
            self._fetching = [one for one in self._fetching if one not in ended]
        for one in ended:
            if one.then is not None:
                one.then()
            if one.fetch is not None:
                one.fetch.release()
        self._begin_waiting()

    def cancel(self, message: tuple[str, str]) -> int | None:
        """Give up the fetches of a message; return the number of their blocks, None without any."""
        with self._lock:
            own = [one for one in self._fetching if one.message == message]
            self._fetching = [one for one in self._fetching if one not in own]
        blocks = 0
        for one in own:
            if one.fetch is not None:
                blocks += len(one.fetch.keys)
                one.fetch.release()
        return blocks if own else None

    def close(self) -> None:
        """Give up all fetches, and begin no other; may be called again."""
        with self._lock:
            fetching, self._fetching = self._fetching, []
            self._is_closed = True
        for one in fetching:
            if one.fetch is not None:
                one.fetch.release()
