"""Device memory that goes from one pool of a model to another, by what each of them lacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.requests.requests import Requests
from kvladder.gpu.sizing.divide import Division
from kvladder.gpu.tree.names import DeviceSlot

PERIOD: Final = 32
"""Every time pools were asked for one such part of their memory, a region may move."""
PATIENCE: Final = 64
"""Polls for which a region's blocks are waited for, until it stays where it is."""
REST: Final = 4
"""Periods in which a region does not go back; twice as many each time that one does."""
REST_MAX: Final = 64

Copy = Callable[[int, Sequence[tuple[DeviceSlot, DeviceSlot]]], None]
"""Copies blocks of a group: what is in the first slot of each pair to the second."""


@dataclass
class _Move:
    """A region on its way from one pool to another."""

    region: int
    donor: int
    receiver: int
    left: list[DeviceSlot]
    """Of the donor's slots in the region, those that it still has."""
    taken: list[DeviceSlot] = field(default_factory=list[DeviceSlot])
    polls: int = 0

    def take(self, taken: Sequence[DeviceSlot]) -> None:
        """These are not the donor's any more."""
        gone = set(taken)
        self.taken += taken
        self.left = [slot for slot in self.left if slot not in gone]

    def wait(self) -> None:
        """One more poll."""
        self.polls += 1


