"""The adaptive order of one level: what is known of its blocks, and of those it had lately.

``Panel`` is in C if the package was built with a compiler, else it is ``PythonPanel``. Both do the
same; ``NATIVE`` says which one is used. ``docs/decisions/`` says why there are two.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from importlib import import_module
from itertools import accumulate
from typing import Any, Final

from kvladder.policy.hazards import (
    CLASSES,
    COUNT_MAX,
    EITHER,
    HALVE,
    INTERVALS,
    LEVELS,
    LOOP,
    PROMPT,
    PROMPTS,
    SESSION,
    Learner,
    Rank,
    class_of,
    interval_of,
)

FRONT: Final = CLASSES
"""List of the blocks that go before all others of their priority."""
WAYS: Final = 8
GHOSTS: Final = 6
"""Entries of ghosts for each block of the level."""
GHOSTS_MIN: Final = 8192
"""What is known of absent keys has room as for this many blocks, if the level has fewer."""
TIMES_MAX: Final = 64
"""But for at most this many times its blocks: all entries grow older again and again."""
COUNTS: Final = (0, *LEVELS)
"""Counts of uses that a ghost may have; others are rounded down."""
HALVED: Final = (0, 0, 1, 1, 2, 3, 4, 5)
"""Level in ``COUNTS`` of half the count."""
EPOCH: Final = 2
"""Sizes in uses of an epoch; a ghost has the number of epochs that ended since its last use."""
EPOCHS_MAX: Final = 3
GENERATION: Final = 4
"""Sizes in uses of a generation of keys that were used once."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is known of a key that the level does not hold."""

    count: int = 0
    """Number of uses; 0 if the key is unknown."""
    age: int = 0
    """About how many uses ago it was used."""
    interval: int = 0
    is_awaited: bool = False
    """True if the level was asked for the key and it has not come yet."""
    is_halved: bool = False
    """True if the count was halved since the last use as often as it has to be."""
    in_session: bool = False
    """True if a named session used it last."""


