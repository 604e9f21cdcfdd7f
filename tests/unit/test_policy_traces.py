"""The benchmark of policies: its traces, its level, and the peers' policies in C++."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from benchmarks.policies.hints import ENDS, EVERY, RETAINED, Hinted, served_with_hints
from benchmarks.policies.level import Level, keys_of, served, unbounded
from benchmarks.policies.native import NativeLevel
from benchmarks.policies.peers import BELADY, peers
from benchmarks.policies.traces import (
    GENERATORS,
    Trace,
    agent_requests,
    read,
    renumbered,
    traces,
)
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import EvictionPolicy, PrioritizedLRU


def small(seed: int = 1) -> Trace:
    """Chats, of which some share a beginning."""
    random = Random(seed)
    chats = [[*range(100 * n, 100 * n + 3)] for n in range(30)]
    prompts: list[list[int]] = []
    for _ in range(600):
        chat = chats[int(random.paretovariate(0.8)) % len(chats)]
        if len(chat) < 60:
            chat.append(chat[-1] + 1)
        prompts.append([*chat])
    return Trace("small", renumbered(prompts), False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.slow
def test_the_level_serves_what_a_peers_lru_does() -> None:
    trace = small()
    keys, most = keys_of(trace), unbounded(trace)
    sizes = [2, 20, 100, trace.unique]
    found = peers(trace, sizes)
    for size in sizes:
        ours = served(PrioritizedLRU(), trace, size, keys, whole=False)
        assert ours.hits == found[size]["LRU"].hits
        assert ours.work == pytest.approx(found[size]["LRU"].work, abs=0.1)
        assert ours.cut == found[size]["LRU"].cut >= found[size][BELADY].cut
        bound = found[size].pop(BELADY).hits
        assert len(found[size]) == 14
        assert max(one.hits for one in found[size].values()) <= bound <= most.hits
    assert found[trace.unique]["LRU"].hits == most.hits


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 37, 400])
def test_the_level_in_c_serves_what_the_one_in_python_does(size: int) -> None:
    """With priorities that change, and the same request from named sessions and others."""
    trace, random = small(), Random(size)
    keys = keys_of(trace)
    ours, theirs = NativeLevel(size, keys), Level(Adaptive(), size, keys)
    for prompt in trace.prompts:
        named, priority = random.random() < 0.5, random.choice([20, 35, 35, 50])
        theirs.rank(prompt[:9], priority)
        ours.rank(prompt[:9], priority)
        known = theirs.request(prompt, whole=False, in_session=named, priority=priority)
        assert ours.request(prompt, in_session=named, priority=priority) == known
    assert isinstance(theirs.policy, Adaptive)
    assert ours.rule == theirs.policy.rule


@pytest.mark.slow
@pytest.mark.parametrize("make", [PrioritizedLRU, Adaptive])
@pytest.mark.parametrize("seed", [401, 402])
def test_sessions_hints_do_not_serve_less_than_none(make: type[EvictionPolicy], seed: int) -> None:
    """Also where more blocks are retained than the level has: a retention stays law there.

    Without the shadows' judgement, named sessions alone cost 13 % of the hits.
    """
    times_s, sessions, prompts = zip(*agent_requests(Random(seed), 0.3), strict=True)
    trace = Trace("agents", renumbered([*prompts]), True, times_s, sessions)
    keys, size = keys_of(trace), trace.unique // 20
    none = served(make(), trace, size, keys, whole=False)
    for told in ((ENDS,), EVERY):
        hinted = served_with_hints(Level(make(), size, keys), trace, told)
        assert hinted.hits > (1 if told == (ENDS,) else 0.98) * none.hits
        assert hinted.cut < none.cut


def test_a_retained_prompt_displaces_older_ones_not_itself() -> None:
    """The level is full of retained blocks, and a request that is retained, too, brings more."""
    trace = Trace(
        "two", [[0, 1, 2, 3], [4, 5, 6], [0, 1], [4, 5, 6]], True, (0, 1, 2, 3), (1, 2, 1, 2)
    )
    level = Level(PrioritizedLRU(), 4, keys_of(trace))
    hinted = Hinted(level, trace, EVERY)
    assert [hinted.request(number) for number in range(2)] == [0, 0]
    assert sorted(level.at) == [0, 4, 5, 6]
    assert {*level.priority.values()} == {RETAINED}


@pytest.mark.parametrize("whole", [False, True])
def test_the_adaptive_policy_serves_no_more_than_there_is(whole: bool) -> None:
    trace = small(2)
    keys, most = keys_of(trace), unbounded(trace)
    some = served(Adaptive(), trace, 60, keys, whole=whole)
    assert 0 < some.hits < most.hits
    assert served(Adaptive(), trace, trace.unique, keys, whole=whole) == most


def test_traces_are_those_of_a_folder_and_generated_ones(tmp_path: Path) -> None:
    (tmp_path / "agent_x.jsonl").write_text('{"hash_ids": [7, 9]}\n{"hash_ids": [7, 8]}\n')
    one = next(traces(tmp_path))
    assert one == Trace("agent_x", [[0, 1], [0, 2]], True, [])
    assert (one.blocks, one.unique) == (4, 3)
    assert len(GENERATORS) == 6
    first = GENERATORS["scans"](Random(3))
    assert first == GENERATORS["scans"](Random(3))
    assert first != GENERATORS["scans"](Random(4))


@pytest.mark.parametrize("line", ["", "[]", '{"hash_ids": 3}', '{"hash_ids": ["x"]}', "{"])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(f'{{"hash_ids": [1]}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2: no request"):
        read(path)
