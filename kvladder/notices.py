"""Notices: log a recurring fault once a minute instead of once a block."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

RECENT_MAX: Final = 100
"""Largest number of recent notices that are kept."""
logger = logging.getLogger("kvladder")


class Notice(NamedTuple):
    """A notice that was logged, or left out of the log."""

    at_s: float
    kind: str
    text: str


class Notices:
    """Logs the first notice of a kind, then at most one per ``every_s``, with the number left out.

    Parameters
    ----------
    now:
        The injected clock, monotonic seconds.
    held:
        Returns whether the calling thread holds a lock under which nothing may be logged, since
        a log handler may block. Notices under this lock are logged a little later.
    post:
        Calls a function soon, in another thread or in this one after it has released the lock.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        every_s: float = 60.0,
        held: Callable[[], bool] = lambda: False,
        post: Callable[..., object] | None = None,
    ) -> None:
        self._now = now
        self._locked = held
        self._post = post
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._recent: deque[Notice] = deque(maxlen=RECENT_MAX)

    def recent(self) -> list[dict[str, Any]]:
        """Return the last ``RECENT_MAX`` notices, newest first, with their age in seconds."""
        now = self._now()
        kept = reversed(self._recent.copy())
        return [{"age_s": now - one.at_s, "kind": one.kind, "text": one.text} for one in kept]

    def say(self, kind: str, message: str) -> None:
        """Log ``message`` as a warning unless one of this ``kind`` was logged in ``every_s``."""
        now = self._now()
        self._recent.append(Notice(now, kind, message))
        last = self._last.get(kind)
        if last is not None and now - last < self._every_s:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        held = self._held.pop(kind, 0)
        self._last[kind] = now
        more = ""
        if held and last is not None:
            more = f" ({held} more like this in the last {now - last:.0f} s)"
        if self._post is not None and self._locked():
            self._post(logger.warning, "%s%s", message, more)
        else:
            logger.warning("%s%s", message, more)
