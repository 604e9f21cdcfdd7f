"""The order of eviction: prioritized LRU, behind a small interface for plug-ins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import numpy as np

from kvladder.keys import BlockKey

PRIORITY_MIN = 0
PRIORITY_MAX = 100
PRIORITY_DEFAULT = 35

BULK_MIN = 32
"""Smallest number of handles for which NumPy is faster."""

GROWTH_MAX = 1 << 16
"""Largest number of handles by which the arrays grow at once."""

STATE_MAX: Final = 1 << 20
"""Most bytes of what a policy may keep over a restart."""

_NIL = -1


class EvictionPolicy(ABC):
    """Orders handles by when they should be evicted.

    Pure and synchronous: no clock, no I/O, so that it replays on traces. A handle is a small
    non-negative int, the block's place in its level. After a push, the caller pushes the same
    handle again only once it is removed or popped. Subclasses are checked by
    ``kvladder.testing.PolicyTests``. docs/how-to/write-a-policy.md shows how to write one.

    The policy gives the order, and the level chooses the victims. The level walks ``__iter__`` from
    the start, passes over blocks that may not go now (a copy or a read is in flight, or a level
    below still has to get the block), and stops when it has enough. It also stops at the first
    block with a priority above the newcomer's; so an order that does not begin with the lowest
    priority may leave the newcomer without room. Then the level calls ``remove`` for the victims.
    It never calls ``pop``, which is for replays of traces.

    Victims of host, and of each level below, are chosen at one place alone: the walk over
    ``LevelIndex.victims``, with the level's own reasons to pass over a block. A pool of the device
    has an order of its own (``kvladder.gpu.tree``), as its blocks go with their children.

    A policy that raises an error, yields a handle that it does not hold, or takes too long is left:
    the level says so once in the log, and orders its blocks as a prioritized LRU from then on.

    A policy sees ``remove`` for each block that is evicted, removed, expired or lost; also for a
    block that a request pins, which is pushed again after the last pin. A change of priority is a
    ``remove`` and a ``push``. To tell these apart, and to see keys, derive from
    :class:`KeyedPolicy`. Each level has a policy of its own, and every call is made with the
    stack's lock held.
    """

    def reserve(self, handles: int) -> None:
        """Allocate memory for handles below ``handles`` now, since it may take too long later."""

    @abstractmethod
    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        """Add ``handle``, which is not in the policy, as the most recently used of its priority.

        With ``front`` it becomes the least recently used: the next to go at its priority.
        """

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        """Push all of ``handles``, one after the other, with one priority."""
        for handle in handles:
            self.push(handle, priority)

    @abstractmethod
    def touch(self, handle: int) -> None:
        """Make ``handle``, which is in the policy, the most recently used of its priority."""

    @abstractmethod
    def remove(self, handle: int) -> None:
        """Remove ``handle``, which is in the policy."""

    def touch_all(self, handles: Sequence[int]) -> None:
        """Touch all of ``handles``, one after the other; each is named once."""
        for handle in handles:
            self.touch(handle)

    def remove_all(self, handles: Sequence[int]) -> None:
        """Remove all of ``handles``, one after the other; each is named once."""
        for handle in handles:
            self.remove(handle)

    @abstractmethod
    def pop(self) -> int:
        """Remove and return the handle that should go first; IndexError if there is none."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of handles in the policy."""

    @abstractmethod
    def __contains__(self, handle: int) -> bool:
        """Return whether ``handle`` is in the policy."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield handles in ``pop`` order; the policy must not change meanwhile."""


RefusalReason = Literal["rule", "room", "admission"]
"""Why a level does not hold a block that was offered: its rule (threshold, hits, terms), room, or
``admit: adaptive``."""


Places = Callable[[Sequence[BlockKey]], Sequence[int | None]]
"""Returns the handle of each key, None for those that a level lacks."""


