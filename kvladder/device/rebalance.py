"""Moves device memory between the pools of a model, to the pool that lacks most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.requests.requests import Requests
from kvladder.gpu.sizing.divide import Division
from kvladder.gpu.tree.names import DeviceSlot

PERIOD: Final = 32
"""A period ends when pools were asked for 1 / PERIOD of their memory; a region may move then."""
PATIENCE: Final = 64
"""Polls to wait for the held blocks of a region; after that the region stays."""
REST: Final = 4
"""Periods in which no region moves back. The number doubles each time that one does."""
REST_MAX: Final = 64

Copy = Callable[[int, Sequence[tuple[DeviceSlot, DeviceSlot]]], None]
"""Copies blocks of a group, from the first slot of each pair to the second."""


@dataclass
class _Move:
    """A region that moves from one pool to another."""

    region: int
    donor: int
    receiver: int
    left: list[DeviceSlot]
    """Slots of the region that the donor still has."""
    taken: list[DeviceSlot] = field(default_factory=list[DeviceSlot])
    polls: int = 0

    def take(self, taken: Sequence[DeviceSlot]) -> None:
        """Note slots that the donor has given up."""
        gone = set(taken)
        self.taken += taken
        self.left = [slot for slot in self.left if slot not in gone]

    def wait(self) -> None:
        """Count a poll."""
        self.polls += 1


class Rebalance:
    """Moves regions between the pools of one device cache. Calls come from the engine's thread.

    A pool gets a region if it was short of slots, or if it alone lacked blocks of prompts that all
    others had kept. The donor lacked less than half as much. Without the region it still holds the
    blocks that were held, and one sequence. Held blocks stay where they are: a region moves when
    the last of its blocks has been released. Cached blocks in it move to other slots of the donor,
    which evicts its least valuable blocks.

    Parameters
    ----------
    division:
        A division in regions, see ``in_regions``.
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
        """Number of slots in a region, by pool."""
        self._due_bytes = division.regions * division.region_bytes // PERIOD
        self._owner = [
            at
            for at, (share, per) in enumerate(zip(division.shares, self._per, strict=True))
            for _ in range(share.blocks // per)
        ]
        """Pool of each region; while a region moves, its donor."""
        self._move: _Move | None = None
        self._moved = self._stayed = self._period = 0
        self._rests: dict[tuple[int, int], int] = {}
        """First period in which a region may move again, by donor and receiver."""
        self._rest = REST
        self._last: tuple[int, int] | None = None
        requests.watch()
        self._begin()

    def counts(self) -> dict[str, int]:
        """Return how many regions moved, and how many stayed because they were in use."""
        return {"moved": self._moved, "stayed": self._stayed}

    def poll(self) -> None:
        """Continue a move, or begin one at the end of a period. Never waits."""
        self._polls += 1
        for at, pool in enumerate(self._pools):
            self._used[at] += pool.used
        if self._move is not None:
            self._advance(self._move)
        elif self._asked_bytes() - self._before_bytes >= self._due_bytes:
            self._decide()
            self._begin()

    # ---- choice of donor and receiver

    def _asked_bytes(self) -> int:
        """Return the bytes that pools were asked for since they were made, found or not."""
        pools = zip(self._pools, self._block_bytes, strict=True)
        return sum((pool.stats.allocated + pool.short) * size for pool, size in pools)

    def _begin(self) -> None:
        """Begin a period."""
        self._period += 1
        self._before_bytes = self._asked_bytes()
        self._short = [pool.short for pool in self._pools]
        self._lacking = list(self._requests.lacking)
        self._polls = 0
        self._used = [0] * len(self._pools)
        """Number of held slots by pool, summed over the polls."""

    def _decide(self) -> None:
        """Begin to move a region if one pool had less than it needed and another can spare one."""
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
        """Return the least number of lacking tokens of prompts that justifies moving a region."""
        return self._per[receiver] * self._requests.groups[receiver].block_tokens

    def _spares(self, donor: int) -> bool:
        """Return whether a pool, less one region, holds what it held and one sequence."""
        left = self._pools[donor].blocks - self._per[donor]
        return left >= self._needed[donor] and left * self._polls >= self._used[donor]

    def _send(self, donor: int, receiver: int) -> None:
        """Begin to move the donor's region with the fewest held blocks."""
        pool = self._pools[donor]
        regions = [at for at, owner in enumerate(self._owner) if owner == donor]
        region = min(regions, key=lambda at: pool.held(self._slots(donor, at)))
        self._move = _Move(region, donor, receiver, self._slots(donor, region))
        self._advance(self._move)

    def _slots(self, group: int, region: int) -> list[DeviceSlot]:
        """Return the slots of a region, as the pool of a group numbers them."""
        per = self._per[group]
        return [DeviceSlot(slot) for slot in range(region * per, (region + 1) * per)]

    # ---- a region that moves

    def _advance(self, move: _Move) -> None:
        """Take the region's slots that are not held; hand it over when complete, or give up."""
        donor = self._pools[move.donor]
        move.wait()
        self._vacate(move)
        # No other slot is free for the idle blocks: evict the pool's least valuable ones.
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
        """Take free slots, and slots of idle blocks that another slot has room for."""
        donor = self._pools[move.donor]
        if donor.held(move.left) == len(move.left):
            return
        taken, moves = donor.vacate(move.left)
        if moves:
            self._copy(move.donor, moves)
        move.take(taken)

    def _arrive(self, move: _Move) -> None:
        """Give the region to the receiver, and bar the way back for some periods."""
        way, back = (move.donor, move.receiver), (move.receiver, move.donor)
        self._owner[move.region] = move.receiver
        self._pools[move.receiver].admit(self._slots(move.receiver, move.region))
        self._rest = min(REST_MAX, 2 * self._rest) if self._last == back else self._rest
        self._last = way
        self._rests[back] = self._period + self._rest
        self._moved += 1
        self._move = None

    def check(self) -> None:
        """Assert that every region has one owner, and that the owner has its slots; for tests."""
        for at, (pool, per) in enumerate(zip(self._pools, self._per, strict=True)):
            gone = len(self._move.taken) if self._move and self._move.donor == at else 0
            assert pool.blocks == self._owner.count(at) * per - gone
            assert pool.blocks >= self._needed[at]
