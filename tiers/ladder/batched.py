"""Transfers larger than the arena: piece by piece, each as large as there is room for, in turn."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from kvladder.arena import NO_SLOT, Slot
from kvladder.keys import BlockKey
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.loading.fetch import Fetch, SetFetch
from kvladder.tiers.ladder.loading.unreleased import Unreleased

PINNED_MAX: Final = 0.5
"""Largest share of the slots that pieces of fetches hold: saves need some, too."""
ROOM_S: Final = 1.0
"""Time that a piece of a save waits for room that others are about to make."""
POLL_S: Final = 0.005
SILENT_S: Final = 1.0
"""A transfer that has not asked for this long does not delay others; it keeps its place."""


class SlotAdmission:
    """Admits transfers that wait for slots, first come, first served; from any thread."""

    def __init__(self, slots: float, clock: Clock, unreleased: Unreleased) -> None:
        self.unreleased = unreleased
        """Queue in which finalizers of lost transfers leave the slots to be given back."""
        self._lock = threading.Lock()
        self._left = slots
        self._clock = clock
        self._asked_s: dict[object, float] = {}
        """Tickets of waiting transfers, the first first, and when each asked last."""

    def take(self, who: object, wanted: int) -> int:
        """Take up to ``wanted`` slots for ``who``; return how many, 0 while it has to wait.

        The caller gives them back with ``give``.
        """
        if self.unreleased.lost:
            self.unreleased.settle()
        with self._lock:
            now_s = self._clock.now()
            self._asked_s[who] = now_s
            first = next(one for one, at_s in self._asked_s.items() if now_s - at_s < SILENT_S)
            taken = max(0, min(wanted, int(self._left)))
            if first is not who or not taken:
                return 0
            del self._asked_s[who]
            self._left -= taken
            return taken

    def give(self, who: object, count: int) -> None:
        """Free slots again, and end the wait of ``who``."""
        with self._lock:
            self._left += count
            self._asked_s.pop(who, None)


class BatchedTransfer(ABC):
    """Base of a transfer in pieces. Ask ``ready``, use the piece, then ``advance``.

    The caller owns it and calls ``close`` in the end; that may be called again. If the caller loses
    it, a ResourceWarning says so, and other transfers may have its slots.
    """

    _held = 0
    _waits = False
    """True if it was asked for a piece that is not ready."""
    first = 0
    """Position of the piece's first block."""
    count = 0
    """Number of blocks of the piece; with 0 the transfer is over."""

    def __init__(self, total: int, turns: SlotAdmission) -> None:
        self._total = total
        self._turns = turns
        self._ready = False
        self._ticket = object()
        """Stands for it in the queue, so that this object can still be garbage-collected."""
        self._waits = False
        self._held = 0
        """Number of slots that other transfers cannot have meanwhile."""

    def __del__(self) -> None:
        if self._held or self._waits:
            self._turns.unreleased.add("paced transfer", self._let_go)

    @property
    def ready(self) -> bool:
        """True if there is a piece to use, or no more is to come; never waits."""
        if not self._ready:
            self._ready = self.first >= self._total or self._attempt()
            self._waits = not self._ready
        return self._ready

    @property
    def over(self) -> bool:
        """True if no more is to come, once it is ready."""
        return self._ready and not self.count

    @abstractmethod
    def _attempt(self) -> bool:
        """Try to make the next piece; return whether it is settled, with ``count`` set."""

    @abstractmethod
    def _let_go(self) -> None:
        """Give up the piece, if there is one."""

    def advance(self) -> None:
        """Give up the piece, and go on to the next one."""
        self._let_go()
        self.first, self.count, self._ready = self.first + self.count, 0, False

    def close(self) -> None:
        """Give up the piece; no more is to come."""
        self._let_go()
        self._waits = False
        self.first, self.count, self._ready = self._total, 0, True

    async def settle(self) -> None:
        """Wait until it is ready; on the loop thread."""
        while not self.ready:  # noqa: ASYNC110 - there is no event for new room
            await asyncio.sleep(POLL_S)

    def wait(self) -> None:
        """Wait until it is ready; not on the loop thread."""
        while not self.ready:
            threading.Event().wait(POLL_S)