class KeyedPolicy(EvictionPolicy):
    """Is told, beside all that other policies are, which blocks are asked for, come and go.

    For policies that remember evicted blocks, or that treat a block of a long request otherwise.
    The level calls ``inserted`` before a block's first ``push`` and ``dropped`` after its last
    ``remove``. A ``remove`` without ``dropped`` is a pin or a change of priority. The next ``push``
    of that handle is the same block again, used once more unless its priority has changed. A block
    may also come or go while it is pinned: then ``push`` comes later, or ``remove`` came before.

    ``requested`` tells of uses by request, also of blocks that the level lacks. The calls with a
    body here may be left as they are.
    """

    def attached(self, blocks: int, places: Places) -> None:
        """Note that the level holds at most ``blocks`` blocks; called once, before all others.

        ``places(keys)`` returns the handle of each key, None for those that the level lacks.
        """

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        """Note that a request asks for a prompt: all of its ``keys``, in order.

        Every level is told, before anything is pinned or read for it. ``keys`` are there or not:
        a block that a hotter level serves is used as well. ``request`` is the number with which
        ``inserted`` names the blocks that this fetch brings. The save of what was computed has a
        number of its own. A fetch counts once, however often it is polled. A fetch of the same
        keys while an earlier one is not released counts with it. Prefetches, and fetches of sets,
        do not count.
        """

    def requested_in_session(self, keys: Sequence[BlockKey], request: int) -> None:
        """Note the same for a request of a session that the engine named.

        Its next request begins with most of these keys, so they are asked for together again, or
        not at all.
        """
        self.requested(keys, request)

    @abstractmethod
    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        """Note that the level holds ``keys`` from now on, at these handles, in this order.

        ``request`` is the number of the save or fetch that brought them, which no other save or
        fetch has; 0 if none did: the blocks were found at the start, came from a level above, or
        were prefetched.
        """

    @abstractmethod
    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        """Note that the level holds these blocks no longer; it may use the handles for others.

        ``evicted`` is True if the cache chose them, and False if they were removed, expired or lost
        or the cache closes.
        """

    def refused(self, keys: Sequence[BlockKey], reason: RefusalReason) -> None:
        """Note that these blocks were offered to the level, which does not hold them."""

    def state(self) -> bytes:
        """Return what the policy has learned, at most ``STATE_MAX`` bytes; empty for nothing.

        A level with files keeps it over a restart.
        """
        return b""

    def restore(self, state: bytes) -> None:
        """Continue with what ``state`` returned, maybe at another size.

        Raises
        ------
        ValueError
            It is none of this policy's.
        """


