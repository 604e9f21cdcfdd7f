"""A real Mooncake Store for tests: a master, nodes that give memory, and a client.

The library runs only in processes of these tests: its threads outlive their starter.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Self
from urllib.request import urlopen

from kvladder.testing.redisserver import ServerProcess, free_ports
from tests.kit.puppet import Puppet, heard, line

LEASE = "5m"
"""The time limit for reading found blocks: more than a busy machine needs."""
DISCARD_S = 1
"""Seconds for which a killed put keeps its name; Mooncake's own default is 30."""
PROGRAM = Path(sys.executable).parent / "mooncake_master"


class Client(Puppet):
    """A process with a store, which executes commands; with memory it is a node."""

    def __init__(self, master: str, log: Path, *, memory: int = 0) -> None:
        host = f"127.0.0.1:{free_ports(1)[0]}"
        super().__init__("tests.kit.mooncake", [host, memory, master], log)
        assert self.ready == 0, log.read_text()


def main() -> None:
    """Run such a process."""
    host, memory, master = sys.argv[1:]
    store = import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", int(memory), 16 << 20, "tcp", "", master)
    print(line(code), flush=True)
    for said in sys.stdin:
        call, *arguments = heard(said)
        print(line(getattr(store, call)(*arguments)), flush=True)


class Mooncake(ServerProcess):
    """A master, and nodes.

    Parameters
    ----------
    memory:
        Bytes of memory of each node.
    lease:
        The time for which the master keeps objects that a client has found: slower reads are
        refused.
    """

    def __init__(
        self, folder: Path, *, memory: int = 256 << 20, nodes: int = 1, lease: str = LEASE
    ) -> None:
        super().__init__(folder / "master.log")
        self._folder = folder
        self._memory, self._count, self._lease = memory, nodes, lease
        self._ports = free_ports(2)
        self.master, self.admin = (f"127.0.0.1:{port}" for port in self._ports)

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start all of it, again under the same addresses."""
        self.nodes: list[Client] = []
        self.start_master()
        for _ in range(self._count):
            self.add()
        self.client = Client(self.master, self._folder / "client.log")

    def start_master(self) -> None:
        """Start the master, which knows nothing of the blocks on running nodes."""
        port, admin = self._ports
        self.launch(
            [
                str(PROGRAM),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--rpc_thread_num=2",
                f"--metrics_port={admin}",
                "--enable_http_metadata_server=false",
                f"--default_kv_lease_ttl={self._lease}",
                f"--put_start_discard_timeout_sec={DISCARD_S}",
                "--logtostderr",
            ],
            *(partial(listens, number) for number in self._ports),
        )

    def add(self) -> None:
        """Start one more node."""
        log = self._folder / f"node{len(self.nodes)}.log"
        self.nodes.append(Client(self.master, log, memory=self._memory))

    def clear(self) -> None:
        """Remove everything, including blocks that a killed client would end late."""
        while True:
            self.client("remove_all", True)
            with urlopen(f"http://{self.admin}/get_all_keys", timeout=60) as names:
                if not names.read().strip():
                    return
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        for one in (self.client, *self.nodes):
            if one.process.poll() is None:
                one.kill()
        self.kill()


def listens(port: int) -> bool:
    """Return whether a process accepts connections at a port of 127.0.0.1."""
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False
