"""One search for a request's blocks, in all groups of its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.keys import BlockKey
from kvladder.manager import Fetch
from kvladder.metrics import Missed
from kvladder.policy.fetch_cost import AvoidedCompute

ROUNDS_MAX = 8
"""A search gives up when tiers have failed to deliver its prefix this number of times."""

Keys = Callable[[VllmGroup, int, int], list[BlockKey]]
"""Returns the keys of a request's blocks ``start <= n < end`` in a group."""


@dataclass
class Held:
    """The blocks of one group that a search pins or fetches."""

    first: int
    """Position of the first of these blocks in the request."""
    wanted: int
    match: Fetch


class Find:
    """A search for blocks after the first ``own`` tokens, up to token ``limit``.

    Groups of full attention are looked up first, because they can serve only a prefix without a
    hole. The other groups need the blocks that their kind of attention reads at the end of that
    prefix. If these are missing, the prefix is shortened until they are not. All lookups are in
    memory. Then the search fetches the blocks below host. If a tier does not deliver, it shortens
    the prefix again.

    Parameters
    ----------
    groups, keys:
        The groups to look in, and the keys to look for.
    match:
        Pins the longest cached prefix of some keys, as far as loading it is faster than computing;
        see ``Connector.match``.
    lookup:
        Returns the number of leading keys that are cached.
    own, limit:
        Multiples of ``groups.step``.
    behind:
        Tokens of other requests that the engine computes first.
    """

    def __init__(
        self,
        groups: VllmGroups,
        keys: Keys,
        *,
        match: Callable[[Sequence[BlockKey], AvoidedCompute], Fetch],
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
        """End of the prefix in tokens; final once ``done``."""
        self.held: dict[int, Held] = {}
        self.missed: tuple[Missed, ...] = ()
        """Why the first of its fetches that got less than it asked for did so."""
        self._rounds = 0
        self._done = False
        self._begin()
        self.unasked = limit - self.end
        """Number of tokens up to ``limit`` that were not fetched, because no level has them."""

    @property
    def pins(self) -> int:
        """Number of blocks that this search pins, or will pin if its fetches succeed."""
        return sum(
            held.match.blocks if held.match.done else held.wanted for held in self.held.values()
        )

    @property
    def done(self) -> bool:
        """True if the answer is final. Reading it polls the matches."""
        while not self._done:
            whole = (self.held[g.index].match for g in self._groups.whole if g.index in self.held)
            for match in whole:
                if match.done and not match.blocks:
                    self.missed = self.missed or match.missed
                    self.release()  # the blocks of other groups are useless alone
                    return True
            if not all(held.match.done for held in self.held.values()):
                return False
            self._settle()
        return True

    def release(self) -> None:
        """Unpin all blocks, and end the search without a hit. May be called again."""
        for held in self.held.values():
            held.match.release()
        self.held.clear()
        self.end, self._done = self.own, True

    def take(self) -> dict[int, Held]:
        """Hand the pinned blocks over to the caller, which releases them."""
        taken, self.held = self.held, {}
        self.end, self._done = self.own, True
        return taken

    def _begin(self) -> None:
        """Look up the longest prefix, and begin to fetch it."""
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

    def _saves(self, group: VllmGroup, start: int, end: int) -> AvoidedCompute:
        """Return what the engine need not compute if these blocks and the other groups' come."""
        if group in self._groups.partial:
            return AvoidedCompute(self.end - self.own, whole=True, behind=self._behind)
        return AvoidedCompute((end - start) * group.tokens, behind=self._behind)

    def _needed(self, group: VllmGroup) -> tuple[int, int]:
        """Return the range of a group's blocks from ``own`` on that a prefix to ``end`` reads."""
        start = max(group.first(self.end), self.own // group.tokens)
        return start, self.end // group.tokens

    def _shorten(self, group: VllmGroup) -> None:
        """End the prefix before the first block that the group needs and no level has."""
        start, end = self._needed(group)
        if start < end and group.index not in self.held:
            found = self._lookup(self._keys(group, start, end))
            if found < end - start:
                self.end = self._groups.aligned((start + found) * group.tokens)

    def _settle(self) -> None:
        """Take the answers of all matches; search again if they allow only a shorter prefix."""
        before = self.end
        for group in self._groups:
            held = self.held.get(group.index)
            if held is not None and held.match.blocks < held.wanted:
                self.missed = self.missed or held.match.missed
                got = self._groups.aligned((held.first + held.match.blocks) * group.tokens)
                self.end = max(self.own, min(self.end, got))
        if self.end == before or (self.end > self.own and not self._groups.partial):
            self._done = True
            return
        self._rounds += 1
        if self.end == self.own or self._rounds == ROUNDS_MAX:
            self.release()
            return
        for group in self._groups.partial:  # their blocks belong to the end of the longer prefix
            held = self.held.pop(group.index, None)
            if held is not None:
                held.match.release()
        self._begin()
