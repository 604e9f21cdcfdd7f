"""How much is done at most while the lock is held: no more with many blocks than with some.

Work is counted in lines of Python that are executed under the lock, whoever holds it, so that the
result does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from kvladder.announcer import Announcer
from kvladder.keys import BlockKey, salt_digest
from kvladder.lock import STEP, StackLock
from kvladder.policy.offload import OffloadRule
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.base import Item, Tier, TierContext
from kvladder.tiers.level import LevelSettings

BLOCKS = 32 * STEP
LINES_A_BLOCK = 250
"""More than anything does for one block; all the blocks in one hold would be many more."""
LINES_MAX = STEP * LINES_A_BLOCK


class Meter(StackLock):
    """Counts what is executed under it."""

    __slots__ = ("_depth", "_lines", "most", "where")

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._lines = 0
        self.most = 0
        self.where = ""

    def __enter__(self) -> None:
        super().__enter__()
        self._depth += 1
        if self._depth == 1:
            self._lines = 0
            frame = sys._getframe(1)
            frame.f_trace = self._trace
            sys.settrace(self._trace)

    def __exit__(
        self,
        _type: object,
        _error: object,
        _traceback: object,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            sys.settrace(None)
            frame = sys._getframe(1)
            frame.f_trace = None
            if self._lines > self.most:
                self.most = self._lines
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        super().__exit__(None, None, None)

    def _trace(self, _frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        self._lines += event in {"line", "call"}
        return self._trace

    def check(self, what: str) -> None:
        """Assert that no hold since the last check was long."""
        assert self.most <= LINES_MAX, f"{what}: {self.most} lines executed up to {self.where}"
        self.most = 0


def keys_of(name: str, count: int = BLOCKS) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{name} {n}".encode()).digest()) for n in range(count)]


class Instant(Tier):
    """Has whatever it is asked for, and at its start what it was made with."""

    durable = True

    def __init__(self, *held: Sequence[BlockKey], salt: str = "") -> None:
        self.held = [key for keys in held for key in keys]
        self.salt = salt_digest(LAYOUT.namespace(), salt) if salt else b""
        self.broken = False

    async def open(self, context: TierContext) -> None:
        self.batch_max = context.capacity_blocks

    async def get(self, items: Sequence[Item]) -> Sequence[bool]:
        return self._answer(items)

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        return self._answer(items)

    def _answer(self, items: Sequence[Item]) -> Sequence[bool]:
        if self.broken:
            raise OSError("broken")
        return [True] * len(items)

    async def remove(self, items: Sequence[Item]) -> None:
        del items

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def recover(self) -> AsyncIterator[Sequence[Item]]:
        yield [Item(key, place, salt=self.salt) for place, key in enumerate(self.held)]

    async def aclose(self) -> None:
        pass


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    lock = Meter()
    monkeypatch.setattr("kvladder.testing.stacks.StackLock", lambda: lock)
    return lock


async def opened(tier: Tier, rule: OffloadRule | None = None, **options: Any) -> SimCache:
    settings = LevelSettings(queue_blocks=BLOCKS)
    spec = LevelSpec(tier, rule or OffloadRule(), 8 * BLOCKS, settings)
    return await SimCache.open(spec, **{"slots": BLOCKS, **options})


def saved(cache: SimCache, keys: Sequence[BlockKey], **options: Any) -> int:
    save = cache.manager.save(keys, **options)
    save.commit()
    return len(save.slots)


@pytest.mark.slow
async def test_loading_and_looking_up(meter: Meter) -> None:
    first, second = keys_of("first"), keys_of("second")
    cache = await opened(Instant(first, second))
    meter.check("recovering")
    for keys in (first, second):  # into a host that is free, and one that is full
        assert cache.manager.lookup(keys) == (0, BLOCKS)
        assert cache.manager.reach(keys) == BLOCKS
        meter.check("looking up")
        fetch = cache.manager.fetch(keys, deadline_s=60)
        meter.check("fetching")
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(0.01)
        assert fetch.blocks == BLOCKS
        fetch.release()
        meter.check("loading")
        hits = cache.manager.fetch(keys)
        assert hits.done
        hits.release()
        meter.check("hitting")
        cache.manager.touch(keys)
        await asyncio.sleep(0.1)
        meter.check("touching")
    fetch = cache.manager.fetch(first, deadline_s=1)
    await asyncio.sleep(0)
    fetch.release()
    await cache.settle()
    meter.check("letting go")
    await cache.aclose()
    meter.check("closing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [OffloadRule(), OffloadRule(when="commit")], ids=["evict", "commit"]
)
async def test_saving(meter: Meter, rule: OffloadRule) -> None:
    cache = await opened(Instant(), rule, reserve_blocks=BLOCKS // 2)
    announcer = Announcer(cache.stack)
    alike, each = keys_of("alike"), keys_of("each")
    assert saved(cache, alike) == BLOCKS
    meter.check("saving")
    await cache.settle()
    meter.check("writing")
    priorities = [40 + n % 2 for n in range(BLOCKS)]
    assert saved(cache, each, priorities=priorities, durations_s=[1.0] * BLOCKS)
    meter.check("saving over others")
    await asyncio.sleep(2)
    cache.manager.save(keys_of("none")).abort()
    meter.check("giving up, and ending retention")
    cache.manager.stats()
    announcer.take()
    meter.check("telling")
    await cache.stack.flush()
    meter.check("flushing")
    await cache.aclose()
    meter.check("closing")


@pytest.mark.slow
async def test_forgetting(meter: Meter) -> None:
    lost, kept = keys_of("lost"), keys_of("kept")
    cache = await opened(Instant(lost, kept, salt="tenant"))
    cache.manager.remove(lost)
    meter.check("removing")
    saved(cache, keys_of("short"), ttl_s=1.0)
    await asyncio.sleep(2)
    assert cache.manager.lookup(keys_of("short")) == (0, 0)
    meter.check("expiring")
    saved(cache, keys_of("salted"), salt="tenant")
    fetch = cache.manager.fetch(kept)
    for _ in cache.manager.purge("tenant"):
        pass
    fetch.release()
    meter.check("purging")
    saved(cache, keys_of("all"))
    cache.manager.clear()
    meter.check("clearing")
    await cache.settle()
    assert cache.manager.lookup(kept) == (0, 0)
    await cache.aclose()


@pytest.mark.slow
async def test_failing(meter: Meter) -> None:
    tier = Instant(keys_of("held"))
    cache = await opened(tier, OffloadRule(when="commit"))
    tier.broken = True
    saved(cache, keys_of("more"))
    await asyncio.sleep(1)
    meter.check("giving up what waits")
    fetch = cache.manager.fetch(keys_of("held"))
    await asyncio.sleep(1)
    fetch.release()
    meter.check("missing")
    tier.broken = False
    await asyncio.sleep(100)
    meter.check("going on")
    await cache.aclose()
