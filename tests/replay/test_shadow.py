"""The live shadow shows at each size what a full simulation of that size counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from benchmarks.policies.traces import GENERATORS, renumbered
from kvladder.config import registry
from kvladder.config.stack import StackConfig, load_config
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.policy.belady import belady
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.prices import MONTH_S, Prices
from kvladder.replay.bounds import lru_hits
from kvladder.replay.engine import ReplaySettings, replay
from kvladder.shadow import level as level_module
from kvladder.shadow.caches import LruCache, PolicyCache
from kvladder.shadow.level import FACTORS, ShadowSpec
from kvladder.shadow.live import (
    CHECK_S,
    CPU_SHARE,
    STEP_BLOCKS,
    WAITING_MAX,
    LiveShadow,
    ShadowClocks,
)
from kvladder.shadow.start import shadow_specs
from kvladder.shadow.worth import WorthSource
from kvladder.traces.reader import Trace
from tests.replay.test_replay import chats, trace_of

BLOCK = 4096
PLENTY = 1 << 40
"""Memory that leaves the size of the sample to its own limits."""


def key_of(number: int) -> BlockKey:
    """Return a key with the bits of a digest."""
    return BlockKey(Random(number).randbytes(32))


def generated(name: str, requests: int | None = None) -> Trace:
    """Return one of the benchmark's traces; its seed is fixed."""
    number = [*GENERATORS].index(name) + 101
    return trace_of(renumbered(GENERATORS[name](Random(number))[:requests]))


def config_of(sizes: Sequence[int], when: str = "commit", **options: Any) -> StackConfig:
    tiers: list[dict[str, Any]] = [{"type": "host", **options}]
    for number, size in enumerate(sizes[1:], 1):
        one = {"type": "memory", "name": f"m{number}", "capacity": size * BLOCK, "when": when}
        tiers.append({**one, **options})
    return load_config({"arena": {"size": sizes[0] * BLOCK}, "tiers": tiers}, env={})


def shadow_of(specs: Sequence[ShadowSpec], **told: Any) -> LiveShadow:
    clocks = told.pop("clocks", ShadowClocks(lambda: 0.0, lambda: 0.0))
    told = {"arena_bytes": PLENTY, "prices": Prices(), "post": lambda work: work(), **told}
    return LiveShadow(specs, clocks=clocks, **told)


def host_of(blocks: int, make: Any = PrioritizedLRU) -> ShadowSpec:
    return ShadowSpec("host", blocks, make, is_written_through=True)


def fed(shadow: LiveShadow, trace: Trace) -> list[float]:
    """Tell a shadow of a trace, and return its hits at each size."""
    keys = [key_of(number) for number in range(trace.unique)]
    for request in trace.requests:
        prompt = [keys[block] for block in request.blocks]
        shadow.asked(prompt, 0)
        shadow.stored(prompt)
    shadow.settle()
    return shadow.levels[0].ratios()


def within(found: float, wanted: float) -> bool:
    """Return whether a ratio is within 5 % of another, or half a hundredth of all blocks."""
    return abs(found - wanted) <= max(0.05 * wanted, 0.005)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["commit", "evict"])
@pytest.mark.parametrize(("name", "requests"), [("chats", 1500), ("scans", 800)])
def test_each_level_is_within_a_twentieth_of_a_replay_at_each_size(
    name: str, requests: int, when: str
) -> None:
    """The levels are the real ones; the shadow hears what they hear, at one size only."""
    trace = generated(name, requests)
    sizes = [trace.unique // 16, trace.unique // 5]
    config = config_of(sizes, when)
    shadow = shadow_of(shadow_specs(config, Layout(512, BLOCK)))
    own = replay(trace, config, ReplaySettings(BLOCK), listener=shadow)
    shadow.settle()
    for at, level in enumerate(shadow.levels):
        for factor, found in zip(FACTORS, level.ratios(), strict=True):
            scaled = [int(size * factor) if n == at else size for n, size in enumerate(sizes)]
            other = config_of(scaled, when)
            full = own if scaled == sizes else replay(trace, other, ReplaySettings(BLOCK))
            wanted = full.hits[level.name] / full.asked
            assert within(found, wanted), (level.name, factor, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 25])
