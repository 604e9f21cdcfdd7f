"""S3-FIFO as an eviction policy; docs/how-to/write-a-policy.md explains it.

Some hot blocks are used before and after one long scan. Run it to see how many are still there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence

import kvladder
from kvladder.config.registry import register
from kvladder.keys import BlockKey
from kvladder.policy.eviction import KeyedPolicy

NEW_SHARE = 0.1
"""Share of a level for blocks that were used once; above it they go first."""
USES_MAX = 3


class Entry:
    """A block of the level."""

    priority = -1
    uses = 0

    def __init__(self, key: BlockKey, *, kept: bool) -> None:
        self.key = key
        self.kept = kept
        """True if it was used again, here or soon after it was evicted."""


Queue = OrderedDict[int, Entry]


class S3Fifo(KeyedPolicy):
    """Blocks wait in a queue of new ones; those that are used again move to one of kept ones.

    There are two queues for each priority, the lowest priority first. Keys of new blocks that were
    evicted are remembered, as many as the level has blocks: if such a block comes back, it is kept.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._queues: dict[int, tuple[Queue, Queue]] = defaultdict(lambda: (Queue(), Queue()))
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._len = 0

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        for handle, key in zip(handles, keys, strict=True):
            self._entries[handle] = Entry(key, kept=key in self._ghosts)
            self._ghosts.pop(key, None)

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        for handle in handles:
            entry = self._entries.pop(handle)
            if evicted and entry.kept:
                self._second_chances(self._queues[entry.priority][True])
            elif evicted:
                self._ghosts[entry.key] = None
        while len(self._ghosts) > len(self._entries):
            self._ghosts.popitem(last=False)

    def _second_chances(self, kept: Queue) -> None:
        """Move blocks that were used from the front to the back, each with one use less."""
        while kept and (entry := next(iter(kept.values()))).uses:
            entry.uses -= 1
            kept.move_to_end(next(iter(kept)))

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        entry = self._entries[handle]
        if entry.priority == priority:  # the same block again: a request had pinned it
            self._use(entry)
        entry.priority = priority
        queue = self._queues[priority][entry.kept]
        queue[handle] = entry
        if front:
            queue.move_to_end(handle, last=False)
        self._len += 1

    def _use(self, entry: Entry) -> None:
        entry.kept = True
        entry.uses = min(USES_MAX, entry.uses + 1)

    def touch(self, handle: int) -> None:
        entry = self._entries[handle]
        new, kept = self._queues[entry.priority]
        self._use(entry)
        if handle in new:
            kept[handle] = new.pop(handle)

    def remove(self, handle: int) -> None:
        entry = self._entries[handle]
        del self._queues[entry.priority][entry.kept][handle]
        self._len -= 1

    def pop(self) -> int:
        for handle in self:
            self.remove(handle)
            return handle
        raise IndexError("pop from an empty policy")

    def __len__(self) -> int:
        return self._len

    def __contains__(self, handle: int) -> bool:
        entry = self._entries.get(handle)
        return entry is not None and handle in self._queues[entry.priority][entry.kept]

    def __iter__(self) -> Iterator[int]:
        left = self._len
        for priority in sorted(self._queues):
            new, kept = self._queues[priority]
            fresh, proven = iter(new), self._rounds(kept)
            new_left, kept_left = len(new), len(kept)
            while new_left or kept_left:
                if new_left > NEW_SHARE * left or not kept_left:
                    new_left -= 1
                    yield next(fresh)
                else:
                    kept_left -= 1
                    yield next(proven)
                left -= 1

    def _rounds(self, kept: Queue) -> Iterator[int]:
        """Yield handles in the order of a clock hand; each of its rounds takes one use."""
        for uses in range(USES_MAX + 1):
            yield from (handle for handle, entry in kept.items() if entry.uses == uses)


def hot_blocks_left(policy: str) -> int:
    """Use 8 hot blocks of 20 slots before a scan of 64 blocks; return how many are left then."""
    layout = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "demo"})
    host = {"type": "host", "policy": policy}
    source = {"arena": {"size": f"{20 * 4096} B", "reserve": 0}, "tiers": [host]}
    with kvladder.open_cache(source, layout=layout) as cache:
        scheme = kvladder.KeyScheme(cache.namespace, block_tokens=16)
        hot, scan = scheme.chain(range(128)), scheme.chain(range(1000, 1000 + 64 * 16))
        cache.save(hot).commit()
        fetch = cache.fetch(hot)
        fetch.wait()
        fetch.release()
        for key in scan:
            cache.save([key]).commit()
        return cache.lookup(hot).total


def main() -> None:
    """Print what is left with S3-FIFO, and with the default policy."""
    for policy in ("s3-fifo", "prioritized-lru"):
        print(f"{policy}: {hot_blocks_left(policy)} of 8 hot blocks are left")
    assert hot_blocks_left("s3-fifo") > hot_blocks_left("prioritized-lru")


if __name__ == "__main__":
    register("policies", "s3-fifo", S3Fifo)
    main()
