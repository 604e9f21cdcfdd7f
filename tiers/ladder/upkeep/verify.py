"""Checks of what a level below host keeps: each block is read and compared with its label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import BATCH, BULK_STEP
from kvladder.tiers.label import Outcome
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.ghosts import OF_VERDICT
from kvladder.tiers.ladder.stack import TierStack

VERIFY_MAX: Final = BATCH
"""Most blocks that one call of ``verify`` reads."""


class Verified(NamedTuple):
    """The result of checking some blocks of a level."""

    checked: int = 0
    """Blocks that were read."""
    bytes: int = 0
    """Bytes that were read, as the engine stores them."""
    damaged: int = 0
    """Blocks whose bytes do not match their label; they have left the level."""
    lost: int = 0
    """Blocks that the tier does not have; they have left the level, too."""
    unread: int = 0
    """Blocks that could not be read now: the tier failed, or no slot was free."""
    next: int | None = None
    """Place to continue at; None at the end."""
    places: int = 0
    """Number of places; progress is ``next`` of it."""


class StackVerifier:
    """Reads and checks blocks of a stack's levels, on the loop thread."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._shared = stack.shared

    async def verify(self, level: str, start: int, blocks: int) -> Verified:
        """Read and check at most ``blocks`` blocks of a level below host, from place ``start`` on.

        Blocks that are damaged, or that the tier does not have, leave the level. The reads go into
        free slots of the arena, or evict from host what levels below have too. They count as reads
        of the tier, but not as uses of the blocks. Runs on the loop thread.

        Raises
        ------
        KeyError
            No level below host has this name.
        """
        found = {one.name: one for one in self._stack.levels}[level]
        keys, end, places = self._following(found, start, min(blocks, VERIFY_MAX, found.batch_max))
        result = Verified(next=None if end >= places else end, places=places)
        if not keys:
            return result
        slots = self._stack.lease(len(keys))
        if not slots:
            return result._replace(unread=len(keys), next=start)
        try:
            return await self._verified(found, keys, slots, result)
        finally:
            self._stack.give_back(slots)

    def _following(self, level: Level, start: int, blocks: int) -> tuple[list[BlockKey], int, int]:
        """Return the next blocks from a place on, the place after them, and the number of places.

        Places without a block are passed over.
        """
        while True:
            with self._stack.lock:
                places = level.index.places
                there = level.index.held(start, min(start + BULK_STEP, places))[:blocks]
                last = level.index.place(there[-1]) if there else None
            end = min(start + BULK_STEP, places) if last is None else last + 1
            if there or end >= places:
                return there, end, places
            start = end

    async def _verified(
        self, level: Level, keys: Sequence[BlockKey], slots: Sequence[Slot], result: Verified
    ) -> Verified:
        side = level.client.pipeline.side
        with self._stack.lock:
            held = [(key, at) for key in keys if (at := level.index.place(key)) is not None]
            held = held[: len(slots)]
            reads = [side.read(*one, slot) for one, slot in zip(held, slots, strict=False)]
            level.places.begin_reads([read.place for read in reads])
            if len(held) < len(keys) and len(held) == len(slots):  # too few slots: the rest later
                last = max(at for _, at in held)
                result = result._replace(next=last + 1)
        answer = await level.client.get(reads, lambda: level.read_ended(reads))
        if answer.results is None:
            return result._replace(unread=len(reads))
        with self._stack.lock:
            answer.add_to(level.stats.loaded_call_s)
            level.stats.loaded += sum(map(bool, answer.results))
            both = [*zip(reads, answer.results, strict=True)]
            gone = [
                read
                for read, ok in both
                if ok is False and level.index.key_at(read.place) == read.key
            ]
            level.forget([read.key for read in gone], "lost")
            for read in gone:
                self._shared.ghosts.add([read.key], level.name, OF_VERDICT[read.verdict[0]])
        damaged = sum(read.verdict[0] not in {None, Outcome.GOOD} for read in gone)
        return result._replace(
            checked=len(reads) - answer.results.count(None),
            bytes=len(reads) * self._shared.arena.slot_bytes,
            damaged=damaged,
            lost=len(gone) - damaged,
            unread=answer.results.count(None),
        )