@pytest.mark.parametrize("name", ["chats", "documents", "loops", "scans", "shifts"])
def test_a_sample_is_within_a_twentieth_of_the_whole(name: str, percent: int) -> None:
    trace = generated(name)
    size = trace.unique * percent // 100
    shadow = shadow_of([host_of(size)])
    curve = lru_hits(trace)
    for factor, found in zip(FACTORS, fed(shadow, trace), strict=True):
        wanted = curve.ratio(int(size * factor))
        assert within(found, wanted), (factor, found, wanted)
    assert shadow.levels[0].shift > 0 or size < 2 * level_module.SAMPLE


@pytest.mark.parametrize("seed", range(3))
def test_small_levels_are_followed_whole_and_exactly(seed: int) -> None:
    trace = chats(seed)
    shadow = shadow_of([host_of(120)])
    found = fed(shadow, trace)
    assert found == pytest.approx([lru_hits(trace).ratio(120 * factor) for factor in FACTORS])


def test_blocks_that_no_request_asked_for_count_as_they_are_saved() -> None:
    """vLLM asks only for blocks that it knows to be there."""
    trace = chats(5)
    keys = [key_of(number) for number in range(trace.unique)]
    shadow, held = shadow_of([host_of(60)]), LruCache(60)
    for request in trace.requests:
        prompt = [keys[block] for block in request.blocks]
        known = sum(key in held.held for key in prompt)
        shadow.asked(prompt[:known], known)
        shadow.stored(prompt[known:])
        held.use(prompt)
    shadow.settle()
    level = shadow.levels[0]
    assert level.counts().asked == trace.blocks
    for factor, found in zip(FACTORS, level.ratios(), strict=True):
        assert found == pytest.approx(lru_hits(trace).ratio(60 * factor), abs=0.03)


