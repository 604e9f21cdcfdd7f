"""Blocks of fetches that wait until there is room for them in host slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from kvladder.keys import BlockKey, unseen
from kvladder.lock import BATCH
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch, PendingRead
from kvladder.tiers.ladder.loading.plan import MissingBlocks, Planner, among, source
from kvladder.tiers.ladder.records.terms import HOST


class RoomWaitQueue:
    """Queues blocks that wait for room, first in, first out, in columns: no object for each.

    Called on the loop thread or by the engine's. The stack's lock is held around every call but
    ``prune``, which takes it.

    Parameters
    ----------
    arrivals:
        Pending reads by key, for any fetch; read here, never changed.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        arrivals: Mapping[BlockKey, PendingRead],
        planner: Planner,
    ) -> None:
        self._host = host
        self._levels = levels
        self._shared = shared
        self._arrivals = arrivals
        self._planner = planner
        self._fetches: deque[Fetch] = deque()
        self._positions: deque[int] = unseen(deque())
        self._keys: deque[BlockKey] = unseen(deque())
        self._places: deque[int] = unseen(deque())

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, fetch: Fetch, start: int, missing: MissingBlocks) -> dict[int, Level]:
        """Queue blocks of ``fetch``; their positions in it count from ``start``.

        Bounded by the slots of the arena: blocks beyond could never be there together. Returns the
        level of each block that was queued, by its position.
        """
        bound = max(0, self._shared.arena.slots - len(self))
        positions = [start + position for position in missing.positions[:bound]]
        self._fetches.extend([fetch] * len(positions))
        self._positions.extend(positions)
        self._keys.extend(missing.keys[:bound])
        self._places.extend(missing.places[:bound])
        self._host.demand(len(self))
        return dict(zip(positions, missing.levels, strict=False))

    def has_last(self, fetch: Fetch) -> bool:
        """Return whether the newest block in the queue is one of this fetch."""
        return bool(self._fetches) and self._fetches[-1] is fetch

    def fetches(self, count: int) -> list[Fetch]:
        """Return the fetches of the oldest ``count`` blocks."""
        return [*islice(self._fetches, count)]

    def pop(self, count: int = 1) -> None:
        """Remove the oldest ``count`` blocks from the queue."""
        for column in (self._fetches, self._positions, self._keys, self._places):
            for _ in range(count):
                column.popleft()

    def drop(self, most: int = BATCH) -> int:
        """Fail the oldest blocks, at most ``most``, and return how many."""
        dropped = min(most, len(self))
        oldest = zip(islice(self._fetches, dropped), self._positions, strict=False)
        for fetch, position in [*oldest]:
            fetch.failed(position)
        self.pop(dropped)
        return dropped

    def prune(self) -> bool:
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
            if slot is None and (arrival is None or arrival.dead):
                return False
            if not fetch.levels & (HOST if arrival is None else arrival.level.bit):
                fetch.failed(position)
            elif arrival is not None:
                arrival.join(fetch, position)
            elif slot is not None:
                self._host.pin([slot])
                fetch.arrived([position], [slot], self._host.name)
                self._host.stats.hits += 1
        self.pop()
        return True

    def due(self, room: float) -> MissingBlocks:
        """Return the oldest blocks, at most ``room``, and where they are now.

        A block that no level holds any more ends the prefix of its fetch. Blocks that are in host
        or pending by now end the answer: ``prune`` has to look at them first.
        """
        count = int(min(room, self._shared.load_step))
        fetches, keys = self.fetches(count), [*islice(self._keys, count)]
        positions, places = [*islice(self._positions, count)], [*islice(self._places, count)]
        missing = MissingBlocks()
        if not keys:
            return missing
        levels = [level for level in self._levels if level.readable]
        now_s, in_host, arrivals = self._shared.clock.now(), self._host.index.keys(), self._arrivals
        first = fetches[0]
        if fetches.count(first) == len(fetches):
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
                fetch.failed(position)
                break
            seen.add(key)
            missing.add(position, key, *found_in)
        return missing
