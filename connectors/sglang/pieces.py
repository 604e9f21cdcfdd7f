"""Moves SGLang's batches piece by piece: a batch may have more pages than the arena has slots."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Final, cast

import msgspec

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.manager import POLL_S, BatchedFetch, CacheManager
from kvladder.policy.sessions import LATER
from kvladder.runtime import SystemClock

AT_ONCE: Final = 4
"""Parts in flight: while one is copied, the next ones keep a device busy."""
PART: Final = 12
"""A part of a fetch has one ``PART``-th of the arena's slots."""


class PageBatch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of one prefix, from its start or from further on."""

    keys: list[bytes]
    salt: str = ""
    """Salt of the pages' owner."""
    within_s: float = 0.0
    """Seconds after which nothing more is begun."""
    deadline_s: float = 0.0
    """Seconds to wait for each fetched piece."""
    priority: int | None = None
    """Priority of the pages, if one was given."""
    group: int = 0
    """Index of the pages' group in the layout."""

    @property
    def names(self) -> list[BlockKey]:
        """``keys``, typed as block keys."""
        return cast("list[BlockKey]", self.keys)


class PageRun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages to copy now; their slots stay held until the next piece is asked for."""

    done: int
    """Number of leading pages of the batch that are done."""
    pages: list[int]
    """Positions of the pages in the batch."""
    slots: list[Slot]
    sources: list[str] = []
    """The levels that served the pages; empty if they are saved."""


Pieces = Generator[PageRun, None, int]
"""Yields pieces to copy, one by one; returns how many leading pages of the batch are done."""


def fetch_pieces(manager: CacheManager, batch: PageBatch) -> Pieces:
    """Yield pieces of the longest prefix of a batch that is held or arrives in time."""
    now = SystemClock().now
    end_s = now() + batch.within_s
    size = max(1, manager.arena.slots // PART)
    keys, found = batch.names, 0
    left = deque(keys[at : at + size] for at in range(0, len(keys), size))
    coming: deque[tuple[list[BlockKey], BatchedFetch]] = deque()
    try:
        while left or coming:
            # The first part asks for slots before the parts behind it, which give theirs back while
            # it has none. Otherwise several fetches could wait for slots that their own later
            # parts hold.
            while left and len(coming) < AT_ONCE and now() < end_s and _is_served(coming):
                part = manager.fetch_paced(
                    left[0], deadline_s=batch.deadline_s, salt=batch.salt, session=LATER
                )
                if coming and not part.ready and not part.held:
                    part.close()
                    break
                coming.append((left.popleft(), part))
            if not coming:  # the time is up
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
                slots, sources = part.fetch.slots[: part.count], part.fetch.sources[: part.count]
                yield PageRun(found, pages, list(slots), sources)
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
    """Return whether the first part is not waiting for slots; also if there is no part."""
    return not coming or coming[0][1].ready or coming[0][1].held > 0


def save_pieces(manager: CacheManager, batch: PageBatch) -> Pieces:
    """Yield pieces to save as slots become free; pages that no level wants count as done."""
    now = SystemClock().now
    end_s, keys = now() + batch.within_s, batch.names
    said = None if batch.priority is None else [batch.priority] * len(keys)
    told: dict[str, Any] = {"salt": batch.salt, "group": batch.group, "session": LATER}
    paced = manager.save_paced(keys, priorities=said, **told)
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
                piece.abort()  # does nothing after a commit
            paced.advance()
            paced.wait()
        if paced.piece is not None:
            paced.piece.abort()
        return paced.first
    finally:
        paced.close()
