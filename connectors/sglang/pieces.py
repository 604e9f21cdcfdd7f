"""Moves SGLang's batches piece by piece: a batch may have more pages than the arena has slots."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Annotated, Any, Final, cast

import msgspec

from kvladder.arena import Slot
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.manager import POLL_S, BatchedFetch, CacheManager
from kvladder.policy.eviction import PRIORITY_MAX, PRIORITY_MIN
from kvladder.policy.sessions import LATER
from kvladder.runtime import SystemClock

AT_ONCE: Final = 4
"""Parts in flight: while one is copied, the next ones keep a device busy."""
PAGES_MAX: Final = 4096
"""Largest number of pages of a batch; SGLang's own have at most 128."""

PageKey = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class PageBatch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of one prefix, from its start or from further on."""

    keys: Annotated[list[PageKey], msgspec.Meta(max_length=PAGES_MAX)]
    salt: str = ""
    """Salt of the pages' owner."""
    within_s: float = 0.0
    """Seconds after which nothing more is begun."""
    deadline_s: float = 0.0
    """Seconds to wait for each fetched piece."""
    priority: Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None = None
    """Priority of the pages, if one was given."""
    group: Annotated[int, msgspec.Meta(ge=0)] = 0
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
    held: int = 0
    """Number of slots that stay held meanwhile: those of a fetch's next parts, too."""


Pieces = Generator[PageRun, None, int]
"""Yields pieces to copy, one by one; returns how many leading pages of the batch are done."""


def fetch_pieces(manager: CacheManager, batch: PageBatch, share: int) -> Pieces:
    """Yield pieces of the longest prefix of a batch that is held or arrives in time.

    At most ``share`` slots are held at a time.
    """
    now = SystemClock().now
    end_s = now() + batch.within_s
    size, at_once = max(1, share // AT_ONCE), min(share, AT_ONCE)
    keys, found = batch.names, 0
    left = deque(keys[at : at + size] for at in range(0, len(keys), size))
    coming: deque[tuple[list[BlockKey], BatchedFetch]] = deque()
    try:
        while left or coming:
            # The first part asks for slots before the parts behind it, which give theirs back while
            # it has none. Otherwise several fetches could wait for slots that their own later
            # parts hold.
            while left and len(coming) < at_once and now() < end_s and _is_served(coming):
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
                held = sum(one.held for _, one in coming)
                yield PageRun(found, pages, list(slots), sources, held)
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


def save_pieces(manager: CacheManager, batch: PageBatch, share: int) -> Pieces:
    """Yield pieces to save as slots become free; pages that no level wants count as done.

    At most ``share`` slots are held at a time.
    """
    now = SystemClock().now
    end_s, keys = now() + batch.within_s, batch.names
    told: dict[str, Any] = {"salt": batch.salt, "group": batch.group, "session": LATER}
    done, floor = 0, PRIORITY_MAX
    while done < len(keys) and (not done or now() < end_s):
        part = keys[done : done + share]
        said = None if batch.priority is None else [batch.priority] * len(part)
        parent = keys[done - 1] if done else None
        paced = manager.save_paced(part, priorities=said, parent_floor=floor, parent=parent, **told)
        try:
            paced.wait()
            while not paced.over and now() < end_s:
                piece = paced.piece
                assert piece is not None
                floor, slots = piece.floor, list(piece.slots)
                try:
                    if slots:
                        pages = [done + at for at in piece.indices]
                        yield PageRun(done + paced.first, pages, slots, held=len(slots))
                    piece.commit()
                finally:
                    piece.abort()  # does nothing after a commit
                paced.advance()
                paced.wait()
            if paced.piece is not None:
                paced.piece.abort()
            done += paced.first
            if paced.first < len(part):
                break
        finally:
            paced.close()
    return done
