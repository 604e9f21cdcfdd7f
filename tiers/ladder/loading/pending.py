"""A block on its way from a colder level into a slot of host, and the states that it passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from kvladder.tiers.label import LevelRead
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.records.meta import BlockMeta


class ReadState(IntEnum):
    """States of a pending read. It is an IntEnum because these are hashed in C."""

    READING = 0
    """Its batch is being read, or is about to be; fetches may join it."""
    RECALLED = 1
    """The key was removed meanwhile: the bytes that arrive are thrown away."""
    LANDED = 2
    """The block came: its slot belongs to host, or to the fetches that wait."""
    REROUTED = 3
    """The level did not deliver it: a read from a level further down replaces this one."""
    DROPPED = 4
    """The block does not come; its slot is free."""


READING, RECALLED = ReadState.READING, ReadState.RECALLED
"""Constants of the module, as a member of an enum is slow to look up for each block."""

NEXT: Mapping[ReadState, tuple[ReadState, ...]] = {
    ReadState.READING: (
        ReadState.LANDED,
        ReadState.RECALLED,
        ReadState.REROUTED,
        ReadState.DROPPED,
    ),
    ReadState.RECALLED: (ReadState.DROPPED,),
    ReadState.LANDED: (),
    ReadState.REROUTED: (),
    ReadState.DROPPED: (),
}
"""States that can follow each state; ``tiers/ladder/README.md`` has the same as a table."""


class PendingRead(LevelRead):
    """A block on its way from a colder level into a slot; at most one per key (single flight).

    It is the read that the level is given, with the claim on its slot: one object for each block.
    The stack's lock is held around every use.
    """

    meta: BlockMeta
    level: Level
    fetch: Fetch | None
    """First fetch that waits for it; ``position`` is the block's place in its prefix."""
    position: int
    state: ReadState = READING
    """Set by ``become`` alone."""
    others: list[tuple[Fetch, int]] | None = None
    """Fetches that wait for it beside ``fetch``, with positions."""

    @property
    def waiters(self) -> list[tuple[Fetch, int]]:
        """Fetches that wait for it, and the block's position in the prefix of each."""
        first = [] if self.fetch is None else [(self.fetch, self.position)]
        return first + (self.others or [])

    def join(self, fetch: Fetch, position: int) -> None:
        """Add a fetch that waits for it."""
        if self.fetch is None:
            self.fetch, self.position = fetch, position
        elif self.others is None:
            self.others = [(fetch, position)]
        else:
            self.others.append((fetch, position))


def become(reads: Sequence[PendingRead], state: ReadState) -> None:
    """Set the state of reads; assert that it can follow the one that each has."""
    before = None
    for one in reads:
        if one.state is not before:  # mostly all have the same
            before = one.state
            assert state in NEXT[before], f"{before.name} to {state.name}"
        one.state = state
