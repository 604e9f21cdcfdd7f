"""What one client of an exporter may use at most, and the count of its messages."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvladder.metrics import summed

SESSIONS_MAX: Final = 256
OPERATIONS_MAX: Final = 256
"""Highest number of pending operations of one session, uncommitted grants included."""
HELD_S: Final = 60.0
"""Seconds in which a client must write blocks that it was granted slots for, or take its reads."""
HANDSHAKE_MS: Final = 3000
"""Milliseconds in which a connection must show its key."""
MESSAGES_MAX: Final = 4096
"""Highest number of messages of one connection in a second."""
WINDOW_S: Final = 1.0


class MessageCounter:
    """Counts the messages of each connection in the current second, and of the last one."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._counts: Counter[bytes] = Counter()
        self._names: dict[bytes, str] = {}
        self._last: dict[str, int] = {}

    def allows(self, connection: bytes, name: str, now_s: float) -> bool:
        """Count a message; return whether the connection has sent no more than it may."""
        self._roll(now_s)
        self._counts[connection] += 1
        self._names[connection] = name
        return self._counts[connection] <= MESSAGES_MAX

    def last(self, now_s: float) -> dict[str, int]:
        """Return the number of messages of the last whole second, by the client's name."""
        self._roll(now_s)
        return self._last

    def _roll(self, now_s: float) -> None:
        """Begin another second if the current one is over."""
        if now_s - self._since_s < WINDOW_S:
            return
        is_last = now_s - self._since_s < 2 * WINDOW_S
        rows = ((self._names[one], count) for one, count in self._counts.items())
        self._last = summed(rows) if is_last else {}
        self._since_s = now_s
        self._counts.clear()
        self._names.clear()
