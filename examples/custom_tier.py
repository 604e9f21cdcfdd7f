"""A tier of your own, complete: blocks in a SQLite file. ``docs/write-a-tier.md`` explains it."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from xxhash import xxh3_128_digest

import kvladder
from kvladder.config.registry import register
from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.tiers import NO_SLOT, Item, Tier, TierContext

SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace BLOB, key BLOB, place INTEGER,
    priority INTEGER, floor INTEGER, expires REAL, salt BLOB, terms INTEGER,
    checksum BLOB, data BLOB,
    UNIQUE (namespace, place), UNIQUE (namespace, key))
"""
HERE = "namespace = ? AND place = ? AND key = ?"


class SqliteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that this tier adds to those that every level has."""

    path: str
    """The file; it is made if it is not there."""


class SqliteTier(Tier):
    """Keeps blocks in one table, by place and key, with a checksum each."""

    Options: ClassVar = SqliteOptions
    batch_max = 16
    durable = True

    def __init__(self, options: SqliteOptions) -> None:
        self.options = options
        self._lock = threading.Lock()  # one connection, used by several threads
        self._database: sqlite3.Connection | None = None
        self._corrupt = 0

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        try:
            await context.run_blocking(self._open)
        except sqlite3.Error as error:
            hint = "expected a file that can be written, or a new one in a folder that exists"
            raise ConfigError(f"{self.options.path!r}: {error}", path="path", hint=hint) from error

    def _open(self) -> None:
        self._database = sqlite3.connect(self.options.path, check_same_thread=False)
        with self._database:
            self._database.execute(SCHEMA)

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run ``function(database, *arguments)`` in a thread, as one transaction."""
        return await self.context.run_blocking(self._guarded, function, *arguments)

    def _guarded(self, function: Callable[..., Any], *arguments: object) -> Any:
        with self._lock:
            if self._database is None:
                raise TierError("the tier is closed", temporary=False)
            try:
                with self._database:
                    return function(self._database, *arguments)
            except sqlite3.Error as error:
                kind = TierFull if error.sqlite_errorcode == sqlite3.SQLITE_FULL else TierError
                raise kind(str(error)) from error

    def _here(self, item: Item) -> tuple[bytes, int, bytes]:
        return self.context.namespace, item.place, item.key

    async def get(self, items: Sequence[Item]) -> Sequence[bool]:
        found: Sequence[bool] = await self._run(self._get, items)
        return found

    def _get(self, database: sqlite3.Connection, items: Sequence[Item]) -> list[bool]:
        found: list[bool] = []
        for item in items:
            query = f"SELECT data, checksum FROM blocks WHERE {HERE}"
            row = database.execute(query, self._here(item)).fetchone()
            found.append(row is not None and self._fill(item, *row))
        return found

    def _fill(self, item: Item, data: bytes, checksum: bytes) -> bool:
        """Write the block into its slot, and check what is there now."""
        size = self.context.layout.block_bytes
        slot = self.context.arena.view(item.slot)[:size]
        if len(data) == size:
            slot[:] = data
            if not self.context.verify or xxh3_128_digest(slot) == checksum:
                return True
        self._corrupt += 1
        return False

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        await self._run(self._put, items)
        return [True] * len(items)

    def _put(self, database: sqlite3.Connection, items: Sequence[Item]) -> None:
        size = self.context.layout.block_bytes
        rows: list[tuple[object, ...]] = []
        for item in items:
            data = bytes(self.context.arena.view(item.slot)[:size])
            kept = item.priority, item.floor, item.expires_wall_s, item.salt, item.terms
            names = self.context.namespace, item.key, item.place
            rows.append((*names, *kept, xxh3_128_digest(data), data))
        database.executemany(
            "INSERT OR REPLACE INTO blocks VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
        )

    async def remove(self, items: Sequence[Item]) -> None:
        await self._run(self._remove, items)

    def _remove(self, database: sqlite3.Connection, items: Sequence[Item]) -> None:
        database.executemany(f"DELETE FROM blocks WHERE {HERE}", map(self._here, items))

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        found: Sequence[bool] = await self._run(self._contains, items)
        return found

    def _contains(self, database: sqlite3.Connection, items: Sequence[Item]) -> list[bool]:
        query = f"SELECT 1 FROM blocks WHERE {HERE}"
        rows = [database.execute(query, self._here(item)).fetchone() for item in items]
        return [row is not None for row in rows]

    async def recover(self) -> AsyncIterator[Sequence[Item]]:
        last = 0
        while rows := await self._run(self._rows_after, last):
            last = rows[-1][0]
            yield [
                Item(kvladder.BlockKey(key), place, NO_SLOT, *rest) for _, key, place, *rest in rows
            ]

    def _rows_after(self, database: sqlite3.Connection, last: int) -> list[Any]:
        query = """
            SELECT number, key, place, priority, floor, expires, salt, terms FROM blocks
            WHERE namespace = ? AND place < ? AND number > ? ORDER BY number LIMIT 1000
        """
        limits = (self.context.namespace, self.context.capacity_blocks, last)
        return database.execute(query, limits).fetchall()

    def corrupt_blocks(self) -> int:
        return self._corrupt

    def describe(self) -> dict[str, str]:
        return {"path": self.options.path, "sqlite": sqlite3.sqlite_version}

    async def aclose(self) -> None:
        await self.context.run_blocking(self._close)

    def _close(self) -> None:
        with self._lock:  # whoever is still at work has it
            if self._database is not None:
                self._database.close()
                self._database = None


def serve(path: Path) -> list[str]:
    """Ask a cache over a SQLite file for a prompt, save what it lacks; where blocks came from."""
    layout = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "demo"})
    levels = [
        {"name": "host", "type": "host"},
        {"name": "sql", "type": "sqlite", "path": str(path), "capacity": "16 MiB"},
    ]
    source = {"arena": {"size": "1 MiB"}, "tiers": levels}
    with kvladder.open_cache(source, layout=layout) as cache:
        keys = kvladder.KeyScheme(cache.namespace, block_tokens=16).chain(range(64))
        fetch = cache.fetch(keys)
        fetch.wait()
        sources = fetch.sources
        fetch.release()
        save = cache.save(keys)
        for number, slot in zip(save.indices, save.slots, strict=True):
            cache.arena.view(slot)[:] = bytes([number]) * layout.slot_bytes
        save.commit()
    return sources


if __name__ == "__main__":
    register("tiers", "sqlite", SqliteTier)
    with tempfile.TemporaryDirectory() as folder:
        assert serve(Path(folder, "blocks.db")) == []
        found = serve(Path(folder, "blocks.db"))
    assert found == ["sql"] * 4
    print("four blocks saved by one cache, found in the file by the next")
