"""Compares SGLang's file back end and ours below one of its host pools, in a process of its own.

Both take turns, and are called as SGLang's cache controller calls them: theirs with flat copies,
ours with pages in place. Both may hold everything in memory: theirs in the page cache, ours in the
arena. For reads from disk, the page cache is dropped for theirs. Ours bypasses it and has a small
arena. The limit is plain calls of several threads on one of our segments.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheFile,
    HiCacheStorageConfig,
)
from sglang.srt.mem_cache.pool_host import mha

from benchmarks.bench_files import MIB
from benchmarks.row import Row, tell
from kvladder.connectors.sglang import identity
from kvladder.connectors.sglang.storage import KVLadderStorage
from kvladder.layout import align
from kvladder.measuring.files import RawFile, Threads
from tests.patience import until

PAGE, LAYERS, HEADS, DIM, PAGES = 64, 12, 4, 64, 47
"""Shape of pages of 1.5 MiB each, and their number in a prompt of 3,000 tokens."""
SMALL, LARGE = 24, 12 * PAGES
TURNS = 9
ASKED = 8192


def pool(*, pages: int = PAGES, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM) -> Any:
    """Return a filled host pool that is not pinned."""
    made = mha.MHATokenToKVPoolHost.__new__(mha.MHATokenToKVPoolHost)
    vars(made).update(
        dtype=torch.float32, layout="page_first_direct", page_size=PAGE, start_layer=0,
        end_layer=layers, layer_num=layers, head_num=heads, head_dim=dim, v_head_dim=dim,
        size=pages * PAGE, page_num=pages, device="cpu", pin_memory=False,
    )  # fmt: skip
    made.kv_buffer = torch.randn(2, pages, layers, PAGE, heads, dim)
    return made


def config(extra: dict[str, Any]) -> Any:
    """Return the configuration that SGLang gives a storage."""
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="m", extra_config=extra,
    )  # fmt: skip


def names(prompt: int, count: int) -> list[str]:
    """Return names of pages, as digests."""
    return [f"{prompt:032x}{index:032x}" for index in range(count)]


class Theirs:
    """SGLang's own file back end."""

    def __init__(self, folder: Path, held: Any) -> None:
        folder.mkdir()
        self._pool = held
        self.storage: Any = HiCacheFile(config({}), str(folder))

    def set(self, keys: list[str]) -> None:
        pages = [self._pool.get_data_page(at * PAGE) for at in range(PAGES)]
        assert self.storage.batch_set(keys, pages)

    def get(self, keys: list[str]) -> None:
        empty = [self._pool.get_dummy_flat_data_page() for _ in keys]
        for at, page in enumerate(self.storage.batch_get(keys, empty)):
            self._pool.set_from_flat_data_page(at * PAGE, page)


