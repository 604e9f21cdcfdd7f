"""Blocks of fetches that wait until there is room for them in host slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kvladder.keys import BlockKey, unseen
from kvladder.lock import BATCH
from kvladder.metrics import MissCause, MissReason
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.loading.misses import MissExplainer
from kvladder.tiers.ladder.loading.pending import RECALLED
from kvladder.tiers.ladder.loading.plan import MissingBlocks, Planner, among, source
from kvladder.tiers.ladder.loading.reads import BlockReader
from kvladder.tiers.ladder.records.terms import HOST


class RoomWaitQueue:
    """Queues blocks that wait for room, first in, first out, in columns: no object for each.

    The stack's lock is held around ``add``, ``is_last`` and ``len``, from any thread. ``resume``
    and ``close`` run on the loop thread without it.

    Parameters
    ----------
    planner:
        Knows where blocks are by the time that there is room.
    reader:
        Leases slots and begins reads. Its ``arrivals`` are looked at here, never changed.
    misses:
        Says why a block does not come.
    post:
        Schedules a function on the loop thread.
    wake:
        Has the loop thread look for victims of host, and ``resume``.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        planner: Planner,
        reader: BlockReader,
        misses: MissExplainer,
        *,
        post: Callable[..., object],
        wake: Callable[[], None],
    ) -> None:
        self._host = host
        self._levels = levels
        self._shared = shared
        self._planner = planner
        self._reader = reader
        self._misses = misses
        self._arrivals = reader.arrivals
        self._post = post
        self._wake = wake
        self._fetches: deque[Fetch] = deque()
        self._positions: deque[int] = unseen(deque())
        self._keys: deque[BlockKey] = unseen(deque())
        self._places: deque[int] = unseen(deque())

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, fetch: Fetch, start: int, missing: MissingBlocks) -> int:
        """Queue blocks of ``fetch``, and return how many; their positions count from ``start``.

        Bounded by the slots of the arena: blocks beyond could never be there together.
        """
        bound = max(0, self._shared.arena.slots - len(self))
        positions = [start + position for position in missing.positions[:bound]]
        self._fetches.extend([fetch] * len(positions))
        self._positions.extend(positions)
        self._keys.extend(missing.keys[:bound])
        self._places.extend(missing.places[:bound])
        self._host.demand(len(self))
        return len(positions)

    def is_last(self, fetch: Fetch) -> bool:
        """Return whether the newest block in the queue is one of this fetch."""
        return bool(self._fetches) and self._fetches[-1] is fetch

    def resume(self) -> None:
        """Begin reads of the blocks that waited longest, as far as there is room now."""
        while self._prune():
            pass
        with self._shared.lock:
            # what host knows of its room may be outdated; if nothing is under way, no event will
            # correct it, so that many are tried
            missing = self._due(BATCH if self._is_stuck else self._host.room_max)
            begun, reads = self._reader.begin(missing, self._oldest(len(missing)))
            self._pop(begun)
            if self and missing and not begun and self._host.short_of == "quota":
                # others' victims make no room for its salt, so it must not delay those behind it
                self._give_up(1)
            elif self and self._is_stuck and not self._host.has_looked:
                # victims may have become clean since host last looked at them
                self._host.doubt()
                self._wake()
            elif self and self._is_stuck:  # no transfer is left that could make room
                self._give_up(BATCH)
            self._host.demand(len(self))
        self._reader.start(*reads)

    @property
    def _is_stuck(self) -> bool:
        """True if no read or write is under way that would cause another ``resume``."""
        return not self._arrivals and not any(level.pending for level in self._levels)

    def _give_up(self, most: int) -> None:
        """Fail the oldest blocks, and resume with those behind them."""
        self._host.stats.throttled += self._fail(most, self._host.short_of_slots)
        self._post(self.resume)

    def close(self) -> None:
        """Fail all blocks."""
        while self:
            with self._shared.lock:
                self._fail(BATCH, "ended")

    def _fail(self, most: int, why: MissReason) -> int:
        """Fail the oldest blocks, at most ``most``, and return how many."""
        count = min(most, len(self))
        oldest = zip(self._oldest(count), self._positions, strict=False)
        for fetch, position in [*oldest]:
            fetch.failed(position, MissCause(self._host.name, why))
        self._pop(count)
        return count

    def _oldest(self, count: int) -> list[Fetch]:
        """Return the fetches of the oldest ``count`` blocks."""
        return [*islice(self._fetches, count)]

    def _pop(self, count: int = 1) -> None:
        """Remove the oldest ``count`` blocks from the queue."""
        for column in (self._fetches, self._positions, self._keys, self._places):
            for _ in range(count):
                column.popleft()

    def _prune(self) -> bool:
        """Remove a step of blocks from the head that need not wait any more.

        Returns whether there may be more of them.
        """
        with self._shared.lock:
            for _ in range(BATCH):
                if not self._prune_one():
                    return False
        return True

    def _prune_one(self) -> bool:
        """Remove the head of the queue if it need not wait, and return whether it was removed."""
        if not self._keys:
            return False
        fetch, position, key = self._fetches[0], self._positions[0], self._keys[0]
        slot, arrival = self._host.find(key), self._arrivals.get(key)
        if fetch.queues_for([position], self._shared.clock.now()):
            if slot is None and (arrival is None or arrival.state is RECALLED):
                # still to be read; a recalled read has to end before another one of the key begins
                return False
            if not fetch.levels & (HOST if arrival is None else arrival.level.bit):
                # others had it brought to where this fetch does not read
                fetch.failed(position, self._misses.cause(key, fetch.levels))
            elif arrival is not None:
                arrival.join(fetch, position)
            elif slot is not None:
                self._host.pin([slot])
                fetch.arrived([position], [slot], self._host.name)
                self._host.stats.hits += 1
        self._pop()
        return True

    def _due(self, room: float) -> MissingBlocks:
        """Return the oldest blocks, at most ``room``, and where they are now.

        A block that no level holds any more ends the prefix of its fetch. Blocks that are in host
        or pending by now end the answer: ``_prune`` has to look at them first.
        """
        count = int(min(room, self._shared.load_step))
        fetches, keys = self._oldest(count), [*islice(self._keys, count)]
        positions, places = [*islice(self._positions, count)], [*islice(self._places, count)]
        missing = MissingBlocks([], [], [], [])
        if not keys:
            return missing
        levels = [level for level in self._levels if level.readable]
        now_s, in_host, arrivals = self._shared.clock.now(), self._host.index.keys(), self._arrivals
        first = fetches[0]
        if fetches.count(first) == len(fetches):
            # a long prefix mostly waits alone; one by one, looking it up takes three times as long
            own = among(levels, first.levels)
            found = self._planner.wants_bulk(keys, positions[0], own, places)
            if found and first.queues_for(positions, now_s):
                # their positions need not follow each other
                return MissingBlocks(positions, found.keys, found.levels, found.places)
        seen: set[BlockKey] = set()
        for fetch, position, key in zip(fetches, positions, keys, strict=True):
            found_in = source(among(levels, fetch.levels), key)
            ready = key in arrivals or key in in_host
            if ready or key in seen or not fetch.queues_for([position], now_s):
                break
            if found_in is None:
                fetch.failed(position, self._misses.cause(key, fetch.levels))
                break
            seen.add(key)
            missing.add(position, key, *found_in)
        return missing
