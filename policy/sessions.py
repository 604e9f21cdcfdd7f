"""Sessions: which blocks the requests of one user have, who comes back for them or never will."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvladder.keys import BlockKey

SESSIONS_MAX: Final = 10_000
"""Sessions that are remembered, and as many that have ended."""
BLOCKS_MAX: Final = 1 << 18
"""Blocks of all of them together."""


@dataclass(slots=True)
class _Session:
    runs: Sequence[Sequence[BlockKey]] = ()
    """Of the last request: by group of layers, the blocks that the next one begins with."""
    salt: str = ""
    keys: dict[BlockKey, None] = field(default_factory=dict[BlockKey, None])
    """Of all requests, in the order in which they came."""


class Sessions:
    """Remembers the blocks of sessions, of those that were used last as many as there is room for.

    Pure and synchronous, one thread at a time. A session begins with its first use. What is
    forgotten here to make room is not over: it begins anew with the next use.
    """

    def __init__(self, *, sessions_max: int = SESSIONS_MAX, blocks_max: int = BLOCKS_MAX) -> None:
        self._max = sessions_max
        self._blocks_max = blocks_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._users: Counter[BlockKey] = Counter()
        """How many sessions have a block."""
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def require_open(self, name: str) -> None:
        """Raise ValueError if the session has ended."""
        if name in self._ended:
            raise ValueError(f"session {name!r} has ended: expected the name of another one")

    def use(self, name: str, runs: Sequence[Sequence[BlockKey]], salt: str = "") -> None:
        """A request of the session has these blocks, by group; ``salt`` is bound into their keys.

        Raises
        ------
        ValueError
            The session has ended.
        """
        self.require_open(name)
        session = self._sessions.setdefault(name, _Session())
        self._sessions.move_to_end(name)
        session.runs, session.salt = runs, salt
        for run in runs:
            new = [key for key in dict.fromkeys(run) if key not in session.keys]
            session.keys.update(dict.fromkeys(new))
            self._users.update(new)
            self._blocks += len(new)
        # The session itself stays, however large it is: its end is still to come.
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._max or self._blocks > self._blocks_max
        ):
            self._forget(*self._sessions.popitem(last=False))

    def last(self, name: str) -> tuple[Sequence[Sequence[BlockKey]], str]:
        """The blocks of its last request, by group, and their salt.

        Raises
        ------
        ValueError
            The session has ended, or nobody knows of it.
        """
        self.require_open(name)
        if name not in self._sessions:
            raise ValueError(f"session {name!r} is not known: expected one that had a request")
        session = self._sessions[name]
        return session.runs, session.salt

    def end(self, name: str) -> list[BlockKey]:
        """The session is over; its blocks that no other session has.

        Raises
        ------
        ValueError
            It has ended before, or nobody knows of it.
        """
        self.last(name)
        self._ended[name] = None
        if len(self._ended) > self._max:
            self._ended.popitem(last=False)
        return self._forget(name, self._sessions.pop(name))

    def _forget(self, _: str, session: _Session) -> list[BlockKey]:
        self._blocks -= len(session.keys)
        self._users.subtract(list(session.keys))
        alone = [key for key in session.keys if not self._users[key]]
        for key in alone:
            del self._users[key]
        return alone

    def check(self) -> None:
        """Assert that all counts agree; O(n), for tests."""
        counted = Counter(key for one in self._sessions.values() for key in one.keys)
        assert counted == self._users
        assert self._blocks == counted.total()
        assert not self._sessions.keys() & self._ended.keys()
        assert len(self._sessions) <= self._max
        assert len(self._ended) <= self._max
