"""Sessions: the blocks of each session's requests, and which of them end with the session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from kvladder.keys import BlockKey

SESSIONS_MAX: Final = 10_000
"""Largest number of sessions that are remembered, and of ended ones."""
BLOCKS_MAX: Final = 1 << 18
"""Largest number of blocks remembered for all sessions together."""
LATER: Final = "\0later"
"""Stands for a session's name if the caller names the session later, in other calls."""


@dataclass(slots=True)
class _Session:
    last: tuple[Sequence[Sequence[BlockKey]], str] | None = None
    """Blocks that the next request begins with, by group of layers, and their salt: those of the
    last finished request. None before the first one has finished."""
    keys: dict[BlockKey, None] = field(default_factory=dict[BlockKey, None])
    """Blocks of all requests, in the order in which they came."""


class Sessions:
    """Remembers the blocks of sessions; for lack of room, it forgets the least recently used.

    A session owns the blocks that its requests brought in, until a request of another session, or
    of none, uses one of them. The end of a session gives up the blocks that it owns and no others.

    Pure and synchronous. With a ``lock`` that its thread may take again, any thread may call it. A
    session begins with its first use. A session that was forgotten to make room has not ended: it
    begins again with its next use, and owns no blocks that it brought in before.
    """

    def __init__(
        self,
        *,
        sessions_max: int = SESSIONS_MAX,
        blocks_max: int = BLOCKS_MAX,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._max = sessions_max
        self._blocks_max = blocks_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._owners: dict[BlockKey, str] = {}
        """Owning session by block; the owner brought it in, and no other request has used it."""
        self._blocks = 0
        self._lock = lock or nullcontext()
        """Held while sessions, and the blocks of one, change; ``met`` goes without."""

    def __len__(self) -> int:
        return len(self._sessions)

    def require_open(self, name: str) -> None:
        """Raise ValueError if the session has ended."""
        if name in self._ended:
            raise ValueError(f"session {name!r} has ended: expected a new name")

    def use(self, name: str, runs: Sequence[Sequence[BlockKey]], salt: str = "") -> None:
        """Record the blocks of a finished request of the session, by group, and their salt.

        Raises
        ------
        ValueError
            The session has ended.
        """
        with self._lock:
            self.require_open(name)
            session = self._begun(name)
            session.last = runs, salt
            for run in runs:
                self.met(name, run)
                self._add(session, run)
            self._make_room()

    def begin_again(self, name: str) -> None:
        """Let a session that has ended be used again, for engines that give names again."""
        self._ended.pop(name, None)

    def brought(self, name: str | None, keys: Sequence[BlockKey]) -> None:
        """Record that a request brings in blocks that were in no level.

        ``name`` is its session; None, or one that has ended, stands for a request without one.
        """
        if name is None:
            self.met(None, keys)
            return
        with self._lock:
            if name in self._ended:
                self.met(None, keys)
            elif keys:
                self._add(self._begun(name), keys)
                self._owners.update(dict.fromkeys(keys, name))
                self._make_room()

    def met(self, name: str | None, keys: Iterable[BlockKey]) -> None:
        """Record that a request of a session, or of none, wants blocks that may be cached.

        From now on no other session owns them.
        """
        owners = self._owners
        if owners and name != LATER and not owners.keys().isdisjoint(keys):
            for key in keys:
                if owners.get(key, name) != name:
                    owners.pop(key, None)

    def saved(self, name: str | None, keys: Sequence[BlockKey], new: Sequence[BlockKey]) -> None:
        """Record that a request saves ``keys``; those that are ``new`` were in no level."""
        if name == LATER or (name is None and not self._owners):
            return  # no session is involved, as in most caches, or the caller names it later
        self.met(name, keys)
        self.brought(name, new)

    def last(self, name: str) -> tuple[Sequence[Sequence[BlockKey]], str]:
        """Return the blocks of its last finished request, by group, and their salt.

        Raises
        ------
        ValueError
            The session has ended, or is not known.
        """
        self.require_open(name)
        session = self._sessions.get(name)
        if session is None or session.last is None:
            raise ValueError(f"session {name!r} is not known: expected one with a finished request")
        return session.last

    def owned(self, name: str) -> list[BlockKey]:
        """Return the blocks that the session brought in and no other request has used since.

        Raises
        ------
        ValueError
            The session has ended, or is not known.
        """
        with self._lock:
            self.last(name)
            return [key for key in self._sessions[name].keys if self._owners.get(key) == name]

    def blocks(self, name: str) -> tuple[list[BlockKey], str]:
        """Return all blocks of a session's requests, and the salt of the last one.

        That includes blocks that other requests use, too. Raises ValueError if the session is not
        known: it had no request, has ended, or was forgotten.
        """
        with self._lock:
            session = self._sessions.get(name)
            if session is not None:
                return list(session.keys), session.last[1] if session.last else ""
        raise ValueError(f"session {name!r} is not known: it has ended, or had no request yet")

    def purge(self, name: str) -> tuple[list[BlockKey], str]:
        """Return ``blocks`` and forget them: the session begins anew with its next use."""
        with self._lock:
            found = self.blocks(name)
            self._forget(name, self._sessions.pop(name))
        return found

    def end(self, name: str) -> list[BlockKey]:
        """End the session, and return the blocks that it ``owned``.

        Raises
        ------
        ValueError
            The session has ended, or is not known.
        """
        with self._lock:
            owned = self.owned(name)
            self._ended[name] = None
            if len(self._ended) > self._max:
                self._ended.popitem(last=False)
            self._forget(name, self._sessions.pop(name))
        return owned

    def _begun(self, name: str) -> _Session:
        session = self._sessions.setdefault(name, _Session())
        self._sessions.move_to_end(name)
        return session

    def _add(self, session: _Session, keys: Collection[BlockKey]) -> None:
        before = len(session.keys)
        session.keys.update(dict.fromkeys(keys))
        self._blocks += len(session.keys) - before

    def _make_room(self) -> None:
        # The session used last stays, however large it is: its end is still to come.
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._max or self._blocks > self._blocks_max
        ):
            self._forget(*self._sessions.popitem(last=False))

    def _forget(self, name: str, session: _Session) -> None:
        self._blocks -= len(session.keys)
        for key in session.keys:
            if self._owners.get(key) == name:
                self._owners.pop(key, None)

    def check(self) -> None:
        """Assert that all counts agree; O(n), for tests."""
        assert self._blocks == sum(len(one.keys) for one in self._sessions.values())
        assert all(key in self._sessions[name].keys for key, name in self._owners.items())
        assert not self._sessions.keys() & self._ended.keys()
        assert len(self._sessions) <= self._max
        assert len(self._ended) <= self._max
