"""The blocks of a simulated run that end with a session: each block's users since it was loaded."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.testing.stacks import SimCache

NOBODY: str | None = None
"""The session of a request without one, or of an ended process."""


class Claims:
    """Per block, the sessions of all requests that wanted it since it was brought in."""

    def __init__(self) -> None:
        self._users: dict[BlockKey, set[str | None]] = {}
        self._named: dict[int, int] = {}

    def name(self, number: int) -> str:
        """The session of this number that has not ended."""
        return f"{number}.{self._named.get(number, 0)}"

    def brought(self, session: str | None, keys: Iterable[BlockKey]) -> None:
        """A request saves blocks that were nowhere."""
        self._users.update((key, {session}) for key in keys)

    def met(self, session: str | None, keys: Iterable[BlockKey]) -> None:
        """A request looks for blocks, or offers some that are here."""
        for key in keys:
            self._users.setdefault(key, {NOBODY}).add(session)

    def restart(self) -> None:
        """Another process begins, which knows of no session."""
        self._users.clear()

    def end(self, manager: CacheManager, number: int) -> list[BlockKey] | None:
        """End a session, and assert that other blocks stay.

        Returns the blocks it owned, None if it had no request.
        """
        name = self.name(number)
        before = _worth(manager)
        try:
            ended = manager.end_session(name)
        except ValueError:
            return None
        self._named[number] = self._named.get(number, 0) + 1
        owned = {key for key, users in self._users.items() if users == {name}}
        assert set(ended) == owned, "a session does not end with what it owned"
        after = _worth(manager)
        hurt = {key for level, key in before if before[level, key] != after.get((level, key))}
        assert hurt <= owned, "the end of a session takes what others use"
        return ended


class Others:
    """The blocks of other salts in host, before a salt saves some."""

    def __init__(self, cache: SimCache, salt: bytes, keys: Iterable[BlockKey]) -> None:
        self._index = cache.stack.host.index
        self._salt, self._own = salt, {*keys}
        claims, lent = cache.arena.claims, cache.stack.host.index.lent
        coming = sum(its == salt and claims(slot) > 0 for slot, its in lent.items())
        self._room = self._index.spare(salt) - coming
        self._before = self._held()

    def _held(self) -> set[BlockKey]:
        found = ((key, self._index.place(key)) for key in self._index)
        salt = self._index.salt
        others = {key for key, place in found if place is not None and salt(place) != self._salt}
        return others - self._own

    def check(self) -> None:
        """Assert that no other salt lost blocks, except for room that this salt may have."""
        if self._room < inf:
            gone = len(self._before - self._held())
            assert gone <= max(0, self._room), "others give way to a salt above its quota"


def _worth(manager: CacheManager) -> dict[tuple[str, BlockKey], int]:
    """The priority of each block in each level."""
    found: dict[tuple[str, BlockKey], int] = {}
    for name, index in manager._stack.indexes.items():
        for key in index:
            place = index.place(key)
            assert place is not None
            found[name, key] = index.priority(place)
    return found
