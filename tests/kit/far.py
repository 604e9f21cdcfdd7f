"""A far end for tests, in a process of its own: a cache, its offers, and its exporter.

All parts are in one process, so that one signal stops all of them, and a test can inspect them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import kvladder
from kvladder.export.exporter import Exporter, exporting
from kvladder.export.sealed import TAIL, server_layout
from kvladder.export.server import ServerOffers
from kvladder.keys import BlockKey
from kvladder.runtime import BlockingPool
from kvladder.testing.redisserver import free_ports
from kvladder.tiers.label import LABEL_BYTES
from kvladder.tiers.nixl.curve import make_keys
from tests.kit.puppet import Puppet, heard, line


class Far:
    """A process that serves a cache at ``address`` to holders of ``keys``; a context manager.

    It executes the methods of ``Inside`` by name.
    """

    def __init__(self, folder: Path, *, slots: int = 512, block_bytes: int = 64 << 10) -> None:
        self.keys = str(folder / "client.keys")
        self._folder = folder
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._arguments = [folder / "server.keys", self.address, slots, block_bytes]

    def __enter__(self) -> Self:
        if not Path(self.keys).exists():
            make_keys(self._folder)
        self.start()
        return self

    def start(self) -> None:
        """Start it, again under the same address."""
        self._puppet = Puppet("tests.kit.far", self._arguments, self._folder / "far.log")

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process of the far end."""
        return self._puppet.process

    def __call__(self, call: str, *arguments: Any) -> Any:
        """Have ``Inside`` do something."""
        return self._puppet(call, *arguments)

    def kill(self, sent: int = signal.SIGKILL) -> None:
        """Send it a signal; after SIGKILL, wait for it."""
        self._puppet.kill(sent)

    def __exit__(self, *_: object) -> None:
        self.kill()


class Inside:
    """The calls that a test can make in the process, unseen by its clients."""

    def __init__(self, manager: kvladder.CacheManager, offers: ServerOffers, to: Exporter) -> None:
        self._manager, self._offers, self._exporter = manager, offers, to

    @staticmethod
    def _name(namespace: bytes, key: bytes) -> BlockKey:
        """Return the name of the block in this process."""
        return BlockKey(hashlib.sha256(namespace + key).digest())

    async def stored(self, namespace: bytes, key: bytes) -> bytes | None:
        """The bytes of a block."""
        fetch = self._manager.fetch_set([self._name(namespace, key)])
        await fetch.settle()
        try:
            for slot in fetch.found.values():
                view = self._manager.arena.view(slot)
                return bytes(view[: TAIL.unpack_from(view, self._offers.block_bytes_max)[0]])
            return None
        finally:
            fetch.release()

    async def store(self, namespace: bytes, key: bytes, label: bytes, data: bytes) -> None:
        """Store these bytes in place of a block, of which the server forgets nothing else."""
        name, most = self._name(namespace, key), self._offers.block_bytes_max
        save, fetch = self._manager.save([name]), self._manager.fetch_set([name])
        await fetch.settle()
        data, label = data[:most], label.ljust(LABEL_BYTES, b"\0")
        for slot in (*save.slots, *fetch.found.values()):
            view = self._manager.arena.view(slot)
            view[: len(data)] = data
            TAIL.pack_into(view, most, len(data), label)
        save.commit()
        fetch.release()

    async def damage(self, namespace: bytes, key: bytes) -> None:
        """Change a byte of a block."""
        fetch = self._manager.fetch_set([self._name(namespace, key)])
        await fetch.settle()
        for slot in fetch.found.values():
            self._manager.arena.view(slot)[0] ^= 1
        fetch.release()

    async def counts(self) -> dict[str, int]:
        """Return the counters of the exporter and the cache."""
        return {**self._exporter.gauges(), **self._offers.counts()}


async def _serve(manager: kvladder.CacheManager, keys: str, address: str) -> None:
    pool = BlockingPool(4, "kvladder-far")
    offers = ServerOffers(manager, pool.run)
    reader = asyncio.StreamReader(limit=1 << 24)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with exporting(
        offers,
        listen=address,
        keys=keys,
        transports="tcp",
        interfaces="lo",
        run_blocking=pool.run,
        say=lambda _: None,
    ) as (_, exporter, _):
        inside = Inside(manager, offers, exporter)
        print(line("ready"), flush=True)
        while said := await reader.readline():
            call, *arguments = heard(said)
            print(line(await getattr(inside, call)(*arguments)), flush=True)


def main() -> None:
    """Serve until the other end of stdin is closed."""
    _, keys, address, slots, block_bytes = sys.argv
    layout = server_layout(int(block_bytes))
    tiers = [{"type": "host", "min_priority": 0}]
    stack = {"arena": {"size": int(slots) * layout.slot_bytes}, "tiers": tiers}
    with ExitStack() as undo:
        manager = undo.enter_context(kvladder.open_cache(stack, layout=layout))
        asyncio.run(_serve(manager, keys, address))
        os._exit(0)  # not by the end of the interpreter: threads of the library may hang
