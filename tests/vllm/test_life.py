"""Requests that share loads, are preempted and aborted, for models of several kinds."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, make

PREFIX_BLOCKS = 12
SLOT = 128 << 10
FAULTS_MAX = 500
"""Pages that an engine's thread faults in for a request at most; thousands if each step does."""


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(f"life {seed}").choices(range(3, 1000), k=length)


def cold(kind: str, slots: int, **more: Any) -> dict[str, Any]:
    """Return a stack with this number of host slots, and more in a tier of the engine's process."""
    return {
        "arena": {"size": f"{slots * SLOT} B"},
        "fetch": {"budget": "100 %", **more},
        "tiers": [
            {"type": "host"},
            {
                "type": kind,
                "capacity": "64 MiB",
                "when": "commit",
                "queue": "100 %",
                "timeout": {"slow": "20 s", "paced": "2 h"}.get(kind, "1 s"),
                "breaker": {"failures": 20, "retry": "100 ms", "retry_max": "200 ms"},
            },
        ],
    }


@pytest.mark.alone
def test_requests_share_the_loads_of_a_slow_tier_and_others_do_not_wait(start: Start) -> None:
    prefixes = [prompt(seed, PREFIX_BLOCKS * BLOCK) for seed in range(4)]
    fillers = [prompt(10 + seed, 30 * BLOCK) for seed in range(5)]
    others = [prompt(20 + seed, 3 * BLOCK) for seed in range(4)]
    shared = {"prefixes": prefixes, "count": 32, "others": others}
    run = start(
        cold("slow", 120, deadline="60 s"),
        ["each", {"prompts": prefixes, "tokens": 2}],
        ["each", {"prompts": fillers, "tokens": 2}],  # nothing of the prefixes is left on the host
        ["stats"],
        ["reset"],
        ["call", {"function": "tests.vllm.life:share", **shared}],
        ["stats"],
        engine={"max_num_seqs": 40},
    )
    *_, found, stats = run.finish()
    assert found["fetched"] == [1] * len(prefixes) * PREFIX_BLOCKS
    assert stats["slow"]["loaded"] == len(prefixes) * PREFIX_BLOCKS
    step = found["longest_step"]
    for needed, answered in zip(found["needed"][:32], found["answered"][:32], strict=True):
        assert 0 < needed <= answered <= 1.1 * needed + 2 * step
    last = max(found["needed"])
    assert last > 4 * step
    for answered, spoke in zip(found["answered"][32:], found["spoke"][32:], strict=True):
        assert answered <= 2 * step  # requests do not queue
        assert spoke < last


def test_a_tier_is_read_only_when_loading_is_faster_than_computing(
    start: Start, reference: list[list[int]]
) -> None:
    """No call fails, so no breaker opens; a tier that becomes fast is used again."""
    order = [n % len(PROMPTS) for n in range(8)]
    slow = {"block_s": 600.0, "prompts": [PROMPTS[n] for n in order]}
    run = start(
        cold("paced", 40, deadline="10 m"),  # a prompt and a bit: the requested blocks left host
        ["each", {"prompts": PROMPTS * 2, "tokens": 2, "recompute": True}],
        ["stats"],  # once all is stored
        ["call", {"function": "tests.vllm.life:at_a_pace", **slow}],
        ["call", {"function": "tests.vllm.life:until_fetched", "prompts": PROMPTS, "hits": HITS}],
        ["stats"],
        ["shutdown"],
        env={"KVLADDER__FETCH__WHEN": "faster"},
    )
    *_, slowly, fast, stats, _ = run.finish()
    # vLLM sees no wait if it first asks when the time of a fetch is over, as on a busy machine
    assert sum(one["late"] for one in slowly[:2]) > 0, "the tier's speed is not known yet"
    for one in slowly[2:]:
        assert [one[name] for name in ("asked", "external", "waits", "late")] == [0, 0, 0, 0]
    assert median(one["faults"] for one in slowly[2:]) < FAULTS_MAX, "memory comes and goes"
    assert fast[-1]["external"] == HITS
    for at, one in [*zip(order, slowly, strict=True), *enumerate(fast)]:
        assert one["tokens"][0][:16] == reference[at % len(PROMPTS)]
    assert stats["paced"]["slower"] >= 6 * HITS // BLOCK
    assert stats["paced"]["hits"] > 0
    failures = ("errors", "timeouts", "breaker_opened")
    assert [stats["paced"][name] for name in failures] == [0, 0, 0]


WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "async scheduling": ("llama", 5, {"async_scheduling": True}),
    "windows": ("gemma3", 2, {}),
}
"""Kind of model, MiB of its KV cache, and more of vLLM's settings."""


@pytest.mark.parametrize("way", WAYS)
def test_preemptions_aborts_and_resets_change_no_answer(
    start: Start, tmp_path: Path, way: str
) -> None:
    kind, size, more = WAYS[way]
    model = make(tmp_path, kind=kind)
    prompts = [[*prompt(seed % 3, 400), *prompt(30 + seed, 20 + 40 * seed)] for seed in range(6)]
    run = start(
        cold("moody", 48, deadline="300 ms"),
        ["call", {"function": "tests.vllm.life:churn", "prompts": prompts}],
        ["stats"],
        ["shutdown"],
        model=str(model),
        engine={
            "kv_cache_memory_bytes": size << 20,
            "max_num_batched_tokens": 256,
            "max_model_len": 1024,
            "scheduling_policy": "priority",
            "async_scheduling": False,
            **more,
        },
    )
    found, stats, _ = run.finish()
    assert (found["wrong"], found["failed"]) == (0, 0)
    assert found["finished"] + found["aborted"] == found["added"]
    assert min(found["aborted"], found["resets"], found["external"], found["preemptions"]) > 0
    assert stats["arena"]["free"] + stats["host"]["blocks"] == stats["arena"]["slots"]
