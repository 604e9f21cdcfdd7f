"""Replays count what a simple model counts, and no policy does better than the optimum."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.config import registry
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.replay.bounds import belady, lru_hits
from kvladder.replay.engine import ReplayResult, ReplaySettings, replay
from kvladder.replay.loop import VirtualLoop
from kvladder.replay.medium import Speeds
from kvladder.replay.virtual import VirtualArena
from kvladder.traces.reader import Trace, TraceRequest

BLOCK = 4096
TOKENS = 512


def trace_of(prompts: Sequence[Sequence[int]], *, every_s: float = 1.0) -> Trace:
    requests = [
        TraceRequest(n * every_s, len(blocks) * TOKENS, 10, blocks)
        for n, blocks in enumerate(prompts)
    ]
    unique = 1 + max((block for blocks in prompts for block in blocks), default=-1)
    return Trace("made", requests, unique, TOKENS)


def chats(seed: int, requests: int = 300, *, longest: int = 12) -> Trace:
    """Conversations that grow, with a common beginning, and once in a while a fork."""
    random = Random(seed)
    count = 3
    talks: list[list[int]] = []
    prompts: list[list[int]] = []
    for _ in range(requests):
        if talks and random.random() < 0.7:
            talk = random.choice(talks[-20:])
            talk = talk[: random.randint(1, len(talk))] if random.random() < 0.1 else talk
        else:
            talk = [0, 1, 2][: random.randint(0, 3)]
        more = random.randint(1, 3)
        talk = ([*talk, *range(count, count + more)])[:longest]
        count += more
        talks.append(talk)
        prompts.append(talk)
    numbers: dict[int, int] = {}
    return trace_of([[numbers.setdefault(b, len(numbers)) for b in blocks] for blocks in prompts])


def lru_model(trace: Trace, room: int) -> int:
    """Hits of an LRU cache, a request's tail used first, that pins what it reads."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        for block in request.blocks:
            if block not in kept:
                break
            hits += 1
        for block in reversed(request.blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > room:
            kept.popitem(last=False)
    return hits


def stack(memory: int, disk: int = 0, **options: Any) -> Any:
    tiers: list[dict[str, Any]] = [{"type": "host"}]
    if disk:
        tiers.append({"type": "memory", "capacity": disk * BLOCK, "when": "commit", **options})
    return load_config({"arena": {"size": memory * BLOCK}, "tiers": tiers}, env={})


def run(trace: Trace, config: Any, **settings: Any) -> ReplayResult:
    return replay(trace, config, ReplaySettings(BLOCK, **settings))


def test_a_prompt_is_found_once_its_save_is_before_its_arrival_in_the_order() -> None:
    orders = [(1, 3, 4), (2, 5, 6), (7, 8, 9)]  # the first two overlap
    trace = trace_of([[0, 1], [0, 1], [0, 1]])
    whole = [one._replace(order=at) for one, at in zip(trace.requests, orders, strict=True)]
    in_order = run(dataclasses.replace(trace, requests=whole), stack(100), token_s=0.01)
    one_by_one = run(trace, stack(100), token_s=0.01)
    in_part = [*whole[:2], trace.requests[2]]
    partly = run(dataclasses.replace(trace, requests=in_part), stack(100), token_s=0.01)
    assert in_order.hits == {"host": 2}
    assert one_by_one.hits == partly.hits == {"host": 4}
    assert in_order.virtual_s < 2.1, "computing took time beside that of the run"
    assert one_by_one.virtual_s == partly.virtual_s > 10


@pytest.mark.parametrize("room", [30, 60, 120, 240, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_of_memory_alone_is_lru(seed: int, room: int) -> None:
    trace = chats(seed)
    result = run(trace, stack(room))
    assert sum(result.hits.values()) == lru_model(trace, room) == lru_hits(trace).hits(room)
    assert (result.requests, result.asked) == (len(trace.requests), trace.blocks)
    assert result.written["host"] >= trace.unique


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_with_all_that_is_written_serves_as_much_as_the_larger_of_the_two(seed: int) -> None:
    trace = chats(seed, 600)
    result = run(trace, stack(64, 256))
    wanted = lru_hits(trace).ratio(256)
    assert result.ratio == pytest.approx(wanted, abs=0.01)
    assert result.hits["host"] == pytest.approx(lru_model(trace, 64), rel=0.02)
    assert result.hits["memory"] > 0
    assert result.written_bytes["memory"] == result.written["memory"] * BLOCK


def test_equal_replays_are_equal() -> None:
    trace = chats(1)
    speeds = {"memory": Speeds(1e6, 1e5, 0.001)}
    first, second = (run(trace, stack(40, 200), speeds=speeds, token_s=1e-4) for _ in range(2))
    assert first.as_dict() == second.as_dict()


def test_seconds_saved_are_those_of_the_tokens() -> None:
    trace = chats(2)
    result = run(trace, stack(64, 256), token_s=0.001)
    assert result.saved_s == {
        name: pytest.approx(hits * TOKENS * 0.001) for name, hits in result.hits.items()
    }
    assert run(trace, stack(64)).saved_s is None


def test_a_medium_slower_than_computing_is_not_read() -> None:
    """The choice between fetching and computing is the real one."""
    trace = chats(3)
    fast = run(trace, stack(30, 256), token_s=0.001)
    slow = {"memory": Speeds(read=BLOCK / 100, write=1e9)}
    late = run(trace, stack(30, 256), token_s=0.001, speeds=slow)
    assert late.hits["memory"] < 0.1 * fast.hits["memory"]
    assert late.wait_s < 0.2 * trace.seconds


def test_ratios_count_in_bytes_and_time() -> None:
    trace = chats(4)
    plain, half = (run(trace, stack(30, 256), ratios={"memory": ratio}) for ratio in (1.0, 0.5))
    assert half.written == plain.written
    assert half.written_bytes["memory"] * 2 == plain.written_bytes["memory"]


def test_rules_of_levels_are_those_of_the_configuration() -> None:
    trace = chats(5)
    every = run(trace, stack(30, 256)).written["memory"]
    again = run(trace, stack(30, 256, min_hits=1)).written["memory"]
    assert 0 < again < every / 2


@pytest.mark.slow
def test_an_admission_saves_writes_of_blocks_that_do_not_come_again() -> None:
    """Tools come again now and then; the other prompts never do, and are most of the blocks."""
    random, fresh = Random(9), count(400)
    prompts: list[list[int]] = []
    for _ in range(700):
        tool = random.randrange(40)
        prompts.append([*range(10 * tool, 10 * tool + 10)])
        prompts.append([next(fresh) for _ in range(6)])
    trace = trace_of(prompts)
    every, ours = (
        run(trace, stack(64, 512, when="evict", admit=admit)) for admit in ("all", "adaptive")
    )
    assert ours.written["memory"] < 0.8 * every.written["memory"]
    assert ours.ratio >= 0.98 * every.ratio
    assert (every.refused["memory"], ours.refused["host"]) == (0, 0)
    assert ours.refused["memory"] > 0
    assert ours.as_dict()["refused"] == ours.refused


def test_time_to_live_is_in_the_time_of_the_trace() -> None:
    blocks = [[0, 1, 2]] * 10
    for every_s, hits in ((1.0, 27), (100.0, 0)):
        config = load_config(
            {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host", "ttl": "50 s"}]}, env={}
        )
        assert run(trace_of(blocks, every_s=every_s), config).hits == {"host": hits}


class NewestFirst(PrioritizedLRU):
    """Evicts what was used last."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()][::-1])


def test_any_registered_policy_can_be_replayed() -> None:
    registry.register("policies", "newest-first", NewestFirst)
    try:
        trace = chats(6)
        result = run(trace, stack(40, 100), policy="newest-first")
        assert result.policy == "newest-first"
        assert result.ratio < run(trace, stack(40, 100)).ratio
    finally:
        del registry._registered["policies", "newest-first"]


@pytest.mark.parametrize("room", [10, 40, 100])
def test_no_policy_beats_belady(room: int) -> None:
    trace = chats(7)
    best = belady([one.blocks for one in trace.requests], trace.unique, room)
    assert lru_model(trace, room) <= best <= lru_model(trace, 10**9)
    assert belady([one.blocks for one in trace.requests], trace.unique, 10**9) == lru_model(
        trace, 10**9
    )


prompts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=40)


@given(told=prompts, room=st.integers(6, 40))
def test_stack_distances_are_lru_at_every_size(told: list[tuple[int, int]], room: int) -> None:
    trace = trace_of([[talk * 10 + n for n in range(length)] for talk, length in told])
    assert lru_hits(trace).hits(room) == lru_model(trace, room)


def test_sampled_distances_are_near() -> None:
    trace = chats(8, 4000)
    exact, sampled = lru_hits(trace), lru_hits(trace, exact_max=trace.blocks // 4)
    assert sampled.rate == pytest.approx(0.25, abs=0.05)
    for room in (300, 1000, 3000):
        assert sampled.ratio(room) == pytest.approx(exact.ratio(room), abs=0.05)


def test_a_level_below_one_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.capacity: 12 KiB holds 3 blocks, less"):
        run(chats(0), stack(64, 3))
    with pytest.raises(ConfigError, match=r"arena\.size: 4 KiB .*at least one block"):
        replay(chats(0), stack(1), ReplaySettings(8192))


def test_a_prompt_longer_than_the_memory_is_served_in_part() -> None:
    trace = trace_of([[*range(50)]] * 4)
    result = run(trace, stack(20, 100))
    assert result.asked == 200
    assert 0 < sum(result.hits.values()) < 150


def test_requests_without_blocks_are_counted() -> None:
    result = run(trace_of([[], [0], []]), stack(10))
    assert (result.requests, result.asked) == (3, 1)


def recorded(seed: int) -> Trace:
    """Chats whose engine had the first blocks of some prompts itself, and saved answers."""
    random, plain = Random(seed), chats(seed)
    answers = count(plain.unique)
    requests = [
        one._replace(
            asked=(random.randint(0, 2), max(2, len(one.blocks) - 1)),
            answer=[next(answers) for _ in range(random.randint(0, 2))],
        )
        for one in plain.requests
        if len(one.blocks) > 1
    ]
    return Trace("recorded", requests, next(answers), TOKENS)


@pytest.mark.parametrize("room", [80, 200])
def test_hits_are_of_what_the_engine_asked_for(room: int) -> None:
    trace = recorded(10)
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        hits += len([*takewhile(kept.__contains__, request.wanted)])
        for block in reversed(request.used):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > room:
            kept.popitem(last=False)
    result = run(trace, stack(room))
    assert sum(result.hits.values()) == lru_hits(trace).hits(room) == hits
    assert result.asked == trace.blocks < sum(len(one.blocks) for one in trace.requests)
    assert sum(sum(one.values()) for one in result.missed.values()) == result.asked - hits
    assert result.written["host"] >= len({n for one in trace.requests for n in one.used})
    wanted, used = [one.wanted for one in trace.requests], [one.used for one in trace.requests]
    assert hits <= belady(wanted, trace.unique, room, used=used)
    whole = belady(wanted, trace.unique, trace.unique, used=used)
    assert whole == lru_hits(trace).hits(trace.unique)


def test_what_the_engine_had_itself_is_not_computed() -> None:
    trace = trace_of([[*range(10)], [*range(10, 20)]])
    own = trace.requests[1]._replace(asked=(8, 9))
    long, short = (
        run(dataclasses.replace(trace, requests=[trace.requests[0], one]), stack(64), token_s=0.01)
        for one in (trace.requests[1], own)
    )
    assert long.virtual_s - short.virtual_s == pytest.approx(8 * TOKENS * 0.01)


def test_what_is_on_its_way_at_the_end_is_counted() -> None:
    trace = chats(4, 30)
    slow = {"memory": Speeds(latency_s=0.9)}
    result = run(trace, stack(200, 1000), token_s=1e-6, speeds=slow)
    assert result.written["memory"] == trace.unique


def test_virtual_time_jumps() -> None:
    async def sleep() -> float:
        await asyncio.gather(*(asyncio.sleep(1e7 + n) for n in range(3)))
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(sleep()) == pytest.approx(1e7 + 2)


def test_virtual_slots_are_counted_as_others() -> None:
    arena = VirtualArena(10, 1 << 40)
    slots = arena.lease(4) or []
    arena.share(slots[:1])
    arena.check()
    arena.release(slots)
    assert (arena.free, arena.claims(slots[0])) == (9, 1)
    arena.release(slots[:1])
    assert arena.lease(11) is None
    assert arena.close()
