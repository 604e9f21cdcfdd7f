"""A real vLLM under random requests for a long time: ``python -m tests.vllm.soak --minutes 10``.

Engines run one after the other, each with another kind of model, one of them with drafts. Requests
share prefixes, have salts and priorities, are aborted, and the cache is reset, while a tier fails,
hangs and forgets. Each answer must equal the engine's answer without cached blocks. The same runs
without a cache for comparison: vLLM's own memory grows with the requests it has served, and
kvladder must add no more than the blocks it holds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.harness import Run, environment, make
from tests.vllm.test_drafts import NGRAMS
from tests.vllm.test_life import cold, prompt

MIXES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 5, {}),
    "drafts": ("gemma3", 2, {"speculative_config": NGRAMS}),
    "experts": ("gpt_oss", 2, {}),
}
"""The kind of model, MiB of KV cache (few, so that requests are preempted), and more settings.

None uses bfloat16, recurrent states or LoRA, with which vLLM's own answers depend on the batch.
"""
REQUESTS_MIN = 170
"""The number of finished requests, however short the time is, before memory is compared."""
GROWTH_BYTES = 256 << 10
"""The memory that a request may add to a run without a cache: two blocks of llama."""
NO_KERNELS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""Otherwise PyTorch keeps kernels for each number of tokens, up to 1 MiB a request here."""


def soak(mix: str, *, seed: int, folder: Path, seconds: float = 0) -> dict[str, Any]:
    """Run one engine; raise AssertionError if anything is wrong, else return the counters."""
    kind, size, more = MIXES[mix]
    model = make(folder, seed, kind)
    prompts = [
        [*prompt(seed + n % 4, 320 + 64 * (n % 3)), *prompt(100 + seed + n, 30 * n)]
        for n in range(9)
    ]
    spec: dict[str, Any] = {
        "model": str(model),
        "extra": cold("moody", 64, deadline="300 ms"),
        "engine": {
            "kv_cache_memory_bytes": size << 20,
            "max_num_batched_tokens": 256,
            "max_model_len": 1024,
            "scheduling_policy": "priority",
            **more,
        },
        "steps": [
            [
                "call",
                {
                    "function": "tests.vllm.life:churn",
                    "prompts": prompts,
                    "seconds": seconds,
                    "requests": REQUESTS_MIN,
                    "seed": seed,
                },
            ],
            ["stats"],
            ["shutdown"],
        ],
    }
    plain = {**spec, "extra": None, "steps": [spec["steps"][0], ["shutdown"]]}
    env = environment(**NO_KERNELS_KEPT)
    runs = [Run(folder / "ours", spec, env), Run(folder / "plain", plain, env)]
    try:
        found, stats, _ = runs[0].finish(seconds)
        other, _ = runs[1].finish(seconds)
    finally:
        for run in runs:
            run.kill()
    assert (found["wrong"], found["failed"]) == (0, 0), found
    assert found["finished"] + found["aborted"] == found["added"], found
    assert found["external"] > 0, found
    assert stats["arena"]["free"] + stats["host"]["blocks"] == stats["arena"]["slots"], stats
    assert growth(found, 2) <= 0, found["memory"]
    found["grown"], other["grown"] = growth(found, 1), growth(other, 1)
    assert found["grown"] < other["grown"] + GROWTH_BYTES, (found, other)
    return {name: value for name, value in found.items() if name != "memory"}


def growth(found: dict[str, Any], column: int) -> float:
    """Return the memory added by a request, after the first ones, without short-lived memory."""
    counts = [row[column] for row in found["memory"]]
    half = len(counts) // 2
    return float((min(counts[half:]) - min(counts[1:half])) / (10 * (half - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for mix in MIXES:
        with tempfile.TemporaryDirectory() as folder:
            seconds = given.minutes * 60 / len(MIXES)
            found = soak(mix, seconds=seconds, seed=given.seed, folder=Path(folder))
        print(mix, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
