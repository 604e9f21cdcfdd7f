"""A real vLLM on a GPU, with CUDA graphs and both model runners; run by hand with ``-m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.bench_vllm_engine import make_model
from benchmarks.gpu_vllm import V1, V2, answers, sides


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("runner", [V2, V1])
def test_a_dense_model_answers_alike_with_blocks_from_host(runner: str, tmp_path: Path) -> None:
    (side,) = (one for one in sides(dry=False) if one.runner == runner and "kvladder" in one.name)
    engine = side.start(make_model(tmp_path / side.kind, side.kind), tmp_path / "log")
    try:
        answers(side, engine)
    finally:
        engine.kill()
