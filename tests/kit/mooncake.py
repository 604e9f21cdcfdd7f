"""A real Mooncake Store for tests: a master, nodes that give memory, and a client of their own.

The library runs in processes of these tests alone: its threads outlive what began them.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from kvladder.testing.redisserver import ServerProcess, free_ports

LEASE_MS = 500
DISCARD_S = 1
"""How long a put that was killed keeps its name; Mooncake's own default is 30."""
PROGRAM = Path(sys.executable).parent / "mooncake_master"
CLIENT = """
import base64, json, sys
from mooncake.store import MooncakeDistributedStore
host, memory, master = sys.argv[1:]
store = MooncakeDistributedStore()
code = store.setup(host, "P2PHANDSHAKE", int(memory), 16 << 20, "tcp", "", master)
print(json.dumps(code), flush=True)
for line in sys.stdin:
    call, *arguments = json.loads(line)
    arguments = [base64.b64decode(a["bytes"]) if isinstance(a, dict) else a for a in arguments]
    answer = getattr(store, call)(*arguments)
    if isinstance(answer, bytes):
        answer = {"bytes": base64.b64encode(answer).decode()}
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process with a store in it, which does what it is told; with memory, a node."""

    def __init__(self, master: str, log: Path, *, memory: int = 0) -> None:
        host = f"127.0.0.1:{free_ports(1)[0]}"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CLIENT, host, str(memory), master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._answer() == 0, log.read_text()

    def __call__(self, call: str, *arguments: Any) -> Any:
        """Call the store."""
        assert self.process.stdin is not None
        plain = [{"bytes": _text(a)} if isinstance(a, bytes) else a for a in arguments]
        print(json.dumps([call, *plain]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith(tuple('{[-"0123456789tfn')):
            assert line, "it has ended"
        answer = json.loads(line)
        return base64.b64decode(answer["bytes"]) if isinstance(answer, dict) else answer

    def kill(self, sent: int = signal.SIGKILL) -> None:
        """Send it a signal; after SIGKILL, wait for it."""
        os.kill(self.process.pid, sent)
        if sent == signal.SIGKILL:
            self.process.communicate()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Mooncake(ServerProcess):
    """A master, and nodes."""

    def __init__(self, folder: Path, *, memory: int = 256 << 20, nodes: int = 1) -> None:
        super().__init__(folder / "master.log")
        self._folder = folder
        self._memory, self._count = memory, nodes
        self.nodes: list[Client] = []

    def __enter__(self) -> Self:
        port, admin = free_ports(2)
        self.master, self.admin = f"127.0.0.1:{port}", f"127.0.0.1:{admin}"
        self.launch(
            [
                str(PROGRAM),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--rpc_thread_num=2",
                f"--metrics_port={admin}",
                "--enable_http_metadata_server=false",
                f"--default_kv_lease_ttl={LEASE_MS}",
                f"--put_start_discard_timeout_sec={DISCARD_S}",
                "--logtostderr",
            ]
        )
        for number in (port, admin):
            self.wait_for(partial(_listens, number))
        for _ in range(self._count):
            self.add()
        self.client = Client(self.master, self._folder / "client.log")
        return self

    def add(self) -> None:
        """Start one more node."""
        log = self._folder / f"node{len(self.nodes)}.log"
        self.nodes.append(Client(self.master, log, memory=self._memory))

    def clear(self) -> None:
        """Remove everything, also what a client that was killed is late to end."""
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


def _listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False
