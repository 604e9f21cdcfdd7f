"""Real ranks on the CPU: two of tensor parallelism, and two replicas, with one stack each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import PAGE, Engine, make_model, plugged
from tests.sglang.test_engine import LONG, served, stack, whole

PAGES = whole(LONG) // PAGE
RANKS: dict[str, dict[str, Any]] = {"tensor": {"tp_size": 2}, "data": {"dp_size": 2}}


@pytest.fixture
def engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Engine]]:
    """One of each kind; they start together, since that takes long."""
    cores = islice(cycle(sorted(os.sched_getaffinity(0))), 2)  # each rank must get one
    model = make_model(folder, folder / "model")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))

    with ExitStack() as ends, ThreadPoolExecutor(len(RANKS)) as pool:

        def start(kind: str) -> Engine:
            own = folder / kind
            plugged(own / "plugged")
            engine = Engine(own, model, stack(own), **RANKS[kind])
            ends.callback(engine.end)
            return engine

        yield dict(zip(RANKS, pool.map(start, RANKS), strict=True))


def shares(engine: Engine) -> None:
    """One rank owns the stack, and one directory holds the pages of all ranks."""
    log = engine.log.read_text()
    assert log.count("kvladder is ready: a block is 64 tokens") == 1
    assert log.count("kvladder is ready: this rank uses the stack of another rank") == 1
    assert [path.name for path in engine.folder.glob("*.sock")] == ["kv.sock"]
    assert len([path for path in (engine.folder / "kv").iterdir() if path.is_dir()]) == 1


def test_ranks_and_replicas_share_a_stack(engines: dict[str, Engine]) -> None:
    tensor, data = engines["tensor"], engines["data"]
    long = tensor.generate(1, LONG)
    tensor.stored("nvme", 2 * PAGES)  # half of the heads each
    served(tensor, 1, LONG, long)
    shares(tensor)

    long = data.generate(1, LONG, routed_dp_rank=0)
    assert long.cached == 0
    data.stored("nvme", PAGES)
    served(data, 1, LONG, long, routed_dp_rank=1)
    served(data, 1, LONG, long, routed_dp_rank=0)
    assert data.stats()["nvme"]["blocks"] == PAGES
    shares(data)
