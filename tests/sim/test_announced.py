"""A listener that replays the announcer's events knows each level's index at all times."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

import pytest

from kvladder.events import Removed, Stored
from kvladder.keys import BlockKey
from kvladder.publishing import announcer as module
from kvladder.publishing.announcer import Announcer
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from tests.kit import soak
from tests.kit.world import World
from tests.stack.caches import COMMIT, cache_of, flushed


class Listener:
    """Replays the events, and calls each block by the name under which it is stored."""

    def __init__(self, cache: SimCache) -> None:
        self.indexes = cache.stack.indexes
        self.announcer = Announcer(cache.stack)
        self.repeated = False
        self.naming = 0
        """The number of changes of all names."""
        self.heard: dict[str, dict[BlockKey, int]] = {name: {} for name in self.indexes}

    def rename(self) -> None:
        """Blocks have other names from now on."""
        self.naming += 1
        self.announcer.renew()

    def listen(self) -> None:
        """Once; no block is announced twice, none removed that was not announced."""
        for event in self.announcer.take():
            keys, heard = set(event.keys), self.heard[event.level]
            assert len(keys) == len(event.keys) > 0
            if isinstance(event, Stored):
                assert self.repeated or not keys & heard.keys()
                assert all(heard.get(key, self.naming) == self.naming for key in keys)
                heard.update(dict.fromkeys(keys, self.naming))
            else:
                assert self.repeated or keys <= heard.keys()
                for key in keys:
                    heard.pop(key, None)
        if not self.announcer.pending:
            now = {name: dict.fromkeys(index, self.naming) for name, index in self.indexes.items()}
            assert self.heard == now

    def listen_to_all(self) -> None:
        """Listen until there are no more events."""
        while self.announcer.pending:
            self.listen()


class AnnouncedWorld(World):
    """A world with an occasional listener, so that a small buffer overflows in between."""

    overflows: ClassVar[Counter[bool]] = Counter()

    def _open(self) -> None:
        super()._open()
        buffer = self.manager.ladder.events
        buffer._max = Random(self._seed).choice((1, 3, 10))
        self.listener = Listener(self.cache)
        self.chance = Random(self._seed)

    def _replay(self) -> None:
        if self.chance.random() < 0.02:  # announce all again; only some listeners clear
            self.listener.announcer.repeat()
            self.listener.repeated = True
            if self._seed % 2:
                for heard in self.listener.heard.values():
                    heard.clear()
        if self.chance.random() < 0.02:
            self.listener.rename()
        if self.chance.random() < 0.2:
            self.overflows[bool(self.manager.ladder.events._lost)] += 1
            self.listener.listen()

    def end(self) -> None:
        self._replay()
        self.listener.listen_to_all()
        super().end()


@pytest.mark.slow
def test_replayed_events_give_the_index_of_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "World", AnnouncedWorld)
    monkeypatch.setattr(module, "COMPARE_MAX", 2)
    for seed in range(40):
        soak.run_world(seed)
    assert min(AnnouncedWorld.overflows.values()) > 100, "with overflows and without"


async def test_recovered_blocks_are_announced_at_the_start_and_on_a_repeat() -> None:
    store = await flushed((1, 2, 3))
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), COMMIT)) as cache:
        listener = Listener(cache)
        assert listener.announcer.pending
        listener.listen_to_all()
        assert listener.heard == {"host": {}, "level1": dict.fromkeys(cache.keys(1, 2, 3), 0)}
        cache.save(cache.keys(7))
        await cache.settle()
        listener.listen()
        for heard in listener.heard.values():
            heard.clear()
        listener.announcer.repeat()
        listener.repeated = True
        cache.manager.remove(cache.keys(1, 2, 3)[1:])
        listener.listen_to_all()
        assert {name: len(heard) for name, heard in listener.heard.items()} == {
            "host": 1,
            "level1": 2,
        }


async def test_after_an_overflow_only_the_differences_are_announced() -> None:
    async with cache_of(slots=8) as cache:
        listener = Listener(cache)
        listener.listen_to_all()
        for number in range(4):
            cache.save(cache.keys(number))
        listener.listen()
        cache.stack.shared.events._max = 1
        cache.manager.remove([*cache.keys(0), *cache.keys(1)])
        cache.save(cache.keys(9))
        said = [listener.announcer.take() for _ in range(5)]
        assert not listener.announcer.pending
        (stored,), (removed,) = (part for part in said if part)
        assert stored == Stored("host", tuple(cache.keys(9)))
        assert isinstance(removed, Removed)
        assert set(removed.keys) == {*cache.keys(0), *cache.keys(1)}


async def test_other_names_are_announced_by_removals_under_the_old_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that come and go meanwhile are announced by their names at that time."""
    monkeypatch.setattr(module, "COMPARE_MAX", 2)
    async with cache_of(slots=8) as cache:
        listener = Listener(cache)
        keys = cache.keys(*range(6))
        cache.save(keys)
        listener.listen()
        assert listener.heard == {"host": dict.fromkeys(keys, 0)}
        listener.rename()
        said = listener.announcer.take()
        assert [(type(one), len(one.keys)) for one in said] == [(Removed, 2), (Stored, 2)]
        assert said[0].keys == said[1].keys
        listener.heard["host"].update(dict.fromkeys(said[0].keys, 1))
        gone = [key for key in keys if key not in said[0].keys][:2]
        cache.manager.remove(gone)
        cache.save(gone[:1])
        cache.save(cache.keys(9))
        listener.listen_to_all()
        left = [key for key in keys if key != gone[1]] + cache.keys(9)
        assert listener.heard == {"host": dict.fromkeys(left, 1)}


async def test_names_changed_before_any_block_is_announced_cause_no_removal() -> None:
    async with cache_of(slots=8) as cache:
        listener = Listener(cache)
        listener.rename()
        assert not listener.announcer.pending
        cache.save(cache.keys(1))
        listener.listen()
        listener.announcer.repeat()
        assert listener.announcer.take() == [Stored("host", tuple(cache.keys(1)))]
