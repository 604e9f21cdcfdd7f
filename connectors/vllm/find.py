"""What the cache has for one request: the longest prefix that every group can serve, pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvladder.connectors.base import Match
from kvladder.connectors.vllm.groups import Group, Groups
from kvladder.keys import BlockKey
from kvladder.policy.worth import Saves

ROUNDS_MAX = 8
"""How often a prefix is shortened because a tier did not give what it was thought to have."""

Keys = Callable[[Group, int, int], list[BlockKey]]
"""Names of a request's blocks ``start <= n < end`` of a group."""


@dataclass
class Held:
    """The blocks of one group that are pinned, or on their way."""

    first: int
    """Position of the first of them."""
    wanted: int
    match: Match


class Find:
    """A search for blocks after the first ``own`` tokens, up to token ``limit``.

    Groups of full attention are looked up first, since they serve only what has no hole. The others
    need what their kind of attention reads at the end of that prefix: where this is not there, the
    prefix gives way until it is. All of it is looked up in memory; what lies below host is then
    fetched, and the search shortens itself if a tier does not deliver.

    Parameters
    ----------
    groups, keys:
        What to look for.
    match:
        Pins the longest cached prefix of some keys, as far as that is faster than computing what
        it saves; see ``Connector.match``.
    lookup:
        How many leading ones of some keys are cached.
    own, limit:
        Multiples of ``groups.step``.
    behind:
        Tokens of other requests that are computed before.
    """

    def __init__(
        self,
        groups: Groups,
        keys: Keys,
        *,
        match: Callable[[Sequence[BlockKey], Saves], Match],
        lookup: Callable[[Sequence[BlockKey]], int],
        own: int,
        limit: int,
        behind: int = 0,
    ) -> None:
        self._groups = groups
        self._keys = keys
        self._match = match
        self._lookup = lookup
        self._behind = behind
        self.own = own
        self.end = limit
        """Where the prefix ends, in tokens; final once ``done``."""
        self.held: dict[int, Held] = {}
        self._rounds = 0
        self._done = False
        self._begin()
        self.unasked = limit - self.end
        """Tokens that were not even asked for, since nobody has them."""

    @property
    def pins(self) -> int:
        """How many blocks this search pins, or may come to pin."""
        return sum(
            held.match.blocks if held.match.done else held.wanted for held in self.held.values()
        )

    @property
    def done(self) -> bool:
        """Whether the answer is final; asks the matches."""
        while not self._done:
            whole = (self.held[g.index].match for g in self._groups.whole if g.index in self.held)
            if any(match.done and not match.blocks for match in whole):
                self.release()  # what other groups have is of no use alone
                return True
            if not all(held.match.done for held in self.held.values()):
                return False
            self._settle()
        return True

    def release(self) -> None:
        """Unpin everything. May be called again."""
        for held in self.held.values():
            held.match.release()
        self.held.clear()
        self.end, self._done = self.own, True

    def take(self) -> dict[int, Held]:
        """Hand over what is pinned to the caller, who releases it."""
        taken, self.held = self.held, {}
        self.end, self._done = self.own, True
        return taken

    def _begin(self) -> None:
        """Look the prefix up, and fetch it."""
        for group in self._groups.whole:
            self._shorten(group)
        while self._groups.partial and self.own < self.end:
            before = self.end
            for group in self._groups.partial:
                self._shorten(group)
            if self.end == before:
                break
        if self.own >= self.end:
            self.release()
            return
        for group in self._groups:
            start, end = self._needed(group)
            if start < end and group.index not in self.held:
                keys = self._keys(group, start, end)
                match = self._match(keys, self._saves(group, start, end))
                self.held[group.index] = Held(start, len(keys), match)

    def _saves(self, group: Group, start: int, end: int) -> Saves:
        """What need not be computed if these blocks come, the other groups' provided."""
        if group in self._groups.partial:
            return Saves(self.end - self.own, whole=True, behind=self._behind)
        return Saves((end - start) * group.tokens, behind=self._behind)

    def _needed(self, group: Group) -> tuple[int, int]:
        """The blocks of a group, from ``own`` on, that a prefix up to ``end`` reads."""
        start = max(group.first(self.end), self.own // group.tokens)
        return start, self.end // group.tokens

    def _shorten(self, group: Group) -> None:
        """Let the prefix end before the first block that it needs and that is not cached."""
        start, end = self._needed(group)
        if start < end and group.index not in self.held:
            found = self._lookup(self._keys(group, start, end))
            if found < end - start:
                self.end = self._groups.aligned((start + found) * group.tokens)

    def _settle(self) -> None:
        """Every match has its answer: take it, or look for a shorter prefix."""
        before = self.end
        for group in self._groups:
            held = self.held.get(group.index)
            if held is not None and held.match.blocks < held.wanted:
                got = self._groups.aligned((held.first + held.match.blocks) * group.tokens)
                self.end = max(self.own, min(self.end, got))
        if self.end == before or (self.end > self.own and not self._groups.partial):
            self._done = True
            return
        self._rounds += 1
        if self.end == self.own or self._rounds == ROUNDS_MAX:
            self.release()
            return
        for group in self._groups.partial:  # they were fetched for the end of a longer prefix
            held = self.held.pop(group.index, None)
            if held is not None:
                held.match.release()
        self._begin()
