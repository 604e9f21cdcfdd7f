"""Which blocks of a simulated run end with a session: who used each since it was brought in."""

from __future__ import annotations

from collections.abc import Iterable

from kvladder.keys import BlockKey
from kvladder.manager import CacheManager

NOBODY: str | None = None
"""In place of a session's name: a request that names none, or a process that is gone."""


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
        """End a session, and assert that nothing happens to what it does not own.

        Returns what it owned, None if it had no request.
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


def _worth(manager: CacheManager) -> dict[tuple[str, BlockKey], int]:
    """The priority of each block in each level."""
    found: dict[tuple[str, BlockKey], int] = {}
    for name, index in manager._stack.indexes.items():
        for key in index:
            place = index.place(key)
            assert place is not None
            found[name, key] = index.priority(place)
    return found