class PrioritizedLRU(EvictionPolicy):
    """Evicts the lowest priority first, then the least recently used; each operation is O(1).

    Each priority has a doubly linked list in flat arrays indexed by handle (9 bytes a handle). A
    101-bit mask marks the priorities in use. The order is TensorRT-LLM's prioritized LRU. A policy
    made ``beside`` another shares its arrays; each handle is in at most one of them.
    """

    def __init__(self, beside: PrioritizedLRU | None = None) -> None:
        self._next: array[int] = array("i") if beside is None else beside._next
        self._prev: array[int] = array("i") if beside is None else beside._prev
        self._priority: bytearray = bytearray() if beside is None else beside._priority
        self._head = [_NIL] * (PRIORITY_MAX + 1)
        self._tail = [_NIL] * (PRIORITY_MAX + 1)
        self._used = 0
        self._len = 0

    def reserve(self, handles: int) -> None:
        if handles > len(self._priority):
            self._grow(handles - 1)

    def _grow(self, handle: int) -> None:
        """Make room for ``handle`` and some more, but never for so many that it takes long."""
        held = len(self._priority)
        more = max(handle + 1 - held, min(held, GROWTH_MAX), 64)
        blank = array("i", [_NIL]) * more
        self._next.extend(blank)
        self._prev.extend(blank)
        self._priority.extend(b"\xff" * more)

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        assert PRIORITY_MIN <= priority <= PRIORITY_MAX, priority
        if handle >= len(self._priority):
            self._grow(handle)
        assert self._priority[handle] == 0xFF, f"handle {handle} pushed twice"
        self._priority[handle] = priority
        head, tail = self._head, self._tail
        if head[priority] == _NIL:
            head[priority] = tail[priority] = handle
            self._next[handle] = self._prev[handle] = _NIL
            self._used |= 1 << priority
        elif front:
            first = head[priority]
            self._prev[first] = handle
            self._next[handle] = first
            self._prev[handle] = _NIL
            head[priority] = handle
        else:
            last = tail[priority]
            self._next[last] = handle
            self._prev[handle] = last
            self._next[handle] = _NIL
            tail[priority] = handle
        self._len += 1

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        if len(handles) < BULK_MIN:
            super().push_all(handles, priority)
            return
        chain = np.asarray(handles, np.intc)
        self.push(handles[0], priority)
        highest = int(chain.max())
        if highest >= len(self._priority):
            self._grow(highest)
        priorities = np.frombuffer(self._priority, np.uint8)
        assert not np.count_nonzero(priorities[chain[1:]] != 0xFF), "a handle is pushed twice"
        priorities[chain] = priority
        after, before = np.frombuffer(self._next, np.intc), np.frombuffer(self._prev, np.intc)
        after[chain[:-1]], after[chain[-1]] = chain[1:], _NIL
        before[chain[1:]] = chain[:-1]
        self._tail[priority] = handles[-1]
        self._len += len(handles) - 1

    def touch(self, handle: int) -> None:
        priority, tail = self._priority[handle], self._tail
        last = tail[priority]
        if last == handle:
            return
        after, before = self._next, self._prev
        older, newer = before[handle], after[handle]
        before[newer] = older
        if older == _NIL:
            self._head[priority] = newer
        else:
            after[older] = newer
        after[last], before[handle], after[handle] = handle, last, _NIL
        tail[priority] = handle

    def touch_all(self, handles: Sequence[int]) -> None:
        if len(handles) < BULK_MIN:
            super().touch_all(handles)
            return
        priorities = np.frombuffer(self._priority, np.uint8)[np.asarray(handles, np.intc)]
        if np.count_nonzero(priorities != priorities[0]):
            super().touch_all(handles)
            return
        self.remove_all(handles)
        self.push_all(handles, int(priorities[0]))

    def remove(self, handle: int) -> None:
        assert self._priority[handle] != 0xFF, f"handle {handle} is not in the policy"
        self._cut(handle, handle)
        self._priority[handle] = 0xFF
        self._len -= 1

    def remove_all(self, handles: Sequence[int]) -> None:
        if len(handles) < BULK_MIN:
            super().remove_all(handles)
            return
        chain = np.asarray(handles, np.intc)
        priorities = np.frombuffer(self._priority, np.uint8)
        assert not np.count_nonzero(priorities[chain] == 0xFF), "a handle is not in the policy"
        after = np.frombuffer(self._next, np.intc)
        breaks = after[chain[:-1]] != chain[1:]
        if np.count_nonzero(breaks) > len(chain) // 2:  # the list may hold it reversed
            chain = chain[::-1]
            breaks = after[chain[:-1]] != chain[1:]
        firsts, lasts = [int(chain[0])], [int(chain[-1])]  # of runs in the list, too
        if np.count_nonzero(breaks):
            ends = np.flatnonzero(breaks)
            firsts += chain[ends + 1].tolist()
            lasts[:0] = chain[ends].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            self._cut(first, last)
        priorities[chain] = 0xFF
        self._len -= len(handles)

    def _cut(self, first: int, last: int) -> None:
        """Unlink a run of adjacent handles, from ``first`` to ``last``, from its list."""
        priority, before, after = self._priority[first], self._prev[first], self._next[last]
        if before == _NIL:
            self._head[priority] = after
        else:
            self._next[before] = after
        if after == _NIL:
            self._tail[priority] = before
        else:
            self._prev[after] = before
        if self._head[priority] == _NIL:
            self._used &= ~(1 << priority)

    def pop(self) -> int:
        if not self._used:
            raise IndexError("pop from an empty policy")
        lowest = (self._used & -self._used).bit_length() - 1
        handle = self._head[lowest]
        self.remove(handle)
        return handle

    def __len__(self) -> int:
        return self._len

    def __contains__(self, handle: int) -> bool:
        return handle < len(self._priority) and self._priority[handle] != 0xFF

    def __iter__(self) -> Iterator[int]:
        for priority in range(PRIORITY_MAX + 1):
            handle = self._head[priority]
            while handle != _NIL:
                yield handle
                handle = self._next[handle]

    def check(self) -> None:
        """Assert that lists, mask and length agree; O(n), for tests."""
        seen = 0
        for priority in range(PRIORITY_MAX + 1):
            handle, before = self._head[priority], _NIL
            assert (handle != _NIL) == bool(self._used >> priority & 1)
            while handle != _NIL:
                assert self._priority[handle] == priority
                assert self._prev[handle] == before
                handle, before = self._next[handle], handle
                seen += 1
            assert self._tail[priority] == before
        assert seen == self._len
