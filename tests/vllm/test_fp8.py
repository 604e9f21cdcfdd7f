"""A KV cache of 8-bit numbers, which a CPU has where it has AVX-512."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, stack

ALL = len(PROMPTS) * HITS
EACH = ["each", {"prompts": PROMPTS}]
FP8 = {"kv_cache_dtype": "fp8"}
SLOT = 32 << 10
"""Bytes of a block: a quarter of the bytes of 32-bit numbers."""


@pytest.fixture(autouse=True)
def runs_here() -> None:
    import torch

    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("vLLM: FP8 KV cache on CPU requires x86 with AVX-512 or AMX")


def test_fp8_blocks_come_back_and_have_a_namespace_of_their_own(
    start: Start, files: Path, reference: list[list[int]]
) -> None:
    (alone,) = start(None, EACH, engine=FP8).finish()
    assert all(a != b for a, b in zip(alone["tokens"], reference, strict=True))
    steps = [EACH, ["reset"], EACH, ["stats"], ["reset"], ["damage"], EACH, ["shutdown"]]
    run = start(stack(files), *steps, engine=FP8)  # the files hold 32-bit blocks of these prompts
    cold, _, from_host, stats, _, damaged, wrong, _ = run.finish()
    assert [cold["tokens"], from_host["tokens"]] == [alone["tokens"]] * 2
    assert [one["external"] for one in (cold, from_host, wrong)] == [0, ALL, ALL]
    assert stats["copies"]["onboard_bytes"] == ALL // BLOCK * SLOT
    assert damaged * BLOCK == ALL
    assert all(a != b for a, b in zip(wrong["tokens"], alone["tokens"], strict=True))
    from_files, stats = start(stack(files), EACH, ["stats"], engine=FP8).finish()
    assert (from_files["tokens"], from_files["external"]) == (alone["tokens"], ALL)
    assert (stats["files"]["hits"] * BLOCK, stats["files"]["corrupt"]) == (ALL, 0)
