"""Hands the blocks of a level over to another eviction policy, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice

from kvladder.keys import BlockKey
from kvladder.policy.eviction import EvictionPolicy, KeyedPolicy, RefusalReason


class MovingPolicy(KeyedPolicy):
    """Orders blocks by two policies, each block in one of them, until all are in the new one.

    The lowest priority goes first, whichever policy has it. Among equal priorities, those of the
    old policy go first. A block that is used or pinned meanwhile comes back to the new policy.

    Parameters
    ----------
    old, new:
        The policy that has the blocks, and the empty one that gets them.
    keyed:
        The new policy if it is told keys, else None.
    priority, key:
        Return the priority and the key of the block with a handle.
    """

    def __init__(
        self,
        old: EvictionPolicy,
        new: EvictionPolicy,
        keyed: KeyedPolicy | None,
        *,
        priority: Callable[[int], int],
        key: Callable[[int], BlockKey | None],
    ) -> None:
        self.old = old
        self.new = new
        self.keyed = keyed
        self._priority = priority
        self._key = key
        self._known: set[int] = set()
        """Handles with keys that the new policy was told."""

    def move(self, count: int) -> bool:
        """Hand over the next victims, at most ``count``; return whether there may be more."""
        some = [*islice(iter(self.old), count)]
        self.old.remove_all(some)
        for priority, run in groupby(some, self._priority):
            self.push_all([*run], priority)
        return bool(some)

    def introduce(self, handles: Sequence[int]) -> None:
        """Tell the new policy the keys of blocks that are held, unless it knows them."""
        if self.keyed is None:
            return
        both = [(h, key) for h in handles if h not in self._known and (key := self._key(h))]
        if both:
            self.inserted([h for h, _ in both], [key for _, key in both], 0)

    # ---- the calls of a policy

    def reserve(self, handles: int) -> None:
        self.old.reserve(handles)
        self.new.reserve(handles)

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        self.introduce([handle])
        self.new.push(handle, priority, front=front)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        self.introduce(handles)
        self.new.push_all(handles, priority)

    def touch(self, handle: int) -> None:
        if handle in self.old:
            self.old.remove(handle)
            self.push(handle, self._priority(handle))
        else:
            self.new.touch(handle)

    def touch_all(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.touch(handle)

    def remove(self, handle: int) -> None:
        (self.old if handle in self.old else self.new).remove(handle)

    def remove_all(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.remove(handle)

    def pop(self) -> int:
        for handle in self:
            self.remove(handle)
            return handle
        raise IndexError("pop from an empty policy")

    def __len__(self) -> int:
        return len(self.old) + len(self.new)

    def __contains__(self, handle: int) -> bool:
        return handle in self.old or handle in self.new

    def __iter__(self) -> Iterator[int]:
        return merge(iter(self.old), iter(self.new), key=self._priority)

    # ---- the calls of a policy that is told keys

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        if self.keyed is not None:
            self.keyed.requested(keys, request)

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        if self.keyed is not None:
            self._known.update(handles)
            self.keyed.inserted(handles, keys, request)

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        if self.keyed is not None and (told := [h for h in handles if h in self._known]):
            self._known.difference_update(told)
            self.keyed.dropped(told, evicted=evicted)

    def refused(self, keys: Sequence[BlockKey], reason: RefusalReason) -> None:
        if self.keyed is not None:
            self.keyed.refused(keys, reason)

    def state(self) -> bytes:
        return b"" if self.keyed is None else self.keyed.state()

    def restore(self, state: bytes) -> None:
        if self.keyed is not None:
            self.keyed.restore(state)
