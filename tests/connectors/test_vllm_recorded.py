"""A recording of vLLM's connector has one line a request, and a replay hits what the run did."""

from __future__ import annotations

import importlib.util
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


def serve(engine: Engine, tokens: list[int], *, more: int = 1) -> None:
    engine.add(tokens, length=len(tokens) + more)
    engine.run()


def talks(seed: int) -> list[list[int]]:
    """Prompts of conversations that grow, of less than the engine's memory."""
    random = Random(seed)
    open_: list[list[int]] = []
    prompts: list[list[int]] = []
    for _ in range(60):
        begin = random.choice(open_[-6:]) if open_ and random.random() < 0.7 else []
        prompt = [*begin, *random.choices(range(1000), k=random.randint(1, 5) * TOKENS + 2)]
        prompt = prompt[: 24 * TOKENS]
        open_.append(prompt[: len(prompt) // TOKENS * TOKENS])
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_hits_what_the_run_loaded(tmp_path: Path, seed: int) -> None:
    settings = source(tmp_path / "trace.jsonl", 100)
    engine = Engine(settings, blocks=80, save_decode=False, seed=seed)
    prompts = talks(seed)
    for tokens in prompts:
        serve(engine, tokens)
        until(engine.half.connector.manager.idle)
    loaded = engine.loaded
    engine.close()
    trace = read_trace(tmp_path / "trace.jsonl", block_tokens=TOKENS)
    assert [one.input_tokens for one in trace.requests] == [len(tokens) for tokens in prompts]
    assert [len(one.blocks) for one in trace.requests] == [len(t) // TOKENS for t in prompts]
    result = replay(trace, load_config(settings, env={}), ReplaySettings(4096))
    # a prompt's last token is always computed, so a whole prompt's last block is no hit in vLLM
    assert result.asked == trace.blocks
    assert loaded > 0
    print(f"run {loaded}, replay {sum(result.hits.values())} of {trace.blocks}")
    assert sum(result.hits.values()) == pytest.approx(loaded, rel=0.02)


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
    assert trace.unique == 3 * 9 + 2


def test_without_a_recording_nothing_is_told(tmp_path: Path) -> None:
    settings = source(tmp_path / "trace.jsonl", 60)
    del settings["record"]
    engine = Engine(settings)
    serve(engine, [*range(20)])
    assert "record" not in engine.half.stats()
    engine.close()
    assert not [*tmp_path.iterdir()]
