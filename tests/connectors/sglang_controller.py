"""SGLang's cache controller as a storage sees it: its threads, and its treatment of answers.

One thread looks pages up in a storage, another one reads and a third one writes, in batches of at
most 128 pages. Only the leading True of an answer count, a False ends the whole operation, and an
exception costs the batch. SGLang waits ten seconds for the threads when it flushes. Here nothing is
timed, but a test fails if the threads do not end.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch

from tests.connectors.sglang_stub import BATCH
from tests.patience import PATIENCE_S

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 4, 2, 64, 300
PAGE_BYTES = 2 * LAYERS * PAGE * HEADS * DIM * 2


class Pool:
    """A host pool: one tensor holds K and V of a page in its two halves."""

    page_size, dtype, layer_num, head_num, head_dim, v_head_dim = (
        PAGE, torch.bfloat16, LAYERS, HEADS, DIM, DIM,
    )  # fmt: skip
    start_layer, end_layer, storage_format_tag = 0, LAYERS, None

    def __init__(self, layout: str = "page_first_direct", pages: int = PAGES):
        self.layout = layout
        middle = (pages, LAYERS) if layout == "page_first_direct" else (LAYERS, pages)
        self.kv = torch.zeros(2, *middle, PAGE, HEADS, DIM, dtype=self.dtype)

    def get_page_buffer_meta(self, indices):
        assert len(indices) % PAGE == 0
        piece = self.kv[0, 0, 0].nbytes
        base, half = self.kv.data_ptr(), self.kv[0].nbytes
        rows = [int(row) // PAGE for row in indices[::PAGE]]
        if self.layout == "page_first_direct":
            whole = piece * LAYERS
            found = [base + row * whole + side for row in rows for side in (0, half)]
            return found, [whole] * len(found)
        layer = self.kv[0, 0].nbytes
        found = [
            base + at * layer + row * piece + side
            for row in rows
            for at in range(LAYERS)
            for side in (0, half)
        ]
        return found, [piece] * len(found)

    def page(self, row: int) -> torch.Tensor:
        """A copy of a page, K and V."""
        paged = self.kv[:, row] if self.layout == "page_first_direct" else self.kv[:, :, row]
        return paged.clone()

    def fill(self, seed: int) -> None:
        """Other numbers in every page."""
        numbers = torch.Generator().manual_seed(seed)
        self.kv.copy_(torch.randn(self.kv.shape, generator=numbers))


class Sparse:
    """Another host pool, in one tensor: a row is a page of 64 numbers, or ``page_size`` of them."""

    layout, dtype, storage_format_tag = "page_first_direct", torch.bfloat16, None

    def __init__(self, page_size: int = PAGE, pages: int = PAGES, width: int = 64):
        self.page_size = page_size
        self.kv = torch.zeros(pages, page_size, width, dtype=self.dtype)

    def get_page_buffer_meta(self, indices):
        assert len(indices) % self.page_size == 0
        size, base = self.kv[0].nbytes, self.kv.data_ptr()
        rows = [int(row) // self.page_size for row in indices[:: self.page_size]]
        return [base + row * size for row in rows], [size] * len(rows)

    def page(self, row: int) -> torch.Tensor:
        """A copy of a page."""
        return self.kv[row].clone()

    def fill(self, seed: int) -> None:
        """Other numbers in every page."""
        numbers = torch.Generator().manual_seed(seed)
        self.kv.copy_(torch.randn(self.kv.shape, generator=numbers))

    def rows(self, first: int, count: int) -> torch.Tensor:
        """The rows of consecutive pages."""
        return torch.arange(first * self.page_size, (first + count) * self.page_size)


def chain(text: str, count: int) -> list[str]:
    """Digests of a prompt's pages."""
    keys, last = [], hashlib.sha256(text.encode()).digest()
    for index in range(count):
        last = hashlib.sha256(last + index.to_bytes(2)).digest()
        keys.append(last.hex())
    return keys


def rows(first: int, count: int) -> torch.Tensor:
    """The token rows of consecutive pages of the pool."""
    return torch.arange(first * PAGE, (first + count) * PAGE)


