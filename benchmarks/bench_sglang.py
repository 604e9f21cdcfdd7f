"""Compares SGLang on kvladder with SGLang's own host pool and its own files.

The storage is measured alone first. Then follows the time to the first token of a prompt of 3,000
tokens in a real engine on the CPU: computed, from SGLang's host pool, and from each storage. The
model is cheap to compute but keeps 128 KiB per token, so the caches decide. SGLang is set to wait
for everything that a storage has.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.row import Row, measured_by
from tests.sglang.engine import OURS, PAGE, Engine, environment, make_model, prepare
from tests.sglang.test_engine import whole

TOKENS = 3000
TURNS = 5
PAGES = whole(TOKENS) // PAGE
PAGE_BYTES = PAGE * (128 << 10)
SETTINGS = {
    "max_total_tokens": 4096,
    "hicache_ratio": 3,
    "chunked_prefill_size": 4096,
    "hicache_storage_prefetch_policy": "wait_complete",
}


def stack(folder: Path, slots: int) -> dict[str, Any]:
    """Return our stack's settings, with an arena of ``slots`` pages."""
    return {
        **OURS,
        "arena": {"size": slots * PAGE_BYTES},
        "control": {"path": str(folder / "kv.sock")},
        "tiers": [
            {"name": "host", "type": "host"},
            {"name": "files", "type": "files", "path": str(folder / f"kv{slots}"),
             "capacity": "4 GiB", "when": "commit"},
        ],
    }  # fmt: skip


class Clients:
    """Sends prompts to an engine, and measures the time to the first token."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def asked(self, first: int, *, storage: int | None) -> float:
        """Return the seconds of a prompt; ``storage`` is its expected hit in tokens, None: any."""
        begun = perf_counter()
        found = self._engine.generate(first, TOKENS, new=1)
        took = perf_counter() - begun
        assert storage is None or found.storage == storage, found
        return took

    def cold(self) -> list[float]:
        """Measure prompts that are new to the engine."""
        return [self.asked(100 + turn, storage=0) for turn in range(2)]

    def stored(self) -> tuple[list[float], list[float]]:
        """Measure a prompt that only the storage has and, in turns with it, one that SGLang's host
        pool has and its device pool has lost."""
        took: list[float] = []
        host: list[float] = []
        self.asked(1, storage=None)
        for _ in range(TURNS):
            self._engine.do("flush")
            took.append(self.asked(1, storage=whole(TOKENS)))
            self.asked(2, storage=None)
            host.append(self.asked(1, storage=0))
        return took, host

    def attach(self, extra: dict[str, Any], backend: str = "dynamic") -> None:
        """Attach another, empty storage, and store the prompt there."""
        assert self._engine.do("detach") == ""
        assert self._engine.do("attach", extra=extra, backend=backend) == ""
        self._engine.do("flush")
        self.asked(1, storage=0)


def first_tokens(folder: Path) -> Iterable[Row]:
    """Measure the milliseconds to the first token in each way."""
    prepare(folder)
    model = make_model(folder, folder / "model", "llama_wide")
    engine = Engine(folder, model, stack(folder, 4 * PAGES), **SETTINGS)
    clients = Clients(engine)
    took: dict[str, list[float]] = {}
    try:
        took["cold"] = clients.cold()
        took["arena"], took["host beside the arena"] = clients.stored()
        clients.attach(stack(folder, PAGES // 3))
        engine.stored("files", PAGES)
        took["files"], took["host beside files"] = clients.stored()
        kept = folder / "theirs"
        own = {"prefetch_threshold": PAGE, "file_storage_path": str(kept)}
        clients.attach(own, "file")
        while len(list(kept.glob("*.bin"))) < PAGES:
            pass
        took["theirs"], took["host beside theirs"] = clients.stored()
    finally:
        engine.end()
    found = {name: median(several) * 1e3 for name, several in took.items()}
    note = f"prompt of {TOKENS} tokens, {PAGES * PAGE_BYTES >> 20} MiB; computed: "
    pools, cached = "its host pool, in turns", "files in the page cache"
    for name, ours, theirs, beside in (
        ("from the arena, beside SGLang's host pool", "arena", "host beside the arena", pools),
        ("from files, beside SGLang's host pool", "files", "host beside files", pools),
        ("from HiCacheFile, beside SGLang's host pool", "theirs", "host beside theirs", pools),
        ("from the arena, beside HiCacheFile", "arena", "theirs", cached),
        ("from files, beside HiCacheFile", "files", "theirs", cached),
    ):
        yield Row(
            name=f"SGLang, first token, {name}",
            unit="ms",
            limit=None,
            peer=found[theirs],
            ours=found[ours],
            note=f"{note}{found['cold']:,.0f} ms; peer: {beside}",
        )


def rows() -> Iterable[Row]:
    """Measure the storage alone, then the time to the first token."""
    place = os.environ.get("KVLADDER_BENCH_DIR")
    with tempfile.TemporaryDirectory(dir=place) as made:
        folder = Path(made)
        prepare(folder / "alone")
        yield from measured_by("benchmarks.sglang_storage", environment(folder / "alone"))
        yield from first_tokens(folder / "engine")