class NewestFirst(PrioritizedLRU):
    """Evicts what was used last."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()][::-1])


def test_a_level_with_another_policy_has_that_policy_in_its_shadow() -> None:
    registry.register("policies", "newest-first", NewestFirst)
    try:
        trace, config = chats(6), config_of([80], policy="newest-first")
        shadow = shadow_of(shadow_specs(config, Layout(512, BLOCK)))
        result = replay(trace, config, ReplaySettings(BLOCK), listener=shadow)
        shadow.settle()
        assert result.ratio < 0.9 * lru_hits(trace).ratio(80)
        assert shadow.levels[0].ratios()[1] == pytest.approx(result.ratio, rel=0.05)
    finally:
        del registry._registered["policies", "newest-first"]


class Failing(PrioritizedLRU):
    """Raises an error when it has to choose."""

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no order")


def test_a_policy_that_fails_in_the_shadow_is_left_there_and_said_once() -> None:
    said: list[str] = []
    cache = PolicyCache(Failing, 4, said.append)
    for number in range(12):
        cache.use([key_of(number)])
    assert len(cache) == 4
    assert len(said) == 1
    assert "RuntimeError" in said[0]


def test_both_kinds_of_small_caches_are_the_same_for_lru() -> None:
    random, cache, other = Random(3), PolicyCache(PrioritizedLRU, 6, print), LruCache(6)
    keys = [key_of(number) for number in range(20)]
    for _ in range(300):
        some = random.sample(keys, random.randint(1, 5))
        verb = random.choice(["use", "use", "offer"])
        assert {*getattr(cache, verb)(some)} == {*getattr(other, verb)(some)}
        assert len(cache) == len(other) <= 6
        assert all((key in cache.held) == (key in other.held) for key in keys)
    for one in (cache, other):
        one.thin(lambda key: key in keys[:10], 3)
        assert len(one) <= 3
        assert not any(key in one.held for key in keys[10:])


def test_belady_is_that_of_the_last_accesses() -> None:
    trace = chats(7, 1000)
    shadow = shadow_of([host_of(40)])
    fed(shadow, trace)
    shadow.settle()
    figures = shadow.stats()
    reached, best = figures["reached_ratio"]["host"], figures["optimum_ratio"]["host"]
    assert 0 < reached < best < 1
    whole = belady([one.blocks for one in trace.requests], trace.unique, 40) / trace.blocks
    assert best == pytest.approx(whole, abs=0.05)


def test_money_is_that_of_plan() -> None:
    now = [0.0]
    prices = Prices(memory=3.0, disk=0.5, gpu=36.0)
    clocks = ShadowClocks(lambda: now[0], lambda: 0.0)
    shadow = shadow_of([host_of(1 << 10)], prices=prices, clocks=clocks)
    shadow.value(lambda: 0.512, {"host": WorthSource(1 << 20, "memory", lambda: 0.112)})
    keys = [key_of(number) for number in range(64)]
    for _ in range(2):
        shadow.asked(keys, 0)
        shadow.stored(keys)
    now[0] = 100.0
    shadow.settle()
    figures = shadow.stats()
    assert figures["hit_ratio"]["host"] == dict.fromkeys(("0.5", "1", "2", "4"), 0.5)
    assert figures["saved_s_an_hour"]["host"]["1"] == pytest.approx(64 * 0.4 * 36)
    assert figures["cost_a_month"]["host"] == {"0.5": 1.5, "1": 3.0, "2": 6.0, "4": 12.0}
    value = 64 * 0.4 / 100 / 3600 * 36.0 * MONTH_S
    assert figures["value_a_month"]["host"]["2"] == pytest.approx(value)
    assert figures["net_a_month"]["host"]["2"] == pytest.approx(value - 6.0)


def test_without_speed_and_prices_there_are_hits_alone() -> None:
    shadow = shadow_of([host_of(10)])
    shadow.value(lambda: None, {"host": WorthSource(1, "memory", lambda: 0.0)})
    shadow.asked([key_of(1)], 0)
    shadow.settle()
    figures = shadow.stats()
    assert {*figures} >= {"hit_ratio", "optimum_ratio", "sampled_ratio", "cpu_s"}
    assert not {*figures} & {"saved_s_an_hour", "cost_a_month", "value_a_month", "net_a_month"}


def test_the_optimum_is_computed_once_a_minute() -> None:
    now, posted = [0.0], list[Any]()
    clocks = ShadowClocks(lambda: now[0], lambda: 0.0)
    shadow = shadow_of([host_of(10)], clocks=clocks, post=posted.append)
    level = shadow.levels[0]
    for now[0], wanted in ((0.0, 0.0), (50.0, 0.0), (70.0, 1.0), (100.0, 1.0)):
        shadow.asked([key_of(1)], 0)
        shadow.drain()
        figures = level.optimum(10, now[0], anew=False)
        assert figures is not None
        assert figures.optimum == wanted


def test_figures_that_are_asked_for_often_take_no_step_each_time() -> None:
    now = [0.0]
    shadow = shadow_of([host_of(10)], clocks=ShadowClocks(lambda: now[0], lambda: 0.0), post=repr)
    asked: list[int] = []
    for now[0] in (0.0, 0.1, 0.2, 1.5):
        shadow.asked([key_of(1)], 0)
        shadow.stats()
        asked.append(shadow.levels[0].counts().asked)
    assert asked == [1, 1, 1, 4]


def test_windows_forget() -> None:
    now = [0.0]
    shadow = shadow_of([host_of(10)], clocks=ShadowClocks(lambda: now[0], lambda: 0.0))
    for _ in range(2):
        shadow.asked([key_of(1)], 0)
        shadow.settle()
    assert shadow.levels[0].ratios() == [0.5] * 4
    for now[0] in (1000.0, 2000.0, 3000.0):
        shadow.asked([key_of(1)], 1)
        shadow.settle()
    assert shadow.levels[0].ratios() == [1.0] * 4
    assert shadow.levels[0].counts().asked == 1


@pytest.mark.slow
def test_more_than_its_share_of_a_processor_thins_the_sample() -> None:
    trace, cpu, now, rises = generated("chats", 5000), [0.0], [0.0], False

    def busy() -> float:
        cpu[0] += rises
        return cpu[0]

    size = trace.unique // 4
    shadow = shadow_of(
        [host_of(size), ShadowSpec("disk", 2 * size, PrioritizedLRU, is_written_through=True)],
        clocks=ShadowClocks(lambda: now[0], busy),
    )
    keys = [key_of(number) for number in range(trace.unique)]
    before = [level.shift for level in shadow.levels]
    curve = lru_hits(trace)
    for number, request in enumerate(trace.requests):
        prompt = [keys[block] for block in request.blocks]
        shadow.asked(prompt, 0)
        if number == 2000:
            shadow.settle()
            now[0] += CHECK_S
            rises = True
            shadow.settle()
            rises = False
            assert shadow.levels[0].counts().began_s == now[0]  # counts and their time begin anew
        shadow.stored(prompt)
    assert shadow.cpu_s > CPU_SHARE * CHECK_S
    after = [level.shift for level in shadow.levels]
    assert after[0] == before[0] + 1
    assert after[1] >= after[0]
    shadow.settle()
    for factor, found in zip(FACTORS, shadow.levels[0].ratios(), strict=True):
        assert found == pytest.approx(curve.ratio(size * factor), abs=0.1)
    for cache, factor in zip(shadow.levels[0].caches, FACTORS, strict=True):
        assert len(cache) <= size * factor / 2 ** after[0]


def test_a_colder_level_follows_no_key_that_a_hotter_one_does_not() -> None:
    specs = [host_of(1 << 20), ShadowSpec("disk", 1000, PrioritizedLRU, is_written_through=True)]
    hot, cold = shadow_of(specs).levels
    assert cold.shift >= hot.shift > 0
    hot.thin(lambda _: 0, 0, 0.0)
    cold.thin(lambda _: 0, hot.shift, 0.0)
    assert cold.shift >= hot.shift


def test_little_memory_gives_a_small_sample() -> None:
    (small,) = shadow_of([host_of(1 << 20)], arena_bytes=1 << 30).levels
    (large,) = shadow_of([host_of(1 << 20)]).levels
    assert small.caches[1].size < large.caches[1].size
    assert small.caches[1].size >= level_module.SAMPLE_MIN


def test_what_is_not_taken_in_time_is_left_out_and_counted() -> None:
    posted: list[Any] = []
    shadow = shadow_of([host_of(100)], post=posted.append)
    prompt = [key_of(number) for number in range(1024)]
    for _ in range(WAITING_MAX // 1024 + 10):
        shadow.asked(prompt, 1024)
    assert len(posted) == 1
    assert shadow.dropped == 9
    shadow.settle()
    assert shadow.stats()["dropped"] == 9
    assert shadow.levels[0].counts().asked == 1024 * (WAITING_MAX // 1024 + 1)


def test_the_loop_thread_takes_one_step_at_a_time() -> None:
    posted: list[Any] = []
    shadow = shadow_of([host_of(100)], post=posted.append)
    prompt = [key_of(number) for number in range(STEP_BLOCKS)]
    for _ in range(4):
        assert not posted
        shadow.asked(prompt, 0)
    for steps in (1, 2, 3, 4):
        posted.pop()()
        assert shadow.levels[0].counts().asked == STEP_BLOCKS * steps
    assert not posted


def test_levels_whose_blocks_cannot_be_foreseen_are_left_out() -> None:
    tiers = [
        {"type": "host"},
        {"type": "memory", "name": "some", "capacity": "1 MiB", "min_hits": 1},
        {"type": "memory", "name": "raised", "capacity": "1 MiB", "min_priority": 70},
        {"type": "memory", "name": "all", "capacity": "1 MiB"},
    ]
    config = load_config({"arena": {"size": "1 MiB"}, "tiers": tiers}, env={})
    specs = shadow_specs(config, Layout(512, BLOCK))
    assert [(one.name, one.is_written_through) for one in specs] == [("host", True), ("all", False)]
