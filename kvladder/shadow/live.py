"""The live shadow of a running cache: takes what requests use, samples it, and answers questions.

Engine threads only append to a queue. The loop thread, or a thread that asks for figures, takes
the keys from there in steps, and joins them to sample all of a step at once.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import inf
from typing import Any, Final

import numpy as np

from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.policy.prices import Prices
from kvladder.shadow.level import LevelShadow, OptimumFigures, Sampled, ShadowSpec
from kvladder.shadow.worth import WorthSource, as_text, worth

STEP_BLOCKS: Final = 1024
"""Blocks that are processed in one step: a fraction of a millisecond."""
WAKE_BLOCKS: Final = 4 * STEP_BLOCKS
"""Blocks that wait before the loop thread is woken: that costs as much as many blocks."""
WAITING_MAX: Final = 1 << 16
"""Largest number of blocks that wait; requests beyond it are left out and counted."""
CPU_SHARE: Final = 0.01
"""Share of one processor above which less keys are sampled."""
CHECK_S: Final = 10.0
"""Time over which that share is measured."""
FRESH_S: Final = 1.0
"""Age of figures from which on a thread that asks for them processes what waits."""
MEMORY_SHARE: Final = 0.001
"""Share of the arena that all shadows may take, unless that is too few keys."""
_WORD: Final = 1
"""Number of the eight bytes of a key that are its hash here; policies use the first ones."""
_STORED: Final = -1
UNSAVED_MAX: Final = 4096
"""Most sampled keys that are remembered as asked for and not saved yet."""

_UseEvent = tuple[Sequence[BlockKey], int]
"""Keys of a prompt, and how many leading ones the levels have; ``_STORED`` for blocks saved."""


@dataclass(frozen=True, slots=True)
class ShadowClocks:
    """Clocks in seconds."""

    now: Callable[[], float]
    cpu: Callable[[], float]
    """Processor time of the calling thread."""


class LiveShadow:
    """Follows what requests ask of a ladder, see ``AccessListener``; any thread may call it.

    Parameters
    ----------
    specs:
        The levels that are followed, hottest first.
    arena_bytes:
        Memory of the cache; the shadow may take a thousandth.
    post:
        Schedules a function on the loop thread.
    """

    def __init__(
        self,
        specs: Sequence[ShadowSpec],
        *,
        arena_bytes: int,
        prices: Prices,
        clocks: ShadowClocks,
        post: Callable[..., object],
    ) -> None:
        budget, now_s = arena_bytes * MEMORY_SHARE / len(specs), clocks.now()
        self.levels: list[LevelShadow] = []
        for spec in specs:
            above = [*self.levels]
            self.levels.append(LevelShadow(spec, above, budget_bytes=budget, now_s=now_s))
        self.dropped = 0
        """Requests that were left out, as too many waited."""
        self.cpu_s = 0.0
        """Processor time that the shadow has taken, but for the engine's threads."""
        self._prices = prices
        self._clocks = clocks
        self._post = post
        self._sources: dict[str, WorthSource] = {}
        self._block_s: Callable[[], float | None] = lambda: None
        self._events: deque[_UseEvent] = deque()
        self._waiting = 0
        self._used = 0
        """Blocks used in this step."""
        self._is_posted = False
        self._lock = threading.Lock()
        self._unsaved: OrderedDict[BlockKey, None] = OrderedDict()
        """Sampled keys that a request asked for, no level had, and that are not saved yet."""
        self._unsaved_blocks = 0
        """The same of all keys."""
        self._check_s, self._check_cpu_s = now_s, 0.0
        self._stepped_s = -inf

    def value(self, block_s: Callable[[], float | None], sources: dict[str, WorthSource]) -> None:
        """Take what hits are worth from these from now on; ``block_s`` computes a block."""
        self._block_s, self._sources = block_s, sources

    # ---- for the engine's threads, see ``AccessListener``

    def asked(self, keys: Sequence[BlockKey], found: int) -> None:
        """Take a prompt; the levels have its first ``found`` blocks."""
        self._put(keys, found)

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """Take blocks that were computed and are saved."""
        self._put(keys, _STORED)

    def _put(self, keys: Sequence[BlockKey], found: int) -> None:
        if not keys:
            return
        if self._waiting > WAITING_MAX:
            self.dropped += 1
            return
        self._events.append((keys, found))
        self._waiting += len(keys)  # two threads may lose a count: a step is then taken later
        if self._waiting >= WAKE_BLOCKS and not self._is_posted:
            self._is_posted = True
            self._post(self.drain)

    # ---- the loop thread, and threads that ask

    def drain(self) -> None:
        """Process a step of what waits, and post the next one (loop thread)."""
        self._is_posted = False
        if not self._lock.acquire(blocking=False):
            return  # a thread that asks for figures takes them
        try:
            self._step()
            self._optima(anew=True)
        finally:
            self._lock.release()
        if self._waiting >= STEP_BLOCKS and not self._is_posted:
            self._is_posted = True
            self._post(self.drain)

    def _step(self) -> bool:
        """Process about ``STEP_BLOCKS`` blocks; return whether there were any."""
        began_s, self._stepped_s = self._clocks.cpu(), self._clocks.now()
        taken: list[_UseEvent] = []
        blocks = 0
        while self._events and blocks < STEP_BLOCKS:
            taken.append(self._events.popleft())
            blocks += len(taken[-1][0])
        if not self._events:
            self._waiting = 0
        else:
            self._waiting = max(0, self._waiting - blocks)
        for (keys, found), (prompt, known) in zip(taken, self._sampled(taken), strict=True):
            self._take(len(keys), found, prompt, known)
        for level in self.levels:
            level.asked(self._used)
            level.roll(self._stepped_s)
        self._used = 0
        self._govern(self._stepped_s, began_s)
        return bool(taken)

    def _sampled(self, events: Sequence[_UseEvent]) -> list[tuple[Sampled, int]]:
        """Return the keys of each event that the hottest level follows, with their hashes.

        Beside them stands how many of these the levels have.
        """
        if not events:
            return []
        joined = b"".join(chain.from_iterable([keys for keys, _ in events]))
        marks = np.frombuffer(joined, "<u8")[_WORD :: KEY_BYTES // 8]
        at = np.flatnonzero(marks <= np.uint64((1 << 64 - self.levels[0].shift) - 1))
        places: list[int] = at.tolist()
        hashes: list[int] = marks[at].tolist()
        sampled: list[tuple[Sampled, int]] = []
        first = start = 0
        for keys, found in events:
            end = bisect_left(places, first + len(keys), start)
            known = bisect_left(places, first + found, start, end) - start
            own = [keys[place - first] for place in places[start:end]]
            sampled.append(([*zip(own, hashes[start:end], strict=True)], known))
            first, start = first + len(keys), end
        return sampled

    def _take(self, blocks: int, found: int, prompt: Sampled, known: int) -> None:
        """Process a prompt, or blocks that were computed.

        An engine may ask for all of a prompt, and save what was missing later; or ask only for what
        it knows to be there. In either case each block counts once. ``prompt`` are the sampled
        keys; the levels have the first ``known`` of them, and ``found`` of all.
        """
        unsaved = self._unsaved
        if found == _STORED:
            awaited = min(blocks, self._unsaved_blocks)
            self._unsaved_blocks -= awaited
            blocks -= awaited
            asked = prompt
            prompt = [one for one in asked if one[0] not in unsaved]
            for key, _ in asked:
                unsaved.pop(key, None)
        else:
            self._unsaved_blocks += blocks - found
            for key, _ in prompt[known:]:
                unsaved[key] = None
            while len(unsaved) > UNSAVED_MAX:
                unsaved.popitem(last=False)
        self._used += blocks
        if not prompt:
            return
        levels = self.levels
        owns = [prompt, *(level.own(prompt) for level in levels[1:])]
        for level, own in zip(levels, owns, strict=True):
            if own:
                level.count(own, is_last=level is levels[-1])
        offered: Sampled = ()
        for level, own in zip(levels, owns, strict=True):
            if own or offered:
                gone = level.use(own, offered)
                offered = [(key, mark_of(key)) for key in gone] if level is not levels[-1] else ()

    def _govern(self, now_s: float, began_s: float) -> None:
        """Sample half of the keys of a level from now on if the shadow takes too much time."""
        self.cpu_s += max(0.0, self._clocks.cpu() - began_s)
        lasted_s = now_s - self._check_s
        if lasted_s < CHECK_S:
            return
        if self.cpu_s - self._check_cpu_s > CPU_SHARE * lasted_s:
            least = 0  # a colder level follows no key that a hotter one does not
            for level in self.levels:
                level.thin(mark_of, least)
                least = level.shift
        self._check_s, self._check_cpu_s = now_s, self.cpu_s

    def fill(self, name: str, keys: Sequence[BlockKey]) -> None:
        """Tell of blocks that a level holds at the start, a step of them, the oldest first."""
        with self._lock:
            level = next(one for one in self.levels if one.name == name)
            level.fill([key for key in keys if level.follows(mark_of(key))])

    # ---- figures

    def settle(self) -> None:
        """Process all that waits."""
        with self._lock:
            while self._step():
                pass

    def stats(self) -> dict[str, Any]:
        """Return the figures, by name, level and size.

        An engine may call it often, from its own thread. So it takes what waits only if no step was
        taken for a second.
        """
        if self._clocks.now() - self._stepped_s >= FRESH_S:
            self.settle()
        with self._lock:
            began_s, now_s = self._clocks.cpu(), self._clocks.now()
            found = self._figures(now_s)
            self._govern(now_s, began_s)
            return {**found, "cpu_s": self.cpu_s}

    def _figures(self, now_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sampled_ratio": {level.name: level.rate for level in self.levels},
            "dropped": self.dropped,
            "optimum_ratio": {},
            "reached_ratio": {},
        }
        block_s = self._block_s()
        for level, best in zip(self.levels, self._optima(anew=False), strict=True):
            if best is not None:
                found["optimum_ratio"][level.name] = best.optimum
                found["reached_ratio"][level.name] = best.reached
            source = self._sources.get(level.name)
            if source is None:
                continue
            for name, by_size in worth(level, source, self._prices, block_s, now_s).items():
                found.setdefault(name, {})[level.name] = by_size
        return found

    def _optima(self, *, anew: bool) -> list[OptimumFigures | None]:
        """Return Belady's optimum down to each level, computed ``anew`` if it is old."""
        now_s, sizes = self._clocks.now(), accumulate(level.spec.blocks for level in self.levels)
        both = zip(self.levels, sizes, strict=True)
        return [level.optimum(blocks, now_s, anew=anew) for level, blocks in both]

    def describe(self) -> list[str]:
        """Return a line for each level: the part of the keys that is followed, and the figures."""
        self.settle()
        figures = self.stats()
        lines: list[str] = []
        for level in self.levels:
            told = as_text(level.name, figures)
            lines.append(f"shadow: {told}; follows 1 of {1 << level.shift} keys")
        return lines


def mark_of(key: BlockKey) -> int:
    """Return the hash by which a key is sampled."""
    return int.from_bytes(key[8 * _WORD : 8 * _WORD + 8], "little")
