"""A batch of SGLang's, which may have more pages than the arena has slots, piece by piece."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final, cast

import msgspec

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.manager import POLL_S, BatchedFetch, CacheManager
from kvladder.runtime import SystemClock

AT_ONCE: Final = 4
"""Parts that are asked for: one is copied while the next ones keep a device at work."""
PART: Final = 12
"""A part has one slot of so many."""


class PageBatch(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one prefix, or of the end of one."""

    keys: list[bytes]
    salt: str = ""
    """Whose they are."""
    within_s: float = 0.0
    """After so long nothing more is begun."""
    deadline_s: float = 0.0
    """How long a piece that is fetched is waited for."""
    priority: int | None = None
    """What they are worth, if that was said."""
    group: int = 0
    """Which of the layout's groups they are of."""

    @property
    def names(self) -> list[BlockKey]:
        """The same keys."""
        return cast("list[BlockKey]", self.keys)


class PageRun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages to be copied now: their slots are held until the next piece is asked for."""

    done: int
    """How many leading pages of the batch are over and done with."""
    pages: list[int]
    """Their positions in the batch."""
    slots: list[Slot]


Pieces = Generator[PageRun, None, int]
"""Pieces to copy, one by one; returns how many leading pages of the batch are here."""


def fetch_pieces(manager: CacheManager, batch: PageBatch) -> Pieces:
    """The longest prefix of a batch that is here, or comes within its time."""
    now = SystemClock().now
    end_s = now() + batch.within_s
    size = max(1, manager.arena.slots // PART)
    keys, found = batch.names, 0
    left = deque(keys[at : at + size] for at in range(0, len(keys), size))
    coming: deque[tuple[list[BlockKey], BatchedFetch]] = deque()
    try:
        while left or coming:
            # The first part asks for slots before those behind it, and they give theirs back while
            # it has none: or several fetches would wait for what their own next parts hold.
            while left and len(coming) < AT_ONCE and now() < end_s and _is_served(coming):
                part = manager.fetch_paced(left[0], deadline_s=batch.deadline_s, salt=batch.salt)
                if coming and not part.ready and not part.held:
                    part.close()
                    break
                coming.append((left.popleft(), part))
            if not coming:  # it has taken long enough
                return found
            asked, part = coming[0]
            while not part.ready:
                if part.fetch is not None:
                    part.fetch.wait()
                    continue
                while len(coming) > 1:
                    behind, other = coming.pop()
                    other.close()
                    left.appendleft(behind)
                if now() >= end_s:
                    return found
                threading.Event().wait(POLL_S)
            if not part.over:
                assert part.fetch is not None
                pages = list(range(found, found + part.count))
                yield PageRun(found, pages, list(part.fetch.slots[: part.count]))
                found += part.count
                part.advance()
            elif part.first < len(asked):  # a hole
                return found
            else:
                coming.popleft()
        return found
    finally:
        for _, one in coming:
            one.close()


def _is_served(coming: Sequence[tuple[list[BlockKey], BatchedFetch]]) -> bool:
    """Whether the first part, if there is one, does not wait for slots."""
    return not coming or coming[0][1].ready or coming[0][1].held > 0


def save_pieces(manager: CacheManager, batch: PageBatch) -> Pieces:
    """Store a batch as slots become free; what no level wants is over and done with."""
    now = SystemClock().now
    end_s, keys = now() + batch.within_s, batch.names
    said = None if batch.priority is None else [batch.priority] * len(keys)
    paced = manager.save_paced(keys, priorities=said, salt=batch.salt, group=batch.group)
    try:
        paced.wait()
        while not paced.over and now() < end_s:
            piece = paced.piece
            assert piece is not None
            try:
                if piece.slots:
                    yield PageRun(paced.first, list(piece.indices), list(piece.slots))
                piece.commit()
            finally:
                piece.abort()  # which a commit has made idle
            paced.advance()
            paced.wait()
        if paced.piece is not None:
            paced.piece.abort()
        return paced.first
    finally:
        paced.close()