class SeenOnce:
    """Says of keys whether they were used once lately; 24 bits for each block and generation.

    Two Bloom filters, each for four times the size in uses: a key is forgotten after four to eight.
    Some unknown keys are taken for known ones; see ``PythonPanel.requested`` for why few are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.words = max(16, size * 3 // 8)
        self.now = array("Q", bytes(8 * self.words))
        self.before = array("Q", bytes(8 * self.words))
        self.began = 0
        """Time at which the newer generation began."""
        self._time = 0

    def _at(self, tag: int) -> tuple[int, int]:
        """Return the word of a key, and its bits there."""
        mixed = (tag * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 46
        bits = 1 << (mixed & 63) | 1 << (mixed >> 6 & 63) | 1 << (mixed >> 12)
        return (tag & 0xFFFFFFFF) * self.words >> 32, bits

    def age(self, tag: int) -> int:
        """Return about how many uses ago a key was used; 0 if it is unknown."""
        at, bits = self._at(tag)
        part = self._time - self.began
        if self.now[at] & bits == bits:
            return part // 2 + 1
        return part + GENERATION * self.size // 2 if self.before[at] & bits == bits else 0

    def add(self, tag: int, last: int) -> None:
        """Add a key that was used at time ``last``, if that is not too long ago."""
        at, bits = self._at(tag)
        if last >= self.began:
            self.now[at] |= bits
        elif last >= self.began - GENERATION * self.size:
            self.before[at] |= bits

    def tick(self, now: int) -> None:
        """Note the time, and begin a new generation when it is time."""
        self._time = now
        if now >= self.began + GENERATION * self.size:
            self.began = now
            self.before, self.now = self.now, self.before
            self.now[:] = array("Q", bytes(8 * self.words))


class Ghosts:
    """What is known of keys that the level does not hold; bounded, 12 bytes for each block.

    A key may be in one bucket of eight. If that is full, the key of the least uses gives way, the
    one that was used the longest time ago first. An entry has, from the lowest bit: the level of
    its count (3 bits; 0 if empty), the interval (2), whether the level was asked for the key and it
    has not come yet (1), epochs since its last use (2), whether a session used it (1), 7 bits of
    the key. Keys that were used once and are not
    awaited are in ``seen`` alone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        room = max(size, min(GHOSTS_MIN, TIMES_MAX * size))
        self.buckets = GHOSTS * room // WAYS
        self.entries = array("H", bytes(2 * WAYS * self.buckets))
        self.seen = SeenOnce(room)
        self._epoch = self._time = 0

    def _at(self, tag: int) -> tuple[int, int]:
        """Return the first entry of a key's bucket, and the bits that are compared."""
        low, high = tag & 0xFFFFFFFF, tag >> 32
        return (low * self.buckets >> 32) * WAYS, (low ^ high) & 0x7F

    def _find(self, tag: int) -> int:
        """Return the place of a key, -1 if it is unknown."""
        first, bits = self._at(tag)
        for at in range(first, first + WAYS):
            if self.entries[at] & 7 and self.entries[at] >> 9 == bits:
                return at
        return -1

    def count(self, tag: int) -> int:
        """Return how often a key was used lately, as far as it is known."""
        at = self._find(tag)
        return COUNTS[self.entries[at] & 7] if at >= 0 else int(self.seen.age(tag) > 0)

    def age(self, tag: int) -> int:
        """Return about how many uses ago a key was used; 0 if it is unknown."""
        at = self._find(tag)
        return self._age(self.entries[at]) if at >= 0 else self.seen.age(tag)

    def _age(self, entry: int) -> int:
        """Return the age of an entry; it is at most half an epoch from what is true."""
        length, epochs = EPOCH * self.size, entry >> 6 & 3
        part = self._time - self._epoch * length
        return epochs * length + part - length // 2 if epochs else part // 2

    def take(self, tag: int) -> Remembered:
        """Remove a key, and return what was known of it."""
        at = self._find(tag)
        if at < 0:
            age = self.seen.age(tag)
            return Remembered(int(age > 0), age)
        entry, self.entries[at] = self.entries[at], 0
        return Remembered(
            count=COUNTS[entry & 7],
            age=self._age(entry),
            interval=entry >> 3 & 3,
            is_awaited=bool(entry >> 5 & 1),
            is_halved=True,
            in_session=bool(entry >> 8 & 1),
        )

    def put(self, tag: int, last: int, count: int, kind: int, *, awaited: bool) -> None:
        """Add a key, which is not there, with the time of its last use and its class."""
        self.seen.add(tag, last)
        if count < 2 and not awaited:
            return
        first, bits = self._at(tag)
        level = sum(count >= least for least in COUNTS) - 1
        found, least = first, (len(COUNTS), 0)
        for at in range(first, first + WAYS):
            entry = self.entries[at]
            worth = (entry & 7, -(entry >> 6 & 3) if entry & 7 else 0)
            if worth < least:
                found, least = at, worth
            if not entry & 7:
                break
        length, began = EPOCH * self.size, EPOCH * self.size * self._epoch
        epochs = 1 + (began - 1 - last) // length if last < began else 0
        low = awaited << 5 | kind % INTERVALS << 3 | level
        high = bits << 9 | (SESSION <= kind < PROMPTS) << 8
        self.entries[found] = high | min(EPOCHS_MAX, epochs) << 6 | low

    def tick(self, now: int) -> None:
        """Begin a new generation, age all entries, and halve counts: each in its time."""
        self._time = now
        self.seen.tick(now)
        if now < (self._epoch + 1) * EPOCH * self.size:
            return
        self._epoch += 1
        halves = self._epoch % (HALVE // EPOCH) == 0
        for at, entry in enumerate(self.entries):
            level = HALVED[entry & 7] if halves else entry & 7
            older = min(EPOCHS_MAX, (entry >> 6 & 3) + 1) << 6
            self.entries[at] = entry & 0xFF38 | older | level if level else 0


class HeldBlock:
    """A block that the level holds."""

    __slots__ = ("asked", "count", "kind", "last", "list", "priority", "tag")

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.count = self.kind = self.last = 0
        self.priority = 0
        self.list = -1
        """Its list; -1 while it may not go."""
        self.asked = False
        """True if a request has asked for it, and ``touch`` has not told that it was used."""


class PythonPanel:
    """Orders blocks of each priority by the rule that serves sampled keys best.

    Parameters
    ----------
    size:
        Number of blocks that the level holds at most.
    """

    def __init__(self, size: int) -> None:
        self.size = size = max(1, size)
        self._learner = Learner(size)
        self._ghosts = Ghosts(size)
        self._is_exact = self._learner.rate == 1
        """True if every key is sampled: then the count and age of an absent key are known."""
        self._now = 0
        self._prompt_age = self._prompt_interval = 0  # of the prompt that is asked for now
        self._in_session = False
        self._held: dict[int, HeldBlock] = {}
        self._lists: dict[int, list[OrderedDict[int, None]]] = {}
        self._len = 0

    @property
    def rule(self) -> int:
        """Number of the rule that orders the blocks now."""
        return self._learner.rule

    def reserve(self, handles: int) -> None:
        """Allocate memory for handles below ``handles``."""

    def requested(
        self, keys: Sequence[bytes], places: Sequence[int | None], in_session: bool
    ) -> None:
        """Count a use of each key, the last first; ``places`` has their handles, None if absent.

        ``in_session`` says whether a named session asks. The rules by prompt alone use it.

        The keys are those of a prompt, so a block was not used more often than the one before it.
        That corrects most of what ``SeenOnce`` and ``Ghosts`` take for known by mistake, and, where
        the next two are known, what they have lost.
        """
        tags = [tag_of(key) for key in keys]
        sampled = [*filter(self._learner.samples, tags)]
        if sampled:
            self._learner.asked(sampled)
        found = [*map(self._count, tags, places)]
        behind = [*map(min, found[1:], found[2:]), 0, 0]
        counts = [*accumulate(map(max, found, behind), min)]
        deepest = sum(count > 0 for count in counts) - 1
        if deepest >= 0:
            self._prompt_age = self._age(tags[deepest], places[deepest])
            self._prompt_interval = interval_of(self._prompt_age, self.size)
        self._in_session = in_session
        for tag, handle, count in zip(tags[::-1], places[::-1], counts[::-1], strict=True):
            if handle is None:
                self._await(tag, count)
            else:
                self._use(self._held[handle], handle)
                self._held[handle].asked = True
        self._prompt_interval, self._in_session = 0, False

    def _age(self, tag: int, handle: int | None) -> int:
        """Return about how many uses ago a known key was used."""
        if handle is not None:
            return self._now - self._held[handle].last
        if self._is_exact:
            return self._learner.known(tag, self._now)[2]
        return self._ghosts.age(tag)

    def _count(self, tag: int, handle: int | None) -> int:
        """Return how often a key was used lately, as far as it is known."""
        if handle is not None:
            count, age = self._held[handle].count, self._now - self._held[handle].last
        elif self._is_exact:
            count, _, age = self._learner.known(tag, self._now)
        else:
            return self._ghosts.count(tag)
        period = self._learner.period
        return count >> min(COUNT_MAX, self._now // period - (self._now - age) // period)

    def _await(self, tag: int, before: int) -> None:
        """Count a use of a key that the level does not hold, which was used ``before`` times."""
        known = self._ghosts.take(tag) if before else Remembered()
        if self._is_exact:
            known = self._sampled(tag)
        elif known.count < before:
            age = known.age if known.count else self._prompt_age
            known = Remembered(before, age, is_halved=True)
        count, age = self._next(known)
        count = min(count, before + 1)
        kind = self._ordered(count, age)
        self._learn(tag, count, age)
        self._ghosts.put(tag, self._now, count, kind, awaited=True)

    def _sampled(self, tag: int) -> Remembered:
        """Return what is known of a key if all are sampled; then it is exact."""
        count, _, age = self._learner.known(tag, self._now)
        return Remembered(count, age)

    def _next(self, known: Remembered) -> tuple[int, int]:
        """Return count and age of a key after a use now."""
        self._now += 1
        period = self._learner.period
        count, age = known.count, known.age
        if count:
            age = min(age + 1, self._now)  # where it is not known exactly
        if count and not known.is_halved:
            count >>= min(COUNT_MAX, self._now // period - (self._now - age) // period)
        return min(COUNT_MAX, count + 1), age

    def _class(self, count: int, age: int) -> int:
        return class_of(count, interval_of(age, self.size) if count > 1 else self._prompt_interval)

    def _by_prompt(self) -> int:
        """Return the class by prompt of what is used now."""
        return (SESSION if self._in_session else PROMPTS) + self._prompt_interval

    def _ordered(self, count: int, age: int) -> int:
        """Return the class by which a block that is used now is ordered."""
        return self._by_prompt() if self._learner.rule >= PROMPT else self._class(count, age)

    def _learn(self, tag: int, count: int, age: int) -> None:
        self._ghosts.tick(self._now)
        if self._learner.samples(tag):
            self._learner.use(tag, self._now, self._class(count, age), self._by_prompt())
        self._learner.tick(self._now)

    def _use(self, one: HeldBlock, handle: int) -> None:
        one.count, age = self._next(Remembered(one.count, self._now - one.last))
        one.kind, one.last = self._ordered(one.count, age), self._now
        self._learn(one.tag, one.count, age)
        if one.list >= 0:
            self._unlink(one, handle)
            self._link(one, handle, one.kind)

    def inserted(self, handles: Sequence[int], keys: Sequence[bytes], request: int) -> None:
        """Hold blocks; a use of each that a request brought without asking for it before."""
        for handle, key in zip(handles, keys, strict=True):
            assert handle not in self._held, f"handle {handle} is held"
            one = self._held[handle] = HeldBlock(tag_of(key))
            known = self._ghosts.take(one.tag)
            is_awaited = known.is_awaited
            one.kind = class_of(known.count, known.interval) if known.count else 0
            if self._learner.rule >= PROMPT:
                one.kind = (SESSION if known.in_session else PROMPTS) + known.interval
            if self._is_exact:
                known, one.kind = self._sampled(one.tag), self._learner.known(one.tag, 0)[1]
            if request and not is_awaited:
                one.count, age = self._next(known)
                one.kind = self._ordered(one.count, age)
                self._learn(one.tag, one.count, age)
            else:
                one.count = max(1, known.count)
            one.last = self._now

    def dropped(self, handles: Sequence[int], evicted: bool) -> None:
        """Hold these blocks no longer."""
        for handle in handles:
            one = self._held[handle]
            assert one.list < 0, f"handle {handle} is in the policy"
            count = self._count(one.tag, handle)
            del self._held[handle]
            if evicted:
                self._ghosts.take(one.tag)
                self._ghosts.put(one.tag, one.last, count, one.kind, awaited=False)
            elif self._learner.samples(one.tag):
                self._learner.leave(one.tag, self._now)

    def refused(self, keys: Sequence[bytes]) -> None:
        """Take these keys out of the shadows: the level does not hold them."""
        for tag in map(tag_of, keys):
            if self._learner.samples(tag):
                self._learner.leave(tag, self._now)

    def push(self, handle: int, priority: int, front: bool) -> None:
        """Add a block that is held."""
        one = self._held[handle]
        assert one.list < 0, f"handle {handle} pushed twice"
        one.priority, one.asked = priority, False
        one.last = self._now
        self._link(one, handle, FRONT if front else one.kind)

    def touch(self, handle: int) -> None:
        """Make a block the most recently used of its class; count a use unless it was asked for."""
        one = self._held[handle]
        assert one.list >= 0, f"handle {handle} is not in the policy"
        if one.asked:
            one.asked = False
            one.last = self._now
            self._unlink(one, handle)
            self._link(one, handle, one.kind)
        else:
            self._use(one, handle)

    def remove(self, handle: int) -> None:
        """Remove a block from the order; it is held still."""
        one = self._held[handle]
        assert one.list >= 0, f"handle {handle} is not in the policy"
        self._unlink(one, handle)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        """Push ``handles`` one after the other."""
        for handle in handles:
            self.push(handle, priority, False)

    def touch_all(self, handles: Sequence[int]) -> None:
        """Touch ``handles`` one after the other."""
        for handle in handles:
            self.touch(handle)

    def remove_all(self, handles: Sequence[int]) -> None:
        """Remove ``handles`` one after the other."""
        for handle in handles:
            self.remove(handle)

    def _link(self, one: HeldBlock, handle: int, to: int) -> None:
        lists = self._lists.get(one.priority)
        if lists is None:
            lists = self._lists[one.priority] = [OrderedDict() for _ in range(CLASSES + 1)]
        lists[to][handle] = None
        if to == FRONT:
            lists[to].move_to_end(handle, last=False)
        one.list = to
        self._len += 1

    def _unlink(self, one: HeldBlock, handle: int) -> None:
        del self._lists[one.priority][one.list][handle]
        one.list = -1
        self._len -= 1

    def __len__(self) -> int:
        return self._len

    def __contains__(self, handle: int) -> bool:
        one = self._held.get(handle)
        return one is not None and one.list >= 0

    def __iter__(self) -> Iterator[int]:
        for priority in sorted(self._lists):
            lists = self._lists[priority]
            yield from lists[FRONT]
            yield from self._merged(lists[:CLASSES])

    def _merged(self, lists: list[OrderedDict[int, None]]) -> Iterator[int]:
        """Yield the blocks of all lists by the rule, each from its start, or from both ends."""
        ends = 2 if self._learner.rule in (EITHER, LOOP) else 1
        walks = [(iter(order), reversed(order)) for order in lists]
        left = [*map(len, lists)]
        heap = [
            self._ranked(next(walks[kind][end]), end)
            for kind in range(CLASSES)
            for end in range(min(ends, left[kind]))
        ]
        heapify(heap)
        while heap:
            (_, _, kind), end, handle = heap[0]
            left[kind] -= 1
            if left[kind] >= ends:
                heapreplace(heap, self._ranked(next(walks[kind][end]), end))
            else:  # the last one of the list, or the next one is that of the other end
                heappop(heap)
            yield handle

    def _ranked(self, handle: int, end: int) -> tuple[Rank, int, int]:
        one, learner = self._held[handle], self._learner
        rank = learner.hazards.rank(learner.rule, one.kind, self._now - one.last)
        return rank, end, handle

    def state(self) -> bytes:
        """Return what was learned, ``STATE.size`` bytes."""
        return self._learner.state()

    def restore(self, state: bytes) -> None:
        """Continue from what ``state`` returned."""
        self._learner.restore(state)


def tag_of(key: bytes) -> int:
    """Return the 40 bits by which a key is known."""
    return int.from_bytes(key[:5], "little")


Panel: Any = PythonPanel
_native: Any = None
with suppress(ImportError):
    _native = import_module("kvladder.policy._panel")
NATIVE = _native is not None
if NATIVE:
    Panel = _native.Panel
