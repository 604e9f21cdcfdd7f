"""Ranks of TensorRT-LLM whose devices take a while to register the arena."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvladder.arena import Arena
from kvladder.connectors.trtllm.options import STACK
from kvladder.gpu.copy.copier import Copier
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import Parts
from tests.connectors.executor import BLOCK, Executor


def test_a_rank_comes_when_its_device_has_registered_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("model: {fingerprint: w}\narena: {size: 8 MiB}\ntiers: [{type: host}]\n")
    monkeypatch.setenv(STACK, str(path))
    prompt = list(range(10 * BLOCK))
    device, arenas = object(), list[Arena]()

    def begin(parts: Parts, arena: Arena) -> Copier:
        arena.admit(device, 0)
        arenas.append(arena)
        return copier_for(parts, arena)

    engine = Executor(ranks=2)
    monkeypatch.setattr("kvladder.connectors.trtllm.worker.copier_for", begin)
    for _ in range(3):
        assert not engine.run(prompt).saves
    [arena] = arenas
    arena.admit(device, arena.slots)
    engine.until(lambda: engine.scheduler._cache.complete)
    assert engine.run(prompt).saves
    engine.close()