class BatchedFetch(BatchedTransfer):
    """Fetches the prefix of some blocks, or those of a set; each piece is a ``Fetch`` of its own.

    A piece ends before a block that is here but found no room, or no time. If that is its first
    block, it is tried again, up to the deadline. A prefix ends with a block that is not here; in a
    set such a block ends nothing.

    Parameters
    ----------
    begin:
        Begins to fetch some of the blocks.
    knows:
        Returns which of some blocks are here, as far as is known.
    deadline_s:
        How long each piece may take.
    most:
        How many blocks a piece may have.
    """

    fetch: Fetch | None = None
    """The piece, pinned until ``advance``."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        turns: SlotAdmission,
        *,
        begin: Callable[[Sequence[BlockKey]], Fetch],
        knows: Callable[[Sequence[BlockKey]], Sequence[bool]],
        clock: Clock,
        deadline_s: float,
        most: int,
    ) -> None:
        super().__init__(len(keys), turns)
        self._most = most
        self._keys = keys
        self._begin = begin
        self._knows = knows
        self._clock = clock
        self._lasts_s = deadline_s
        self._until_s: float | None = None

    def _attempt(self) -> bool:
        if self.fetch is None:
            # its turn comes, as every holder gives its slots back
            self._held = self._turns.take(self._ticket, min(self._most, self._total - self.first))
            if not self._held:
                return False
            if self._until_s is None:
                self._until_s = self._clock.now() + self._lasts_s
            self.fetch = self._begin(self._keys[self.first : self.first + self._held])
        if not self.fetch.done:
            return False
        is_set = isinstance(self.fetch, SetFetch)
        came = self._came(self.fetch)
        # a block that is here and did not come may have found no room, so it is tried again
        is_late = self._until_s is None or self._clock.now() >= self._until_s
        if not came and not is_late and self._knows([self._keys[self.first]])[0]:
            self._let_go()
            return False
        self._until_s = None
        self.count = came or int(is_set)
        surplus = self._held - sum(slot != NO_SLOT for slot in self.fetch.slots)
        self._held -= surplus
        self._turns.give(self._ticket, surplus)
        return True

    @property
    def held(self) -> int:
        """Number of slots that it holds or may still need."""
        return self._held

    def _came(self, fetch: Fetch) -> int:
        """Return for how many leading blocks it is settled whether they are here."""
        if not isinstance(fetch, SetFetch):
            return fetch.blocks
        found, asked = fetch.found, self._keys[self.first : self.first + self._held]
        missing = [at for at, key in enumerate(asked) if key not in found]
        here = self._knows([asked[at] for at in missing])
        return next((at for at, is_here in zip(missing, here, strict=True) if is_here), len(asked))

    async def settle(self) -> None:
        while not self.ready:
            if isinstance(self.fetch, SetFetch):
                await self.fetch.settle()
            else:
                await asyncio.sleep(POLL_S)

    def _let_go(self) -> None:
        if self.fetch is not None:
            self.fetch.release()
            self.fetch = None
        self._turns.give(self._ticket, self._held)
        self._held = 0


class Reserved(Protocol):
    """Slots for blocks that are to be saved."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots; may be empty."""
        ...

    @property
    def end(self) -> int:
        """Position of the first block without room; behind the last if all have some."""
        ...


R = TypeVar("R", bound=Reserved)


class BatchedSave(BatchedTransfer, Generic[R]):
    """Saves blocks for which there may not be room at once: each piece is as large as its room.

    It waits for room as long as others are about to make some. Blocks that still find none are left
    out.

    Parameters
    ----------
    begin:
        Reserves what it can of the blocks from a position on; ``patient`` if it is tried again.
    moving:
        Returns whether anything is under way that may make room. Its argument is the number of
        blocks that this save begins to wait for, 0 when the wait ends, None if neither changed.
    """

    piece: R | None = None
    """The piece. The caller commits or aborts it before it goes on."""

    def __init__(
        self,
        total: int,
        turns: SlotAdmission,
        *,
        begin: Callable[[int, bool], R],
        moving: Callable[[int | None], bool],
        clock: Clock,
    ) -> None:
        super().__init__(total, turns)
        self._begin = begin
        self._moving = moving
        self._clock = clock
        self._until_s: float | None = None
        self._is_told = False
        """True if ``moving`` was told that this save waits for room."""

    def _attempt(self) -> bool:
        now_s = self._clock.now()
        if self._until_s is None:
            self._until_s = now_s + ROOM_S
        is_late = now_s >= self._until_s  # also if its turn has not come
        if not self._held and not is_late:
            self._held = self._turns.take(self._ticket, 1)
            if not self._held:
                return False
        piece = self._begin(self.first, True)
        if not piece.slots and piece.end == self.first:
            wanted = None if self._is_told else self._total - self.first
            self._is_told = True
            if self._moving(wanted) and not is_late:
                return False
            piece = self._begin(self.first, False)
        self._let_go()
        self.piece, self.count = piece, piece.end - self.first
        return True

    def _let_go(self) -> None:
        self.piece = None
        if self._is_told:
            self._moving(0)
        self._until_s, self._is_told = None, False
        self._turns.give(self._ticket, self._held)
        self._held = 0
