"""The most work done while the lock is held: no more with many blocks than with some.

Work is counted in lines of Python executed under the lock, and in blocks of its records that
built-in functions iterate over there, so that the result does not depend on the machine. Only the
stack's own code runs under the lock.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from types import FrameType
from typing import Any

import pytest

from benchmarks.instant import InstantTier, keys_of
from kvladder.device.cache import DeviceCache
from kvladder.device.opening import make_pools
from kvladder.device.port import TierPort
from kvladder.gpu.copy.copier import Copier, CopyJob, Finished, JobId
from kvladder.gpu.pool.below import Taken, Victim
from kvladder.gpu.pool.events import PoolEvents
from kvladder.gpu.sizing.divide import Division, PoolShare
from kvladder.gpu.sizing.groups import Group
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.keys import BlockKey, salt_digest
from kvladder.lock import BATCH, BULK_STEP, StackLock, holding
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.fetch_cost import AvoidedCompute
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares
from kvladder.publishing.announcer import Announcer
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Read, Ref, Write
from kvladder.tiers.ladder.changing.attaching import LevelAttacher
from kvladder.tiers.ladder.changing.tuning import LevelTuner, LevelTuning
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.saving import Saving
from kvladder.tiers.ladder.writing.queue import WriteQueue

BLOCKS = 32 * BATCH
LINES_A_BLOCK = 250
"""More than anything does for one block; all the blocks in one hold would be many more."""
LINES_MAX = BATCH * LINES_A_BLOCK


class Meter(StackLock):
    """Counts the lines executed under the lock."""

    __slots__ = ("_depth", "_lines", "blocks", "blocks_most", "most", "where")

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._lines = 0
        self.blocks = 0
        """The blocks visited in the current hold."""
        self.blocks_most = 0
        self.most = 0
        self.where = ""

    def __enter__(self) -> None:
        super().__enter__()
        self._depth += 1
        if self._depth == 1:
            self._lines = self.blocks = 0
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
            if self._lines > self.most or self.blocks > self.blocks_most:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.most = max(self.most, self._lines)
            self.blocks_most = max(self.blocks_most, self.blocks)
        super().__exit__(None, None, None)

    def _trace(self, _frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        self._lines += event in {"line", "call"}
        return self._trace

    def check(self, what: str) -> None:
        """Assert that no hold since the last check was long."""
        assert self.most <= LINES_MAX, f"{what}: {self.most} lines executed up to {self.where}"
        assert self.blocks_most <= BULK_STEP, f"{what}: {self.blocks_most} up to {self.where}"
        self.most = self.blocks_most = 0


class Strict(InstantTier):
    """No code of it runs under the lock of a cache."""

    def __init__(self, *held: Sequence[BlockKey], salt: str = "") -> None:
        digest = salt_digest(LAYOUT.namespace(), salt) if salt else b""
        super().__init__([key for keys in held for key in keys], salt=digest)
        self.broken = False

    async def open(self, context: TierContext) -> None:
        self.batch_max = context.capacity_blocks

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        await super().get(reads)
        return self._answer(reads)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        return self._answer(writes)

    def _answer(self, blocks: Sequence[Read | Write]) -> Sequence[bool]:
        assert not holding()
        if self.broken:
            raise OSError("broken")
        return [True] * len(blocks)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        assert not holding()

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        assert not holding()
        return [True] * len(blocks)

    def spare(self, salt: bytes) -> float:
        assert not holding()
        return super().spare(salt)

    def gauges(self) -> Mapping[str, int]:
        assert not holding()
        return {"asked": 1}


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    lock = Meter()
    monkeypatch.setattr("kvladder.testing.stacks.StackLock", lambda: lock)
    for books in (LevelIndex, Saving, WriteQueue):

        def iterate(self: Any, whole: Callable[..., Iterator[BlockKey]] = books.__iter__) -> Any:
            for key in whole(self):
                lock.blocks += 1
                yield key

        monkeypatch.setattr(books, "__iter__", iterate)
    return lock


async def opened(*tiers: Tier, rule: OffloadRule | None = None, **options: Any) -> SimCache:
    settings = LevelSettings(queue_blocks=BLOCKS)
    specs = [LevelSpec(tier, rule or OffloadRule(), 8 * BLOCKS, settings) for tier in tiers]
    cache = await SimCache.open(*specs, **{"slots": BLOCKS, **options})
    events = cache.stack.shared.events

    def listener() -> None:
        assert not holding()

    events.listen(listener)
    return cache


def saved(cache: SimCache, keys: Sequence[BlockKey], **options: Any) -> int:
    save = cache.manager.save(keys, **options)
    save.commit()
    return len(save.slots)


@pytest.mark.slow
async def test_loads_and_lookups_hold_the_lock_briefly(meter: Meter) -> None:
    first, second = keys_of("first", BLOCKS), keys_of("second", BLOCKS)
    cache = await opened(Strict(first, second))
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
async def test_saves_hold_the_lock_briefly(meter: Meter, rule: OffloadRule) -> None:
    cache = await opened(Strict(), rule=rule, reserve_blocks=BLOCKS // 2)
    announcer = Announcer(cache.stack)
    alike, each = keys_of("alike", BLOCKS), keys_of("each", BLOCKS)
    assert saved(cache, alike) == BLOCKS
    meter.check("saving")
    await cache.settle()
    meter.check("writing")
    priorities = [40 + n % 2 for n in range(BLOCKS)]
    assert saved(cache, each, priorities=priorities, durations_s=[1.0] * BLOCKS)
    meter.check("saving over others")
    await asyncio.sleep(2)
    cache.manager.save(keys_of("none", BLOCKS)).abort()
    meter.check("giving up, and ending retention")
    cache.manager.stats()
    announcer.take()
    meter.check("telling")
    await cache.stack.flush()
    meter.check("flushing")
    await cache.aclose()
    meter.check("closing")


@pytest.mark.slow
async def test_removals_hold_the_lock_briefly(meter: Meter) -> None:
    lost, kept = keys_of("lost", BLOCKS), keys_of("kept", BLOCKS)
    cache = await opened(Strict(lost, kept, salt="tenant"))
    cache.manager.remove(lost)
    meter.check("removing")
    saved(cache, keys_of("short", BLOCKS), ttl_s=1.0)
    await asyncio.sleep(2)
    assert cache.manager.lookup(keys_of("short", BLOCKS)) == (0, 0)
    meter.check("expiring")
    saved(cache, keys_of("salted", BLOCKS), salt="tenant")
    fetch = cache.manager.fetch(kept)
    for _ in cache.manager.purge("tenant"):
        pass
    fetch.release()
    meter.check("purging")
    coming = keys_of("under way", BLOCKS)
    for forget in (cache.manager.clear, cache.manager.reset):
        saved(cache, keys_of("all", BLOCKS))
        await asyncio.sleep(0)  # so that some of them are being written below
        under_way = cache.manager.save(coming)
        meter.check("saving again")
        forget()
        if forget == cache.manager.reset:
            assert cache.manager.resetting, "the call itself goes through some of them at most"
        while cache.manager.resetting:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(0)
        under_way.commit()
        meter.check("clearing")
        await cache.settle()
        assert cache.manager.lookup(kept) == cache.manager.lookup(coming) == (0, 0)
    await cache.aclose()


@pytest.mark.slow
async def test_removals_during_a_load_hold_the_lock_briefly(meter: Meter) -> None:
    held = keys_of("held", BLOCKS)
    cache = await opened(Strict(held))
    fetch = cache.manager.fetch(held)
    cache.manager.reset()
    while cache.manager.resetting:  # noqa: ASYNC110 - an engine asks at every step
        await asyncio.sleep(0)
    await asyncio.sleep(1)
    fetch.release()
    meter.check("resetting")
    assert cache.manager.lookup(held) == (0, 0)
    await cache.aclose()


@pytest.mark.slow
async def test_changes_of_a_level_hold_the_lock_briefly(meter: Meter) -> None:
    held = keys_of("held", BLOCKS)
    cache = await opened(Strict(held, salt="tenant"))
    (level,), (lifecycle,) = cache.levels, cache.stack.lifecycles
    tuner = LevelTuner(cache.stack)
    calls = level.client.settings

    async def tune(what: str, **more: Any) -> None:
        blocks = more.pop("blocks", level.capacity_blocks)
        rule, shares = more.pop("rule", OffloadRule()), more.pop("shares", NO_SHARES)
        tuning = LevelTuning(
            rule=rule, shares=shares, capacity_blocks=blocks, queue_blocks=BLOCKS, calls=calls,
            endurance_bytes=None, **more,
        )  # fmt: skip
        with cache.stack.lock:
            tuner.set(level, tuning)
            cache.stack.rejoin([lifecycle])
        await tuner.follow(lifecycle, tuning)
        meter.check(what)

    await tune("another policy", policy=Adaptive())
    await tune("and back", policy=PrioritizedLRU())
    await tune("a quota", shares=Shares(tenant=BLOCKS // 2))
    assert len(level.index) == BLOCKS // 2
    await tune("a smaller capacity", blocks=BLOCKS // 4)
    assert len(level.index) == BLOCKS // 4
    await tune("a threshold", rule=OffloadRule(min_priority=50))
    assert not len(level.index)
    await LevelAttacher(cache.stack, LAYOUT, LAYOUT.namespace(), lambda _: inline_blocking).detach(
        lifecycle, "x", flush_s=1.0
    )
    meter.check("detaching")
    await cache.aclose()


@pytest.mark.slow
async def test_comparing_several_levels_holds_the_lock_briefly(meter: Meter) -> None:
    """The levels alternate, so that missing blocks cannot be derived from their number."""
    held = keys_of("held", BLOCKS)
    cache = await opened(Strict(held[::2]), Strict(held[1::2]))
    for block_s in (1.0, 1e-9):  # all of it is worth to be fetched, and nothing
        cache.manager.prefilled(64 * 1000, 64 * 1000 * block_s)
        fetch = cache.manager.fetch(held, deadline_s=60, saves=AvoidedCompute(BLOCKS))
        meter.check("judging")
        await asyncio.sleep(1)
        fetch.release()
        cache.manager.remove(held)
        await cache.settle()
        meter.check("loading")
    await cache.aclose()


class InstantCopier(Copier):
    """Copies nothing, at once."""

    def __init__(self) -> None:
        self._jobs: list[CopyJob] = []

    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        del by_layer, urgent
        self._jobs.append(job)

    def poll(self) -> list[Finished]:
        jobs, self._jobs = self._jobs, []
        return [Finished(job.id, True, 0, 0.0, "") for job in jobs]

    def wait(self, ids: Sequence[JobId]) -> None:
        raise NotImplementedError

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        raise NotImplementedError

    def rest(self, timeout_s: float) -> None:
        pass

    def drain(self) -> None:
        pass

    close = drain


def device_over(cache: SimCache) -> DeviceCache:
    """Return a device cache with one pool full of cached blocks, none of them held."""
    port = TierPort(cache.manager, InstantCopier())
    share = PoolShare(Group("all", 2), LAYOUT.block_bytes, BLOCKS, BLOCKS)
    division = Division(0, 2 * BLOCKS, 2 * BLOCKS, (share,), explicit=True)
    events = PoolEvents(10)
    requests = make_pools(cache.manager, port, division, events, partial="off")
    request = requests.begin(range(2 * BLOCKS), salt="tenant")
    requests.commit(request, 2 * BLOCKS)
    requests.release(request)
    return DeviceCache(cache.manager, port, requests, [], events, division)


@pytest.mark.slow
async def test_a_pool_on_the_device_holds_the_lock_briefly(meter: Meter) -> None:
    cache = await opened(Strict(), reserve_blocks=BLOCKS // 2)
    device = device_over(cache)
    port, pool = device.port, device.pools[0]
    assert pool.evict(BLOCKS) == BLOCKS
    meter.check("offloading")
    device.poll()
    assert not port.busy
    meter.check("telling where they are")
    await cache.settle()
    meter.check("writing")
    keys = list(cache.stack.host.index)
    assert port.holds(keys) == [True] * BLOCKS
    assert len(port.known(keys)) == BLOCKS
    meter.check("asking")
    held = [Victim(key, DeviceSlot(0), 1, 35, 35, 0, inf, "tenant") for key in keys]
    assert port.offload(0, held) == [Taken()] * BLOCKS
    meter.check("offloading what is there")
    await cache.stack.flush()
    leased = port.lease(BLOCKS)
    assert leased is not None
    port.unlease(leased)
    meter.check("leasing")
    await cache.settle()
    device.poll()
    assert port.holds(keys) == [True] * BLOCKS
    meter.check("telling where they went")
    port.close()
    await cache.aclose()


@pytest.mark.slow
async def test_handing_a_device_down_holds_the_lock_briefly(
    meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = await opened(Strict(), slots=2 * BLOCKS)
    monkeypatch.setattr(cache.manager, "flush", lambda timeout_s: True)  # it waits for the loop
    device = device_over(cache)
    assert device.hand_down(timeout_s=60)
    meter.check("handing down")
    assert device.pools[0].cached == 0
    device.purge("tenant")
    meter.check("purging")
    device.port.close()
    await cache.aclose()
