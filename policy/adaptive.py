"""The policy ``adaptive``: measures which of six orders of eviction serves best, and uses it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, Final
from zlib import crc32

from kvladder.keys import BlockKey
from kvladder.policy.eviction import KeyedPolicy, Places, RefusalReason
from kvladder.policy.hazards import STATE
from kvladder.policy.panel import Panel

SIZE_DEFAULT: Final = 1024
"""Assumed number of blocks until ``attached`` tells it."""
_HEAD: Final = struct.Struct("<4sI")
_MAGIC: Final = b"kva4"


class Adaptive(KeyedPolicy):
    """Evicts the lowest priority first; within a priority, by the rule that serves best of late.

    The rules are: the least learned worth (how soon blocks of that age, with as many uses, are
    asked for again), the least frequent, the least recently used; and the least learned worth of
    whole prompts, or of named sessions. For loops, the newest may go first. Each rule has a shadow
    cache with the keys of a sample, and the shadows' hits say which rule orders the blocks. Where
    recency has nearly as many, and most of what is asked for, it orders them, as it cuts the fewest
    prompts short. ``push(front=True)`` puts a block before all others of its priority, whatever the
    rule. Retention, and the end of a session, change the priority, so they come before what is
    learned.

    Parameters
    ----------
    size:
        Number of blocks that the level holds at most, see ``attached``.
    make:
        The loops: by default those in C if there are any, see ``kvladder.policy.panel``.
    """

    def __init__(self, size: int = SIZE_DEFAULT, *, make: Any = Panel) -> None:
        self._make = make
        self._panel: Any = make(size)
        self._places: Places = _nowhere

    @property
    def rule(self) -> int:
        """Number of the rule that orders the blocks now, see ``kvladder.policy.hazards``."""
        rule: int = self._panel.rule
        return rule

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + int(self._panel.__sizeof__())

    def attached(self, blocks: int, places: Places) -> None:
        assert not len(self._panel), "blocks are held already"
        self._panel = self._make(blocks)
        self._places = places

    def reserve(self, handles: int) -> None:
        self._panel.reserve(handles)

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        del request
        self._panel.requested(keys, self._places(keys), False)

    def requested_in_session(self, keys: Sequence[BlockKey], request: int) -> None:
        del request
        self._panel.requested(keys, self._places(keys), True)

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        self._panel.inserted(handles, keys, request)

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        self._panel.dropped(handles, evicted)

    def refused(self, keys: Sequence[BlockKey], reason: RefusalReason) -> None:
        del reason
        self._panel.refused(keys)

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        self._panel.push(handle, priority, front)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        self._panel.push_all(handles, priority)

    def touch(self, handle: int) -> None:
        self._panel.touch(handle)

    def touch_all(self, handles: Sequence[int]) -> None:
        self._panel.touch_all(handles)

    def remove(self, handle: int) -> None:
        self._panel.remove(handle)

    def remove_all(self, handles: Sequence[int]) -> None:
        self._panel.remove_all(handles)

    def pop(self) -> int:
        for handle in self:
            self._panel.remove(handle)
            return handle
        raise IndexError("pop from an empty policy")

    def __len__(self) -> int:
        return len(self._panel)

    def __contains__(self, handle: int) -> bool:
        return handle in self._panel

    def __iter__(self) -> Iterator[int]:
        return iter(self._panel)

    def state(self) -> bytes:
        body: bytes = self._panel.state()
        return _HEAD.pack(_MAGIC, crc32(body)) + body

    def restore(self, state: bytes) -> None:
        body = state[_HEAD.size :]
        if len(body) != STATE.size or state[: _HEAD.size] != _HEAD.pack(_MAGIC, crc32(body)):
            raise ValueError("it is damaged, or of another version")
        if not all(isfinite(value) and abs(value) < 1e18 for value in STATE.unpack(body)):
            raise ValueError("it has numbers that are none")
        self._panel.restore(body)


def _nowhere(keys: Sequence[BlockKey]) -> list[int | None]:
    return [None] * len(keys)
