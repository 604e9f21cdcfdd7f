"""Pools of several groups over faulty tiers in simulated time: bytes, invariants, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import shake_128
from random import Random

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvladder.device.cache import DeviceCache
from kvladder.device.opening import make_pools
from kvladder.device.port import TierPort
from kvladder.device.preempt import How, Suspended
from kvladder.errors import OutOfBlocks, PoolError
from kvladder.gpu.copy.copier import Copier, CopyJob, Finished, JobId
from kvladder.gpu.pool.events import PoolEvents
from kvladder.gpu.pool.pool import Partial
from kvladder.gpu.requests.requests import Request
from kvladder.gpu.requests.sequence import Extra
from kvladder.gpu.sizing.divide import Division, PoolShare
from kvladder.gpu.sizing.groups import Group
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention, RetentionRange
from kvladder.publishing.device import OnDevice
from kvladder.testing.fakes import Delay, Fail, FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import SimLoop
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from tests.gpu.engine import Indexed, replay
from tests.stack.caches import cache_of

SIZE = LAYOUT.block_tokens
FULL, NEAR = Group("all", SIZE), Group("near", SIZE, "window", 6)
FAR, BROAD = Group("far", SIZE, "window", 11), Group("broad", 2 * SIZE)
STATE, WIDE = Group("state", SIZE, "state"), Group("wide", 2 * SIZE, "state")
MODELS: list[tuple[tuple[Group, ...], Partial]] = [
    ((FULL,), "take"),
    ((FULL,), "copy"),
    ((FULL,), "off"),
    ((NEAR,), "off"),
    ((NEAR,), "take"),
    ((NEAR,), "copy"),
    ((FULL, NEAR), "off"),
    ((FULL, NEAR), "take"),
    ((NEAR, FULL), "copy"),
    ((NEAR, FAR), "take"),
    ((NEAR, BROAD, FAR), "take"),
    ((BROAD, NEAR, FAR), "copy"),
    ((BROAD, NEAR, STATE), "take"),
    ((BROAD, NEAR, STATE), "copy"),
    ((FULL, NEAR, STATE), "off"),
    ((FULL, WIDE), "off"),
]
TOKENS = st.sampled_from([13, 9, 5, 18, 8, 3]).map(lambda count: [0] * count) | st.lists(
    st.integers(0, 1), min_size=1, max_size=18
)


class LateCopier(Copier):
    """Copies a job when the test asks for it, whatever happened to its slots."""

    def __init__(self, cache: SimCache, device: Sequence[list[bytearray]]) -> None:
        self._arena = cache.arena
        self._device = device
        self.jobs: list[CopyJob] = []
        self.finished: list[Finished] = []

    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        del by_layer, urgent
        self.jobs.append(job)
        for block in job.blocks if job.direction == "onboard" else ():
            here = self._device[job.group][block]
            here[:] = b"?" * len(here)

    def end(self, job: CopyJob, *, ok: bool = True) -> None:
        self.jobs.remove(job)
        for block, slot in zip(job.blocks, job.slots, strict=True):
            here, there = self._device[job.group][block], self._arena.view(slot)
            if job.direction == "offload":
                there[: len(here)] = here if ok else b"!" * len(here)
            else:
                here[:] = there[: len(here)] if ok else b"!" * len(here)
        size = len(job.blocks) * LAYOUT.block_bytes if ok else 0
        self.finished.append(Finished(job.id, ok, size, 0.5, "" if ok else "scripted"))

    def poll(self) -> list[Finished]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, ids: Sequence[JobId]) -> None:
        raise NotImplementedError

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        raise NotImplementedError

    def rest(self, timeout_s: float) -> None:
        del timeout_s

    def drain(self) -> None:
        while self.jobs:
            self.end(self.jobs[0])

    close = drain


class DeviceMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from(MODELS),
        blocks=st.integers(6, 10),
        slots=st.integers(6, 14),
        thresholds=st.tuples(st.sampled_from([0, 40]), st.sampled_from([0, 35])),
        below=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        model: tuple[tuple[Group, ...], Partial],
        blocks: int,
        slots: int,
        thresholds: tuple[int, int],
        below: bool,
        seed: int,
    ) -> None:
        self.groups, partial = model
        self.loop = SimLoop(seed)
        self.tier = FakeTier(store=FakeStore(), random=Random(seed), mean_s=0.05)
        rule = OffloadRule(min_priority=thresholds[1])
        levels = [LevelSpec(self.tier, rule, 12)] if below else []
        opening = SimCache.open(*levels, slots=slots, host=OffloadRule(min_priority=thresholds[0]))
        self.sim = self.loop.run_until_complete(opening)
        self.device = [[bytearray(LAYOUT.block_bytes) for _ in range(blocks)] for _ in self.groups]
        self.copier = LateCopier(self.sim, self.device)
        port = TierPort(self.sim.manager, self.copier)
        shares = tuple(PoolShare(group, LAYOUT.block_bytes, 1, blocks) for group in self.groups)
        division = Division(1, 1, 1, shares, explicit=False)
        events = PoolEvents(100_000)
        told = self.follow(events)
        requests = make_pools(self.sim.manager, port, division, events, partial=partial)
        self.cache = DeviceCache(self.sim.manager, port, requests, (), events, division, told=told)
        self.requests = requests
        self.live: list[Request] = []
        self.suspended: list[Suspended] = []
        self.index: Indexed = {}
        self.asked: dict[tuple[tuple[int, ...], str, Extra], None] = {}

    def follow(self, events: PoolEvents) -> OnDevice | None:
        """Return the listener of a pool for its followers; here there are none."""
        del events
        return None

    # ---- the model that runs

    def kv(self, request: Request, group: int, position: int) -> bytes:
        part = request.parts[group]
        words = part.tokens[: position + 1].tobytes()
        images = b"".join(content for offset, content in part.extra if offset <= position)
        return shake_128(part.root.key + words + images).digest(self.width(group))

    def width(self, group: int) -> int:
        """Return the bytes of a token, or of a state, that fill the memory of a block."""
        kind = self.groups[group]
        return LAYOUT.block_bytes // (1 if kind.kind == "state" else kind.block_tokens)

    def place(self, request: Request, group: int, position: int) -> memoryview:
        kind, width = self.groups[group], self.width(group)
        slot = request.tables[group][position // kind.block_tokens]
        assert slot >= 0
        at = 0 if kind.kind == "state" else position % kind.block_tokens * width
        return memoryview(self.device[group][slot])[at : at + width]

    def verify(self, request: Request) -> None:
        """Every byte that the next token reads is right."""
        end = request.computed
        for group, kind in enumerate(self.groups):
            first = kind.first(end) * kind.block_tokens
            first = max(0, end - 1) if kind.kind == "state" else first
            for position in range(first, end):
                held = self.place(request, group, position)
                assert held == self.kv(request, group, position), (kind.name, position)

    # ---- rules

    @rule(
        tokens=TOKENS,
        priority=st.none() | st.sampled_from([10, 60]),
        salt=st.sampled_from("aab"),
        most=st.sampled_from([None, None, 0, 8]),
        image=st.sampled_from([None, None, None, 0, 2, 5]),
    )
    def begin(
        self,
        tokens: list[int],
        priority: int | None,
        salt: str,
        most: int | None,
        image: int | None = None,
    ) -> None:
        retention = None
        if priority is not None:
            retention = Retention((RetentionRange(0, None, priority, 1.0),))
        before = [pool.used for pool in self.cache.pools]
        extra = ((image, b"image"),) if image is not None and image < len(tokens) else ()
        self.asked[tuple(tokens), salt, extra] = None
        try:
            request = self.requests.begin(
                tokens, retention=retention, salt=salt, extra=extra, cached_max=most
            )
        except OutOfBlocks as error:
            assert all(p.used >= b for p, b in zip(self.cache.pools, before, strict=True))
            self.may_refuse(error, len(tokens), [])
        else:
            self.live.append(request)

    def may_refuse(self, error: OutOfBlocks, tokens: int, running: list[Request]) -> None:
        """A prompt that fits pools in which only ``running`` is active must be admitted."""
        fits = all(
            -(-tokens // group.block_tokens) <= pool.blocks
            for group, pool in zip(self.groups, self.cache.pools, strict=True)
        )
        copying = self.cache.port.busy or any(one.copies_left for one in self.suspended)
        assert not fits or copying or self.live != running, f"refused by idle pools: {error}"

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.live))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.run(request)

    def run(self, request: Request) -> None:
        """Compute the missing tokens of a request if its blocks have arrived."""
        if request.arriving or request.lost:
            return
        for group, copy in request.copies:
            state = self.groups[group].kind == "state"
            size = (1 if state else copy.tokens) * self.width(group)
            self.device[group][copy.target][:size] = self.device[group][copy.source][:size]
        self.requests.copied(request)
        if not request.ready:
            return
        self.verify(request)
        for group in range(len(self.groups)):
            for position in range(request.computed, len(request.tokens)):
                self.place(request, group, position)[:] = self.kv(request, group, position)
        self.requests.commit(request, len(request.tokens))
        self.verify(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        request = self.pick(data)
        if request.ready:
            length = len(request.tokens)
            try:
                self.requests.append(request, tokens)
            except OutOfBlocks as error:
                assert {len(part.tokens) for part in request.parts} == {length}
                self.may_refuse(error, length + len(tokens), [request])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 5))
    def rewind(self, data: st.DataObject, count: int) -> None:
        request = self.pick(data)
        if request.ready and count < len(request.tokens):
            try:
                self.requests.rewind(request, count)
            except PoolError:
                if self.groups == (FULL,):
                    raise

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = self.pick(data)
        if request.ready:
            try:
                self.live += self.requests.fork(request, 1)
            except PoolError:
                assert request.computed < len(request.tokens)
                assert any(group.kind == "state" for group in self.groups)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), store=st.booleans())
    def release(self, data: st.DataObject, store: bool) -> None:
        request = self.pick(data)
        self.live.remove(request)
        self.requests.release(request, store=store)
        self.requests.copied(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["tiers", "recompute", None]))
    def suspend(self, data: st.DataObject, how: How | None) -> None:
        request = self.pick(data)
        if request.ready:
            self.live.remove(request)
            self.suspended.append(self.cache.preemption.suspend(request, how))

    @precondition(lambda self: self.suspended)
    @rule(data=st.data(), discard=st.booleans())
    def resume(self, data: st.DataObject, discard: bool) -> None:
        suspended = data.draw(st.sampled_from(self.suspended))
        if suspended.copies_left:
            return
        if discard:
            self.cache.preemption.discard(suspended)
        else:
            try:
                self.live.append(self.cache.resume(suspended))
            except OutOfBlocks as error:
                self.may_refuse(error, len(suspended.parts[0].tokens), [])
                return
        self.suspended.remove(suspended)

    @precondition(lambda self: self.copier.jobs)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def copy(self, data: st.DataObject, ok: bool) -> None:
        self.copier.end(data.draw(st.sampled_from(self.copier.jobs)), ok=ok)

    @rule()
    def poll(self) -> None:
        self.cache.poll()

    @rule(by=st.sampled_from([0.01, 0.2, 3.0]))
    def wait(self, by: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(by))

    @rule(count=st.integers(1, 6), group=st.integers(0, 2))
    def evict(self, count: int, group: int) -> None:
        self.cache.pools[group % len(self.groups)].evict(count)

    @rule(data=st.data(), step=st.sampled_from(["fail", "slow", "forget", "corrupt"]))
    def trouble(self, data: st.DataObject, step: str) -> None:
        if step == "fail":
            self.tier.script.append(Fail())
        elif step == "slow":
            self.tier.script.append(Delay(4.0))
        elif self.sim.levels:
            keys = sorted(record.key for record in self.tier.records.values())
            if keys:
                key = data.draw(st.sampled_from(keys))
                (self.tier.forget if step == "forget" else self.tier.corrupt)(key)

    @rule(tokens=TOKENS, group=st.integers(0, 2))
    def remove(self, tokens: list[int], group: int) -> None:
        one = self.requests.sequences[group % len(self.groups)]
        keys = one.scheme.chain(tokens, parent=one.scheme.root(salt="a"))
        one.pool.remove(keys[-1:])

    @rule(salt=st.sampled_from("ab"))
    def purge(self, salt: str) -> None:
        self.cache.purge(salt)

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @rule(mark=st.sampled_from(["", "a", "b"]))
    def rename(self, mark: str) -> None:
        self.cache.rename(mark)
        assert all(one.lost and not one.ready for one in self.live)
        assert not any(pool.cached for pool in self.cache.pools)

    # ---- invariants

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for pool, memory in zip(self.cache.pools, self.device, strict=True):
            for slot in pool._ledger.free:
                memory[slot][:] = b"-" * len(memory[slot])
        replay(self.cache.take_events(), self.index)
        now: Indexed = {}
        replay(list(self.cache.snapshot()), now)
        assert now == self.index
        for request in self.live:
            if request.ready:
                self.verify(request)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for _ in range(100):
            while self.copier.jobs:
                self.copier.end(self.copier.jobs[0])
            self.cache.poll()
            if not self.cache.port.busy:
                break
            self.wait(0.1)
        assert not self.cache.port.busy
        for request in self.live:
            self.requests.release(request)
            self.requests.copied(request)
        for suspended in self.suspended:
            self.cache.preemption.discard(suspended)
        self.sound()
        assert all(pool.free == pool.blocks for pool in self.cache.pools)
        self.cache.port.close()
        self.tier.heal()
        self.loop.run_until_complete(self.sim.aclose())
        assert self.tier.violations == []
        self.loop.close()


class PartialGroups(DeviceMachine):
    """Several groups, or one with a window, with partial matches and little room.

    It omits troubles and rare steps, so that requests share more blocks.
    """

    trouble = remove = purge = reset = rename = None  # type: ignore[assignment]
    fork = rewind = append = None  # type: ignore[assignment]
    suspend = resume = None  # type: ignore[assignment]

    @initialize(
        model=st.sampled_from([one for one in MODELS if one[1] != "off" and one[0] != (FULL,)]),
        blocks=st.integers(3, 6),
    )
    def start(self, model: tuple[tuple[Group, ...], Partial], blocks: int) -> None:
        super().start(model, blocks, slots=6, thresholds=(0, 0), below=False, seed=0)

    @rule(
        same=st.sampled_from([6, 9, 11, 7, 14, 13, 5, 3]),
        others=st.sampled_from([1, 1, 4, 8]),
        which=st.integers(0, 1),
    )
    def begin(self, same: int, others: int, which: int) -> None:
        super().begin([0] * same + [which] * others, None, "a", None)


TestDeviceMachine = pytest.mark.slow(DeviceMachine.TestCase)
TestDeviceMachine.settings = profile(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_pool_learns_of_abandoned_writes() -> None:
    machine = DeviceMachine()
    machine.start(MODELS[0], blocks=6, slots=6, thresholds=(40, 0), below=True, seed=0)
    request = machine.requests.begin([0] * 12)
    machine.requests.commit(request, 12)
    machine.requests.release(request)
    [pool] = machine.cache.pools
    assert pool.evict(3) == 3
    machine.copier.end(machine.copier.jobs[0])
    machine.poll()
    assert len(pool.in_tiers()) == 3  # host does not take them, and the level below is about to
    machine.tier.script.append(Fail())
    machine.wait(3.0)
    machine.sound()
    machine.poll()
    assert pool.in_tiers() == []
    machine.teardown()


async def test_blocks_of_others_in_a_shared_tier_are_found_by_the_next_claim() -> None:
    tier = SharedFakeTier()
    keys = SimCache.keys(1, 2, 3)
    async with cache_of(LevelSpec(tier)) as cache:
        tier.others_put({key: SimCache.payload(key) for key in keys})
        port = TierPort(cache.manager, LateCopier(cache, []))
        below = port
        assert below.claim(keys) == 0
        await asyncio.sleep(1.0)
        port.poll()
        assert below.holds(keys) == [True] * 3
        assert below.claim(keys) == 3
        below.disclaim(keys)
        assert below.claim(SimCache.keys(7, 8)) == 0
        port.close()
