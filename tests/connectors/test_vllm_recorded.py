"""A recording of vLLM's connector has one line a request, and a replay hits what the run did."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvladder.config.stack import load_config
from kvladder.replay.engine import ReplaySettings, replay
from kvladder.traces.reader import read_trace
from tests.connectors.scripted import TOKENS, Engine
from tests.patience import until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


def source(path: Path, slots: int) -> dict[str, Any]:
    """So many slots on the host; a slot takes a page of memory."""
    return {
        "arena": {"size": f"{4 * slots} KiB"},
        "fetch": {"when": "always"},
        "tiers": [{"type": "host"}],
        "record": str(path),
    }


def serve(engine: Engine, tokens: list[int], *, more: int = 1) -> list[int]:
    """Serve a prompt until nothing is on its way down; return it with its answer."""
    request = engine.add(tokens, length=len(tokens) + more)
    engine.run()
    until(engine.half.connector.manager.idle)
    return request.tokens


def talk(engine: Engine, seed: int) -> list[list[int]]:
    """Serve conversations that grow by answers and questions; return their prompts."""
    random = Random(seed)
    open_: list[list[int]] = []
    prompts: list[list[int]] = []
    for _ in range(60):
        begin = random.choice(open_[-6:]) if open_ and random.random() < 0.7 else []
        prompt = [*begin, *random.choices(range(1000), k=random.randint(1, 20))][: 24 * TOKENS]
        open_.append(serve(engine, prompt, more=random.randint(1, 12)))
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("save_decode", [False, True])
def test_a_replay_counts_what_the_run_counted(tmp_path: Path, save_decode: bool, seed: int) -> None:
    settings = source(tmp_path / "trace.jsonl", 100)
    engine = Engine(settings, blocks=80, save_decode=save_decode, seed=seed)
    prompts = talk(engine, seed)
    loaded, stats = engine.loaded, engine.half.stats()
    engine.close()
    trace = read_trace(tmp_path / "trace.jsonl", block_tokens=TOKENS)
    assert [one.input_tokens for one in trace.requests] == [len(tokens) for tokens in prompts]
    assert [len(one.blocks) for one in trace.requests] == [len(t) // TOKENS for t in prompts]
    assert [one.asked for one in trace.requests] == [(0, (len(t) - 1) // TOKENS) for t in prompts]
    assert any(one.answer for one in trace.requests) == save_decode
    result = replay(trace, load_config(settings, env={}), ReplaySettings(4096))
    missed = sum(sum(one.values()) for one in stats["misses"]["blocks"].values())
    assert result.asked == trace.blocks == loaded + missed
    assert result.hits["host"] == loaded == stats["host"]["hits"] > 0.2 * trace.blocks
    assert result.written["host"] == stats["host"]["stored"]
    assert result.missed == stats["misses"]["blocks"]
    assert result.evicted["host"] == stats["host"]["evicted"] > 0


def together(engine: Engine, seed: int) -> None:
    """Serve conversations, four requests at a time."""
    random, talks = Random(seed), list[list[int]]()
    for _ in range(20):
        prompts = [
            [*random.choice(talks or [[]]), *random.choices(range(99), k=12)] for _ in range(4)
        ]
        begun = [engine.add(tokens, length=len(tokens) + 9) for tokens in prompts]
        engine.run()
        until(engine.half.connector.manager.idle)
        talks = [one for one in [*talks, *(each.tokens for each in begun)] if len(one) < 48][-12:]


def test_a_replay_has_the_levels_of_requests_that_overlapped(tmp_path: Path) -> None:
    wrong = wrong_one_by_one = 0
    for seed in range(3):
        settings = source(tmp_path / f"trace-{seed}.jsonl", 60)
        below = {"name": "below", "type": "memory", "capacity": "1 MiB", "when": "commit"}
        settings["tiers"].append(below)
        engine = Engine(settings, blocks=120, seed=seed)
        together(engine, seed)
        loaded, stats = engine.loaded, engine.half.stats()
        engine.close()
        trace = read_trace(tmp_path / f"trace-{seed}.jsonl", block_tokens=TOKENS)
        apart = replace(trace, requests=[one._replace(order=None) for one in trace.requests])
        config = load_config(settings, env={})
        result, serial = (replay(one, config, ReplaySettings(4096)) for one in (trace, apart))
        hits = {"host": stats["host"]["hits"] + stats["host"]["joined"]}
        hits["below"] = stats["below"]["hits"]
        print(f"run {hits}, replay {result.hits}, one by one {serial.hits}")
        for level in ("host", "below"):
            assert result.written[level] == stats[level]["stored"]
            assert result.hits[level] == pytest.approx(hits[level], rel=0.1)
        assert sum(result.hits.values()) == sum(serial.hits.values()) == loaded
        wrong += abs(result.hits["below"] - hits["below"])
        wrong_one_by_one += abs(serial.hits["below"] - hits["below"])
    assert 2 * wrong < wrong_one_by_one


def test_requests_that_wait_are_asked_for_again_and_are_one_line(tmp_path: Path) -> None:
    engine = Engine(source(tmp_path / "trace.jsonl", 60), blocks=40)
    for first in (1, 2, 1, 3):  # more than there is room for at once: they are preempted, too
        engine.add([first] * (9 * TOKENS), length=12 * TOKENS)
    engine.run()
    aborted = engine.add([7] * (2 * TOKENS))
    engine.abort(aborted.request_id)
    engine.close()
    trace = read_trace(tmp_path / "trace.jsonl", block_tokens=TOKENS)
    assert [len(one.blocks) for one in trace.requests] == [9, 9, 9, 9, 2]
    assert [one.output_tokens for one in trace.requests][-1] == 0
    assert all(one.output_tokens >= 3 * TOKENS for one in trace.requests[:4])
    assert [one.asked for one in trace.requests] == [*[(0, 8)] * 4, (0, 0)]
    assert [len(one.answer) for one in trace.requests] == [2, 2, 2, 2, 0]
    orders = [one.order for one in trace.requests if one.order is not None]
    assert [one[0] for one in orders[:4]] == [1, 2, 3, 4]
    assert sorted(orders) == orders
    assert len({at for one in orders[:4] for at in one}) == 12
    aborted_at = orders[-1]
    assert aborted_at[1] == aborted_at[2] == aborted_at[0] + 1
    assert trace.unique == 3 * 9 + 4 * 2 + 2


def test_without_a_recording_nothing_is_told(tmp_path: Path) -> None:
    settings = source(tmp_path / "trace.jsonl", 60)
    del settings["record"]
    engine = Engine(settings)
    serve(engine, [*range(20)])
    assert "record" not in engine.half.stats()
    engine.close()
    assert not [*tmp_path.iterdir()]