class Ours:
    """Our storage, with a given number of slots."""

    def __init__(self, folder: Path, held: Any, slots: int) -> None:
        stack = {
            "model": {"fingerprint": "w"},
            "arena": {"size": slots * align(held.kv_buffer.nbytes // held.page_num)},
            "tiers": [
                {"name": "host", "type": "host"},
                {"type": "files", "path": str(folder), "capacity": "2 GiB", "when": "commit"},
            ],
        }
        told = {"backend_name": "kvladder", "module_path": "m", "class_name": "c"}
        self.storage = KVLadderStorage(config({**told, "interface_v1": 1, **stack}), {})
        self.storage.register_mem_pool_host(held)
        self.storage.on_host_pools_registered()
        self._rows = torch.arange(PAGES * PAGE)

    def set(self, keys: list[str]) -> None:
        assert all(self.storage.batch_set_v1(keys, self._rows))

    def get(self, keys: list[str]) -> None:
        assert self.storage.batch_exists(keys) == PAGES
        assert all(self.storage.batch_get_v1(keys, self._rows))

    def settle(self) -> None:
        manager = self.storage.manager
        assert manager is not None
        until(manager.idle)


def drop(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.rglob("*.bin"):
        held = os.open(path, os.O_RDONLY)
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(held)


class Measured:
    """Speeds of moving all pages, by operation and storage."""

    def __init__(self, held: Any) -> None:
        self._pool = held
        self._kept = held.kv_buffer.clone()
        self._found: dict[str, list[float]] = {}

    def set(self, name: str, storage: Theirs | Ours, keys: list[str]) -> None:
        self._time(name, lambda: storage.set(keys))

    def get(self, name: str, storage: Theirs | Ours, keys: list[str]) -> None:
        self._pool.kv_buffer.zero_()
        self._time(name, lambda: storage.get(keys))
        assert torch.equal(self._pool.kv_buffer, self._kept), name

    def raw(self, segment: Path) -> None:
        """Measure reading the same number of bytes from a longer file on the device to memory."""
        memory = mmap.mmap(-1, self._kept.nbytes)
        memory.write(bytes(len(memory)))  # populates the pages
        raw, threads = RawFile(segment, memoryview(memory), direct=True), Threads(8)
        self._took("raw", raw.seconds("read", threads, 2 * MIB, 0))
        threads.close()
        raw.close()

    def _time(self, name: str, call: Any) -> None:
        begun = perf_counter()
        call()
        self._took(name, perf_counter() - begun)

    def _took(self, name: str, seconds: float) -> None:
        self._found.setdefault(name, []).append(self._kept.nbytes / seconds / 1e9)

    def of(self, name: str) -> float:
        return median(self._found[name])


def moved(folder: Path, held: Any) -> Iterator[Row]:
    """Measure storing and reading a prompt's pages."""
    theirs = Theirs(folder / "theirs", held)
    small, large = (Ours(folder / str(slots), held, slots) for slots in (SMALL, LARGE))
    measured = Measured(held)
    for turn in range(TURNS):
        keys = names(turn, PAGES)
        measured.set("theirs set", theirs, keys)
        measured.set("small set", small, keys)
        measured.set("large set", large, keys)
        small.settle()
        large.settle()
        measured.get("theirs memory", theirs, keys)
        measured.get("large memory", large, keys)
        drop(folder / "theirs")
        measured.get("theirs disk", theirs, keys)
        measured.get("small disk", small, keys)
        measured.raw(next((folder / str(SMALL)).rglob("seg-00000")))
    for what, ours, note in (
        ("set", "large set", "HiCacheFile into the page cache, ours into the arena"),
        ("get memory", "large memory", "HiCacheFile from the page cache, ours from the arena"),
        (
            "get disk",
            "small disk",
            f"HiCacheFile without the page cache, ours through {SMALL} slots",
        ),
    ):
        yield Row(
            name=f"SGLang storage, {what}",
            unit="GB/s",
            peer=measured.of(f"theirs {what.rpartition(' ')[2]}"),
            ours=measured.of(ours),
            goal="ratio >= 1.5",
            note=f"{PAGES} pages of 1.5 MiB; {note}",
        )
    yield Row(
        name="SGLang storage, get disk, beside the device",
        unit="GB/s",
        limit=measured.of("raw"),
        ours=measured.of("small disk"),
        note="limit: plain calls of 8 threads around the page cache, 2 MiB each",
    )
    yield Row(
        name="SGLang storage, set through a small arena",
        unit="GB/s",
        peer=measured.of("theirs set"),
        ours=measured.of("small set"),
        note=f"{SMALL} slots: all but the first wait until files have taken what was before",
    )
    for one in (small, large):
        one.storage.close()


def asked(folder: Path) -> Iterator[Row]:
    """Measure asking how much of a long prompt is stored."""
    held = pool(pages=ASKED, layers=1, heads=1, dim=8)
    theirs, ours = Theirs(folder / "asked", held), Ours(folder / "few", held, ASKED)
    known = names(TURNS, ASKED)
    for at in range(0, ASKED, STORAGE_BATCH_SIZE):
        part = slice(at, at + STORAGE_BATCH_SIZE)
        rows = torch.arange(at * PAGE, (at + STORAGE_BATCH_SIZE) * PAGE)
        assert all(ours.storage.batch_set_v1(known[part], rows))
        firsts = range(at * PAGE, (at + STORAGE_BATCH_SIZE) * PAGE, PAGE)
        assert theirs.storage.batch_set(known[part], [*map(held.get_data_page, firsts)])
    ours.settle()
    for name, keys in (("all there", known), ("none there", names(TURNS + 1, ASKED))):
        found: dict[str, list[float]] = {"theirs": [], "ours": []}
        for _ in range(TURNS):
            for side, storage in (("theirs", theirs.storage), ("ours", ours.storage)):
                begun = perf_counter()
                there = storage.batch_exists(keys)
                found[side].append((perf_counter() - begun) / len(keys) * 1e6)
                assert there == (len(keys) if keys is known else 0)
        yield Row(
            name=f"SGLang storage, exists, {name}",
            unit="us/page",
            peer=median(found["theirs"]),
            ours=median(found["ours"]),
            note=f"{len(keys)} pages in one call; HiCacheFile stops at the first that is absent",
        )
    ours.storage.close()


def main() -> None:
    torch.set_num_threads(1)
    nothing = SimpleNamespace()
    model = SimpleNamespace(model_path="m", revision=None, dtype="float32", quantization=None)
    identity.engine = SimpleNamespace(
        get_model=lambda: model,
        get_exec=lambda: nothing,
        get_mm=lambda: nothing,
        get_parallel=lambda: nothing,
        get_spec=lambda: nothing,
        get_lora=lambda: SimpleNamespace(lora_paths=None),
    )
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVLADDER_BENCH_DIR")) as place:
        held = pool()
        rows = [*moved(Path(place), held), *asked(Path(place))]
    tell(rows)


if __name__ == "__main__":
    main()
