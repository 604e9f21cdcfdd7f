"""Announces what a device's block pools hold, as the hottest level."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvladder import events as told
from kvladder.gpu.pool.events import BELOW, PoolEvent, PoolRemoved, PoolStored, Updated
from kvladder.keys import BlockKey
from kvladder.tiers.ladder import Ladder

DEVICE: Final = ""
"""Name of the level of a device's pools. No tier's name is empty."""
MEDIUM: Final = "GPU"


class Known(NamedTuple):
    """The announced facts of a block: everything that names its content."""

    parent: BlockKey | None
    tokens: array[int]
    lora: str
    extra: tuple[Any, ...]
    """The adapter, images as ``(digest, offset)``, the cache salt; as in vLLM's ``extra_keys``."""


class OnDevice:
    """Keeps the whole blocks of one group of layers: which are on the device, and their content.

    ``hear`` runs on the engine's thread. It adds arrivals and departures on the device to the
    ladder's events, so events of all levels stay in the order in which they happened. As
    ``Holdings``, it offers no places to scan: ``known`` has every block that is on the device.

    Parameters
    ----------
    group:
        Number of the group. Its blocks are useful only with all blocks before them.
    """

    def __init__(self, group: int, block_tokens: int) -> None:
        self.group = group
        self.block_tokens = block_tokens
        self.known: dict[BlockKey, Known] = {}
        """Blocks on the device or in a tier, as far as the pool knows; parents come first."""
        self.learnt = deque[BlockKey]()
        """Blocks that tiers announced before their content was known."""
        self.renamed = False
        """True if announced contents no longer name the blocks that tiers hold."""
        self._held = set[BlockKey]()
        self._ladder: Ladder | None = None

    @property
    def places(self) -> int:
        """See ``Holdings.places``."""
        return 0

    def held(self, start: int, end: int) -> Sequence[BlockKey]:
        """See ``Holdings.held``."""
        del start, end
        return ()

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def begin(self, ladder: Ladder) -> None:
        """Add to this ladder's events from now on; the pool is empty."""
        self._ladder = ladder

    def rename(self) -> None:
        """Make listeners forget the announced contents of blocks that tiers hold."""
        self.renamed = True
        self._wake()

    def hear(self, event: PoolEvent) -> None:
        """Note an event of the pool; announce blocks that come to the device or leave it."""
        if isinstance(event, PoolStored):
            self._stored(event)
        elif isinstance(event, PoolRemoved):
            self.known.pop(event.key, None)
            self._left(event.key)
        elif isinstance(event, Updated) and event.level is not None and event.key in self.known:
            if event.level[1] == BELOW:
                self._left(event.key)
            else:
                self._came([event.key])

    def _stored(self, event: PoolStored) -> None:
        parent, new = event.parent, list[BlockKey]()
        adapter = [event.lora] if event.lora else []
        for block in event.blocks:
            if len(block.tokens) == self.block_tokens:  # a partial block names no prefix
                salt = [event.salt] if event.salt and parent is None else []
                images = [(content, offset) for offset, content in block.extra]
                extra = (*adapter, *images, *salt)
                known = Known(parent, array("I", block.tokens), event.lora, extra)
                self.known[block.key] = known
                new.append(block.key)
            parent = block.key
        if event.level != BELOW:
            self._came(new)
        elif new:
            self.learnt += new
            self._wake()

    def _wake(self) -> None:
        assert self._ladder is not None
        with self._ladder.lock:
            self._ladder.events.wake()

    def _came(self, keys: Sequence[BlockKey]) -> None:
        assert self._ladder is not None
        if keys:
            with self._ladder.lock:
                self._held.update(keys)
                self._ladder.events.tell(told.Stored(DEVICE, tuple(keys)))

    def _left(self, key: BlockKey) -> None:
        assert self._ladder is not None
        if key in self._held:
            with self._ladder.lock:
                self._held.discard(key)
                self._ladder.events.tell(told.Removed(DEVICE, (key,), "evicted"))