def config(extra: dict[str, Any] | None, **changes: Any) -> SimpleNamespace:
    """Return the settings of a rank that SGLang passes to a storage."""
    told = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1, "dp_rank": 0, "is_mla_model": False,
        "model_name": "org/model", "enable_storage_metrics": True,
    }  # fmt: skip
    return SimpleNamespace(**{**told, **changes}, extra_config=extra)


class Controller:
    """Hands operations to a storage's three threads."""

    def __init__(self, storage: Any, *, is_writer: bool = True):
        self.storage_backend = storage
        self.refused: list[str] = []
        """Digests of batches that SGLang reports as failed."""
        self.errors: list[BaseException] = []
        self.prefetch_hit_queue: Queue[Any] = Queue()
        """The pages found for requests, to be read."""
        self._is_writer = is_writer
        self._queues: dict[str, Queue[Any]] = {}
        self._threads: list[threading.Thread] = []
        for name in ("exists", "get", "set"):
            queue: Queue[Any] = Queue()
            thread = threading.Thread(target=self._serve, args=(queue,), name=f"sglang-{name}")
            thread.start()
            self._queues[name] = queue
            self._threads.append(thread)

    def _serve(self, queue: Queue[Any]) -> None:
        while (asked := queue.get()) is not None:
            work, done = asked
            done.put(work())

    def begin(self, name: str, work: Callable[[], Any]) -> Queue[Any]:
        """Run a function in one of the threads; return the queue of its result."""
        done: Queue[Any] = Queue()
        self._queues[name].put((work, done))
        return done

    def _do(self, name: str, work: Callable[[], Any]) -> Any:
        return self.begin(name, work).get(timeout=PATIENCE_S)

    def exists(self, keys: list[str]) -> int:
        """Return the number of leading pages in the storage, batch by batch."""

        def work() -> int:
            found = 0
            for at in range(0, len(keys), BATCH):
                batch = keys[at : at + BATCH]
                here = self.storage_backend.batch_exists(batch, None)
                found += here
                if here < len(batch):
                    break
            return found

        return int(self._do("exists", work))

    def prefetch(self, keys: list[str], indices: torch.Tensor) -> int:
        """Prefetch pages for a request: ask first, then read the pages reported."""
        found = self.exists(keys)
        return self.get(keys[:found], indices[: found * PAGE])

    def ask(self, keys: list[str], salt: str | None) -> None:
        """Look for the pages of a request, which are read when the tree next drains the queue."""
        found = SimpleNamespace(
            hash_value=keys[: self.exists(keys)], token_ids=SimpleNamespace(cache_salt=salt)
        )
        self.prefetch_hit_queue.put(found)

    def read(self, operation: Any) -> None:
        """Read the pages found for a request to the beginning of the pool."""
        pages = len(operation.hash_value)
        operation.completed = self.get(operation.hash_value, rows(0, pages))

    def get(self, keys: list[str], indices: torch.Tensor) -> int:
        """Read pages, batch by batch."""

        def work() -> int:
            completed = 0
            for at in range(0, len(keys), BATCH):
                batch = keys[at : at + BATCH]
                part = indices[at * PAGE : (at + len(batch)) * PAGE]
                try:
                    found = self.storage_backend.batch_get_v1(batch, part, None)
                except Exception as error:  # noqa: BLE001 - as SGLang, which logs it
                    self.errors.append(error)
                    found = []
                good = next((i for i, ok in enumerate(found) if not ok), len(found))
                completed += good
                if good < len(batch):
                    break
            return completed

        return int(self._do("get", work))

    def backup(self, keys: list[str], indices: torch.Tensor | None = None) -> int:
        """Store pages; no batch follows one with a False in its answer."""
        given = rows(0, len(keys)) if indices is None else indices

        def work() -> int:
            completed = 0
            for at in range(0, len(keys), BATCH) if self._is_writer else ():
                batch = keys[at : at + BATCH]
                part = given[at * PAGE : (at + len(batch)) * PAGE]
                if not all(self.storage_backend.batch_set_v1(batch, part, None)):
                    self.refused += batch
                    break
                completed += len(batch)
            return completed

        return int(self._do("set", work))

    def stop(self) -> None:
        """Wait for the threads, as for a flush."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def detach(self) -> None:
        """Wait for the threads and close the storage."""
        self.stop()
        self.storage_backend.close()
