"""LMCache's two Redis clients without LMCache's engine: one in Python and one in C++.

They are installed into their own folder (``pip install --no-deps --target``) when first needed,
because LMCache's dependencies conflict with vLLM for CPUs. ``benchmarks.clients`` runs LMCache's
benchmark of engines, which is another package. Existing memory objects replace their
memory manager, which spares them an allocation per block.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from asyncio import get_running_loop
from collections.abc import Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.foreign import Absent, into_folder

VERSION = "0.5.6"
PLACE = Path(os.environ.get("KVLADDER_LMCACHE", Path(sys.prefix) / "lmcache"))
WANTED = (
    f"lmcache=={VERSION}",
    "sortedcontainers",
    "aiofile",
    "caio",
    "nvtx",
    "opentelemetry-exporter-prometheus",
)
TOKENS = 16


class Client(ABC):
    """One of the clients; its values have one size and lie in ``views``."""

    name: str

    def __init__(self, port: int, views: Sequence[memoryview]) -> None:
        where = _module("v1.storage_backend.connector.redis_connector")
        self._keys: dict[int, Any] = {}
        self.values = [_memory_object(view) for view in views]
        self._turns = cycle(self.values)
        backend = SimpleNamespace(
            config=_module("v1.config").LMCacheEngineConfig.from_defaults(),
            metadata=_metadata(len(views[0])),
            allocate=self._allocate,
        )
        self.connector: Any = self._make(where, port, backend)

    def _allocate(self, *_: object) -> Any:
        return next(self._turns)

    @abstractmethod
    def _make(self, where: Any, port: int, backend: Any) -> Any: ...

    @abstractmethod
    def stored_as(self, number: int) -> list[bytes]:
        """Return the keys of one value on the server."""

    @abstractmethod
    async def get(self, count: int) -> None:
        """Fetch the first ``count`` values."""

    def key(self, number: int) -> Any:
        """Return LMCache's key of a value."""
        if number not in self._keys:
            make = _module("utils").CacheEngineKey
            self._keys[number] = make("bench", 1, 0, (number + 1) * 0x9E3779B97F4A7C15, torch.uint8)
        return self._keys[number]

    async def set(self, count: int) -> None:
        """Store the first ``count`` values."""
        await self.connector.batched_put([self.key(n) for n in range(count)], self.values[:count])

    async def exist(self, count: int) -> int:
        """Return the number of leading keys on the server."""
        keys = [self.key(number) for number in range(count)]
        found: int = await self.connector.batched_async_contains("bench", keys)
        return found

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


class PythonClient(Client):
    """``RedisConnector``: redis-py, two keys for each value, a connection for each in flight."""

    name = "Python"

    def _make(self, where: Any, port: int, backend: Any) -> Any:
        return where.RedisConnector(f"redis://127.0.0.1:{port}", get_running_loop(), backend)

    def stored_as(self, number: int) -> list[bytes]:
        name = self.key(number).to_string().encode()
        return [name + b"kv_bytes", name + b"metadata"]

    async def get(self, count: int) -> None:
        keys = [self.key(number) for number in range(count)]
        found = await self.connector.batched_get_non_blocking("bench", keys)
        assert len(found) == count

    async def close(self) -> None:
        await self.connector.pq_executor.shutdown_async()
        await self.connector.connection.aclose()
        await self.connector.pool.disconnect()


class NativeClient(Client):
    """``RESPConnector``: eight threads in C++ with a connection each."""

    name = "C++"

    def _make(self, where: Any, port: int, backend: Any) -> Any:
        return where.RESPConnector("127.0.0.1", port, get_running_loop(), backend)

    def stored_as(self, number: int) -> list[bytes]:
        return [self.key(number).to_string().encode()]

    async def get(self, count: int) -> None:
        found = await self.connector.batched_get([self.key(number) for number in range(count)])
        assert len(found) == count

    async def close(self) -> None:
        await self.connector.pq_executor.shutdown_async()
        self.connector.client.close()


CLIENTS = (PythonClient, NativeClient)


def install() -> None:
    """Install LMCache into its folder if needed, and make it importable.

    Raises
    ------
    Absent
        LMCache cannot be installed, or cannot be imported.
    """
    if not (PLACE / "lmcache").is_dir():
        into_folder(PLACE, WANTED)
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    if str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))  # last, so that installed packages come first
    try:
        _module("v1.storage_backend.connector.redis_connector")
    except ImportError as error:
        raise Absent(f"LMCache {VERSION} cannot be imported: {error}") from error


def _module(name: str) -> Any:
    return import_module(f"lmcache.{name}")


def _metadata(size: int) -> Any:
    """Return LMCache's metadata of a model with ``size`` bytes per 16 tokens."""
    shape = (1, 2, TOKENS, 1, size // (2 * TOKENS))
    make = _module("v1.metadata").LMCacheMetadata
    return make("bench", 1, 1, 0, 0, torch.uint8, shape, chunk_size=TOKENS)


def _memory_object(view: memoryview) -> Any:
    memory = _module("v1.memory_management")
    shape = torch.Size((2, 1, TOKENS, len(view) // (2 * TOKENS)))
    about = memory.MemoryObjMetadata(
        shape,
        torch.uint8,
        0,
        len(view),
        1,
        fmt=memory.MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[torch.uint8],
    )
    data = torch.frombuffer(view, dtype=torch.uint8)
    return memory.TensorMemoryObj(data, about, None)