class Rebalance:
    """Moves regions between the pools of one device cache. Calls come from the engine's thread.

    A pool gets a region if it had no slots for what it was asked, or if it alone lacks blocks of
    prompts that all others have kept. It comes from one that did without as many slots, that lacks
    less, and that can hold a sequence after it. Blocks that somebody holds stay where they are: a
    region goes when the last of its blocks was released. What is cached in it moves to other slots
    of the pool, whose least valuable blocks leave.

    Parameters
    ----------
    division:
        In regions, see ``in_regions``.
    copy:
        Called before slots are handed out again.
    """

    def __init__(self, requests: Requests, division: Division, copy: Copy) -> None:
        self._requests = requests
        self._pools: list[BlockPool] = [one.pool for one in requests.sequences]
        self._copy = copy
        self._block_bytes = [share.block_bytes for share in division.shares]
        self._needed = [share.needed for share in division.shares]
        self._per = [division.region_bytes // size for size in self._block_bytes]
        """Slots of each pool in a region."""
        self._due_bytes = division.regions * division.region_bytes // PERIOD
        self._owner = [
            at
            for at, (share, per) in enumerate(zip(division.shares, self._per, strict=True))
            for _ in range(share.blocks // per)
        ]
        """By region, whose it is; the donor's while it is on its way."""
        self._move: _Move | None = None
        self._moved = self._stayed = self._period = 0
        self._rests: dict[tuple[int, int], int] = {}
        """By donor and receiver, the period from which on a region may go that way again."""
        self._rest = REST
        self._last: tuple[int, int] | None = None
        requests.watch()
        self._begin()

    def counts(self) -> dict[str, int]:
        """How many regions went to another pool, and how many stayed since they were in use."""
        return {"moved": self._moved, "stayed": self._stayed}

    def poll(self) -> None:
        """Go on with what is under way, or see whether it is time for something; never waits."""
        self._polls += 1
        for at, pool in enumerate(self._pools):
            self._used[at] += pool.used
        if self._move is not None:
            self._advance(self._move)
        elif self._asked_bytes() - self._before_bytes >= self._due_bytes:
            self._decide()
            self._begin()

    # ---- when, and from whom to whom

    def _asked_bytes(self) -> int:
        """What pools were asked for since they were made, in vain or not."""
        pools = zip(self._pools, self._block_bytes, strict=True)
        return sum((pool.stats.allocated + pool.short) * size for pool, size in pools)

    def _begin(self) -> None:
        """A period begins."""
        self._period += 1
        self._before_bytes = self._asked_bytes()
        self._short = [pool.short for pool in self._pools]
        self._lacking = list(self._requests.lacking)
        self._polls = 0
        self._used = [0] * len(self._pools)
        """Slots that were held, added up over the polls."""

    def _decide(self) -> None:
        """Begin to move a region where one pool had less than it needed and another had more."""
        short = [
            (pool.short - before) * size
            for pool, before, size in zip(self._pools, self._short, self._block_bytes, strict=True)
        ]
        lacking = [
            now - before for now, before in zip(self._requests.lacking, self._lacking, strict=True)
        ]
        at = range(len(self._pools))
        receiver = max(at, key=lambda one: (short[one], lacking[one]))
        need = short[receiver] or lacking[receiver]
        if not short[receiver] and need < self._worth(receiver):
            return
        donors = [
            one
            for one in at
            if one != receiver
            and (2 * short[one], 2 * lacking[one])[not short[receiver]] < need
            and self._spares(one)
            and self._period >= self._rests.get((one, receiver), 0)
        ]
        if donors:
            donor = min(donors, key=lambda one: (short[one], lacking[one]))
            self._send(donor, receiver)

    def _worth(self, receiver: int) -> int:
        """How many tokens of prompts have to be lacking for a region to be worth its move."""
        return self._per[receiver] * self._requests.groups[receiver].block_tokens

    def _spares(self, donor: int) -> bool:
        """Whether a pool without a region holds what it held, and what one sequence needs."""
        left = self._pools[donor].blocks - self._per[donor]
        return left >= self._needed[donor] and left * self._polls >= self._used[donor]

    def _send(self, donor: int, receiver: int) -> None:
        """Choose the donor's region of which least is held, and have it go."""
        pool = self._pools[donor]
        regions = [at for at, owner in enumerate(self._owner) if owner == donor]
        region = min(regions, key=lambda at: pool.held(self._slots(donor, at)))
        self._move = _Move(region, donor, receiver, self._slots(donor, region))
        self._advance(self._move)

    def _slots(self, group: int, region: int) -> list[DeviceSlot]:
        """Of a region, as a pool numbers them."""
        per = self._per[group]
        return [DeviceSlot(slot) for slot in range(region * per, (region + 1) * per)]

    # ---- a region on its way

    def _advance(self, move: _Move) -> None:
        """Take what of the region nobody holds; hand it over, or leave it, if it is time."""
        donor = self._pools[move.donor]
        move.wait()
        self._vacate(move)
        # There is no other room for what is idle in it: what is worth least leaves the pool.
        idle = len(move.left) - donor.held(move.left)
        if idle and not donor.leaving:
            donor.evict(idle)
            self._vacate(move)
        if not move.left:
            self._arrive(move)
        elif move.polls > PATIENCE:
            donor.admit(move.taken)
            self._stayed += 1
            self._move = None

    def _vacate(self, move: _Move) -> None:
        """Take what is free, and what is idle as far as it has another slot to go to."""
        donor = self._pools[move.donor]
        if donor.held(move.left) == len(move.left):
            return
        taken, moves = donor.vacate(move.left)
        if moves:
            self._copy(move.donor, moves)
        move.take(taken)

    def _arrive(self, move: _Move) -> None:
        """The region is the receiver's; the next ones do not go back soon."""
        way, back = (move.donor, move.receiver), (move.receiver, move.donor)
        self._owner[move.region] = move.receiver
        self._pools[move.receiver].admit(self._slots(move.receiver, move.region))
        self._rest = min(REST_MAX, 2 * self._rest) if self._last == back else self._rest
        self._last = way
        self._rests[back] = self._period + self._rest
        self._moved += 1
        self._move = None

    def check(self) -> None:
        """Assert that every region has one owner, who has its slots; for tests."""
        for at, (pool, per) in enumerate(zip(self._pools, self._per, strict=True)):
            gone = len(self._move.taken) if self._move and self._move.donor == at else 0
            assert pool.blocks == self._owner.count(at) * per - gone
            assert pool.blocks >= self._needed[at]
