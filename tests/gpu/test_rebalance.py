"""Memory that moves between pools while requests run: never a wrong byte, none lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.bench_rebalance import CHANGING, SHARED, serve
from benchmarks.bench_rebalance import opened as load
from kvladder.config.stack import load_config
from kvladder.device.cache import DeviceCache
from kvladder.device.opening import open_device, open_pools
from kvladder.device.rebalance import PATIENCE, REST, Rebalance
from kvladder.device.room import Room
from kvladder.errors import BlocksBusy, ConfigError, LayoutError, OutOfBlocks, PlanError
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.requests.requests import Request
from kvladder.gpu.sizing.divide import divide, in_regions
from kvladder.gpu.sizing.groups import Group, Layer
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.units import Size
from tests.gpu.device import FULL, WIDTH, Model
from tests.gpu.test_pool_groups import NEAR

FAR = Group("far", 8, "window", 20)
HOST = {"arena": {"size": 64 * 4096, "reserve": 0}, "tiers": [{"type": "host"}]}


class Shared(Model):
    """An engine with groups that share one memory, in regions of 8 tokens."""

    def __init__(self, source: Any, *groups: Group, regions: int = 24, context: int = 16) -> None:
        self.groups, self.device = groups, "cpu"
        pairs = [(group, group.block_tokens * WIDTH) for group in groups]
        memory = regions * 8 * WIDTH
        config = load_config(source, overrides={"gpu": {"memory": Size(memory)}})
        division = in_regions(divide(pairs, memory, context=context, step=8))
        whole = torch.full((division.regions, division.region_bytes), 0xAA, dtype=torch.uint8)
        tensors = [{"kv": whole.view(-1, group.block_tokens, WIDTH)} for group in groups]
        self.cache = open_pools(config, division, tensors, fields={"model": "tiny"})
        self.requests = self.cache.requests

    @property
    def rebalance(self) -> Rebalance:
        found = self.cache.rebalance
        assert found is not None
        return found

    def send(self, donor: int, receiver: int) -> None:
        """Begin to move a region, if the donor can do without."""
        one = self.rebalance
        if one._move is None and one._spares(donor):
            one._send(donor, receiver)


def slots(pools: Sequence[BlockPool]) -> list[int]:
    return [pool.blocks for pool in pools]


# ---- how memory is divided


@pytest.mark.parametrize("blocks", [(10, 10), (512, 2560), (96, 160), (3, 7)])
@pytest.mark.parametrize("memory", [100_000, 99_999, 1_234_567])
def test_regions_hold_whole_blocks_of_every_pool(blocks: tuple[int, int], memory: int) -> None:
    groups = [Group("all", 16), Group("near", 16, "window", 40)]
    before = divide(list(zip(groups, blocks, strict=True)), memory, context=256, step=16)
    made = in_regions(before)
    assert made.regions * made.region_bytes <= memory < (made.regions + 1) * made.region_bytes
    assert all(made.region_bytes % size == 0 for size in blocks)
    held = [share.blocks * share.block_bytes for share in made.shares]
    assert sum(held) == made.regions * made.region_bytes
    assert made.sequences >= 1
    for share, old in zip(made.shares, before.shares, strict=True):
        moved = abs(share.blocks - old.blocks) * share.block_bytes
        assert moved <= 2 * made.region_bytes or share.blocks - share.needed < old.needed
    assert "rebalanced by use" in str(made)


def test_blocks_of_sizes_that_have_too_little_in_common_are_refused() -> None:
    groups = [(Group("all", 16), 1009), (Group("near", 16, "window", 40), 1013)]
    division = divide(groups, 300_000, context=64, step=16)
    with pytest.raises(PlanError, match="0 regions of 1022117 bytes") as got:
        in_regions(division)
    assert got.value.path == "gpu.rebalance"


def layers(*windows: int | None, dtypes: str = "float32") -> list[Layer]:
    return [Layer(f"{at}.kv", 2, 8, dtypes, window=window) for at, window in enumerate(windows)]


def opened(*windows: int | None, memory: str = "256 KiB", **gpu: Any) -> DeviceCache:
    plan = CachePlan(layers(*windows), block_tokens=4, max_tokens=256, step=32)
    source = {"gpu": {"memory": memory, "rebalance": True, **gpu}}
    return open_device(source, plan, fields={"model": "tiny"})


def test_the_setting_has_pools_share_one_memory() -> None:
    with opened(None, 32, 32) as cache:
        full, near = (cache.memory.buffers(f"{at}.kv") for at in (0, 1))
        storage = full.untyped_storage()
        assert storage.data_ptr() == near.untyped_storage().data_ptr()
        assert cache.rebalance is not None
        assert "gpu.rebalance" in cache.describe()
        assert "rebalanced by use" in cache.describe()
        assert cache.stats()["rebalance"] == {"moved": 0, "stayed": 0}
        with pytest.raises(LayoutError, match="cannot be given back"):
            cache.shrink(timeout_s=0.0)


def test_one_pool_alone_shares_no_memory() -> None:
    with opened(None, None) as cache:
        assert cache.rebalance is None


def test_pools_of_several_types_do_not_share() -> None:
    two = [*layers(None), Layer("half.kv", 2, 8, "float16", window=32)]
    plan = CachePlan(two, block_tokens=4, max_tokens=256)
    source = {"gpu": {"memory": "256 KiB", "rebalance": True}}
    with pytest.raises(ConfigError, match="pools hold data of types float16, float32") as got:
        open_device(source, plan, fields={"model": "tiny"})
    assert got.value.path == "gpu.rebalance"


# ---- a region being moved


def test_cached_blocks_of_a_region_move_and_held_ones_stay() -> None:
    engine = Shared({"gpu": {}}, FULL, FAR)
    assert engine.run(range(12)) == 0
    request = engine.begin(range(50, 62))
    engine.compute(request)
    held = [list(table) for table in request.tables]
    before = slots(engine.cache.pools)
    for donor in (0, 1, 0, 0, 1):
        engine.send(donor, 1 - donor)
        for _ in range(PATIENCE + 1):
            engine.cache.poll()
            engine.cache.check()
    assert request.tables == held
    assert engine.rebalance.counts()["moved"] == 5
    assert slots(engine.cache.pools) == [before[0] - 2, before[1] + 1]
    assert engine.run([*range(12), 99]) == 12, "it is where it can be found"
    engine.requests.append(request, [7])
    engine.compute(request)
    engine.requests.release(request)
    engine.close()


def test_a_region_that_is_held_for_long_stays() -> None:
    engine = Shared({"gpu": {}}, FULL, FAR)
    pool = engine.cache.pools[0]
    held = pool.allocate(pool.blocks)
    pool.release(held[1::2])  # half of every region is free
    before = slots(engine.cache.pools)
    engine.rebalance._send(0, 1)
    assert pool.blocks == before[0] - 1
    for _ in range(PATIENCE):
        engine.cache.poll()
    assert engine.rebalance.counts() == {"moved": 0, "stayed": 1}
    assert slots(engine.cache.pools) == before
    engine.rebalance._send(0, 1)
    pool.release(held[::2])
    engine.cache.poll()
    assert engine.rebalance.counts() == {"moved": 1, "stayed": 1}
    engine.cache.check()
    engine.close()


# ---- by use


@pytest.mark.slow
def test_pools_follow_a_changing_mix_of_load() -> None:
    first, second = [mix._replace(requests=mix.requests // 2) for mix in CHANGING[:2]]
    with load(rebalance=False) as cache:
        fixed = serve(cache, [first]).preempted
    with load(rebalance=True) as cache:
        before = slots(cache.pools)
        assert 2 * serve(cache, [first]).preempted < fixed
        short = slots(cache.pools)
        assert short[0] < before[0]
        assert short[1] > before[1]
        serve(cache, [second])
        assert slots(cache.pools)[0] > short[0], "and back"
        cache.check()


@pytest.mark.slow
def test_rebalancing_keeps_blocks_that_a_window_would_evict() -> None:
    found: list[int] = []
    for rebalance in (False, True):
        with load(rebalance=rebalance) as cache:
            found.append(serve(cache, [SHARED[0]._replace(requests=150)]).cached)
    assert found[1] > 1.1 * found[0]


@pytest.mark.slow
def test_an_even_load_moves_little() -> None:
    with load(rebalance=True) as cache:
        mix = CHANGING[1]._replace(requests=60)
        serve(cache, [mix])
        rebalance = cache.rebalance
        assert rebalance is not None
        before = rebalance.counts()["moved"]
        serve(cache, [mix])
        assert rebalance.counts()["moved"] - before <= 4


def test_a_moved_region_does_not_move_back_at_once() -> None:
    engine = Shared({"gpu": {}}, FULL, FAR)
    one = engine.rebalance
    for way in ((0, 1), (1, 0), (0, 1)):
        one._send(*way)
        assert one._move is None
    assert one._rests[1, 0] - one._period == 4 * REST
    one._period += 4 * REST - 1
    one._pools[0]._ledger.short += 100
    one._decide()
    assert one._move is None
    assert one.counts()["moved"] == 3
    one._period += 1
    one._decide()
    assert one.counts()["moved"] == 4
    engine.close()


# ---- whatever happens


class RebalanceMachine(RuleBasedStateMachine):
    """Requests of two groups that share memory; regions move between their pools at any time."""

    def open(self, tiers: bool, regions: int, wide: bool) -> None:
        groups = (FULL, FAR) if wide else (NEAR, FULL)
        self.engine = Shared(HOST if tiers else {"gpu": {}}, *groups, regions=regions)
        self.live: list[Request] = []
        self.all = sum(self.bytes())

    def bytes(self) -> list[int]:
        pools = zip(self.engine.cache.pools, self.engine.groups, strict=True)
        return [pool.blocks * group.block_tokens for pool, group in pools]

    @rule(same=st.sampled_from([5, 9, 12, 15]), other=st.integers(0, 3))
    def begin(self, same: int, other: int) -> None:
        try:
            request = self.engine.begin([*[0] * same, other])
        except BlocksBusy:
            self.engine.settle()
        except OutOfBlocks:
            assert self.live, "one sequence has room, whatever went where"
        else:
            self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 9), more=st.booleans())
    def compute(self, at: int, more: bool) -> None:
        request = self.live[at % len(self.live)]
        self.engine.compute(request)
        if more and len(request.tokens) < 16:
            try:
                self.engine.requests.append(request, [at])
                self.engine.compute(request)
            except OutOfBlocks:
                assert len(self.live) > 1 or self.engine.cache.port.busy

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 9))
    def release(self, at: int) -> None:
        request = self.live.pop(at % len(self.live))
        self.engine.compute(request)
        self.engine.requests.release(request)

    @rule(donor=st.integers(0, 1))
    def send(self, donor: int) -> None:
        self.engine.send(donor, 1 - donor)

    @rule(polls=st.sampled_from([1, 3, PATIENCE]))
    def poll(self, polls: int) -> None:
        for _ in range(polls):
            self.engine.cache.poll()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.cache.check()
            if self.engine.rebalance._move is None:
                assert sum(self.bytes()) == self.all

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                while self.live:
                    self.release(0)
                self.engine.settle()
            finally:
                self.engine.close()


class AnyStack(RebalanceMachine):
    """Has tiers in one of three runs."""

    @initialize(
        tiers=st.sampled_from([False, False, True]), regions=st.integers(9, 20), wide=st.booleans()
    )
    def start(self, tiers: bool, regions: int, wide: bool) -> None:
        self.open(tiers, regions, wide)


class WithoutTiers(RebalanceMachine):
    """Copies nothing in threads, so that a run which is repeated does the same."""

    @initialize(regions=st.integers(9, 20), wide=st.booleans())
    def start(self, regions: int, wide: bool) -> None:
        self.open(False, regions, wide)


TestRebalanceMachine = pytest.mark.slow(AnyStack.TestCase)
TestRebalanceMachine.settings = profile(max_examples=30, stateful_step_count=40, deadline=None)


def find(fault: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*fault)
    settings = profile(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(WithoutTiers, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        (Rebalance, "_spares", lambda self, donor: self._owner.count(donor) > 1),
        (Rebalance, "_slots", lambda self, group, region: [*range(region, region + 2)]),
        (Room, "move", lambda self, group, moves: None),
    ],
    ids=[
        "a pool is left with too little",
        "another region is taken",
        "what is cached is not copied",
    ],
)
def test_a_fault_is_found(fault: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    find(fault, monkeypatch)
