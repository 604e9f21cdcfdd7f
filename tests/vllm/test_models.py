"""Models of every kind that must work: windows, latent attention, recurrent states, experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.harness import PROMPT_TOKENS, PROMPTS, make, stack, told
from tests.vllm.test_life import cold

KINDS = {
    "gemma3": (32, "float32"),
    "gpt_oss": (32, "float32"),
    "deepseek": (16, "float32"),
    "qwen3_next": (160, "bfloat16"),
}
"""Kind of model, tokens between two places where a prefix may end on a CPU, and element type."""
ENGINE = {"deepseek": {"attention_backend": "CPU_MLA"}}
"""The one for CPUs with AMX takes no float32, and bfloat16 answers differently in a batch."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_same_answers_from_host_and_from_files(
    start: Start, tmp_path: Path, kind: str
) -> None:
    step, dtype = KINDS[kind]
    spec = {
        "model": str(make(tmp_path, kind=kind)),
        "engine": {"dtype": dtype, **ENGINE.get(kind, {})},
    }
    (reference,) = start(None, ["each", {"prompts": PROMPTS}], **spec).finish()
    assert min(len(set(one)) for one in reference["tokens"]) > 4, "it says too little to tell"
    together = "each" if kind == "deepseek" else "generate"  # vLLM's own answers differ in a batch
    first = start(
        stack(tmp_path / "kv"),
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["each", {"prompts": PROMPTS}],
        ["stats"],
        ["reset"],
        [together, {"prompts": PROMPTS}],
        ["reset"],
        ["damage"],
        ["each", {"prompts": PROMPTS}],
        ["shutdown"],
        **spec,
    )
    cold, _, warm, stats, _, again, _, damaged, wrong, _ = first.finish()
    hits = (PROMPT_TOKENS - 1) // step * step
    assert [one["tokens"] for one in (cold, warm, again)] == [reference["tokens"]] * 3
    assert cold["external"] == 0
    assert warm["external"] == again["external"] == wrong["external"] == len(PROMPTS) * hits
    assert damaged == stats["host"]["blocks"] > 0
    assert all(a != b for a, b in zip(wrong["tokens"], reference["tokens"], strict=True))
    second = start(stack(tmp_path / "kv"), ["each", {"prompts": PROMPTS}], ["stats"], **spec)
    again, stats = second.finish()
    assert again["tokens"] == reference["tokens"]
    assert again["external"] == len(PROMPTS) * hits
    assert stats["files"]["corrupt"] == 0


def test_ranks_that_hold_the_same_latents_store_them_once_for_any_number_of_ranks(
    start: Start, tmp_path: Path
) -> None:
    """A text replaces the weights: a rank's weights in memory depend on the number of ranks."""
    model = str(make(tmp_path, kind="deepseek"))
    prompts = {"prompts": PROMPTS}
    named: dict[str, Any] = {"model": {"fingerprint": "tiny deepseek"}}
    engine = ENGINE["deepseek"]
    first = stack(tmp_path / "kv", **named)
    start(first, ["each", prompts], ["shutdown"], model=model, engine=engine).finish()
    socket = tmp_path / "kv.sock"
    two = start(
        stack(tmp_path / "kv", control=str(socket), **named),
        ["each", prompts],
        told(socket),
        ["shutdown"],
        model=model,
        engine={"tensor_parallel_size": 2, **engine},
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    warm, answer, _ = two.finish()
    assert warm["external"] == len(PROMPTS) * ((PROMPT_TOKENS - 1) // 16 * 16)
    (counts,) = json.loads(answer["out"]).values()
    assert (counts["files"]["corrupt"], counts["files"]["hits"] * 16) == (0, warm["external"])


def test_two_ranks_with_windows_are_served_over_a_failing_tier(
    start: Start, tmp_path: Path
) -> None:
    each, some = (["each", {"prompts": PROMPTS[:n]}] for n in (3, 2))
    spec: dict[str, Any] = {
        "model": str(make(tmp_path, kind="gemma3")),
        "engine": {"tensor_parallel_size": 2},
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    (reference,) = start(None, each, **spec).finish()
    run = start(
        cold("moody", 12, deadline="300 ms"),  # of the slots of llama's; room for two prompts here
        each,
        *[["reset"], each] * 4,
        ["stats"],
        ["reset", {"connector": True}],
        some,
        ["reset"],
        ["damage"],
        some,
        ["shutdown"],
        **spec,
    )
    *found, stats, _, cleared, _, damaged, wrong, _ = run.finish()
    hits = (PROMPT_TOKENS - 1) // 32 * 32
    first, *warm = found[::2]
    assert [one["tokens"] for one in (first, *warm)] == [reference["tokens"]] * 5
    assert 0 < sum(one["external"] for one in warm) < 4 * 3 * hits
    assert stats["moody"]["errors"] > 0
    assert stats["arena"]["free"] + stats["host"]["blocks"] == stats["arena"]["slots"]
    assert [one["external"] for one in (first, cleared, wrong)] == [0, 0, 2 * hits]
    assert damaged > 0
    assert cleared["tokens"] == first["tokens"][:2]
    assert all(a != b for a, b in zip(wrong["tokens"], cleared["tokens"], strict=True))
