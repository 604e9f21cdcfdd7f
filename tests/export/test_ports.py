"""NIXL's data connections use the ports that the environment names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvladder import Layout, open_cache
from tests.kit.served import Server

pytestmark = pytest.mark.slow

FIRST, PORTS = 24000, 256
RANGE = {*range(FIRST, FIRST + PORTS)}
LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "ports"})
LISTENS = "0A"


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def listening(pid: int) -> set[int]:
    """TCP ports at which a process listens."""
    held = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(str(one.readlink()))
        except FileNotFoundError:
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    found = [row for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in held]
    return {int(row[1].rpartition(":")[2], 16) for row in found}


def data_ports(server: Server) -> set[int]:
    """Ports at which a server's NIXL listens."""
    found: set[int] = set().union(*map(listening, family(server.process.pid)))
    return found - asked(server)


def asked(server: Server) -> set[int]:
    """Ports that a server's settings name."""
    return {int(one.rpartition(":")[2]) for one in (server.address, server.stack["http"])}


def test_data_ports_stay_in_the_range_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{FIRST}-{FIRST + PORTS - 1}")
    with Server(tmp_path / "server") as server, ExitStack() as clients:
        stack = {"arena": {"size": "4 MiB"}, "tiers": [{"type": "host"}, server.level()]}
        assert not data_ports(server)
        found = []
        for _ in range(2):
            clients.enter_context(open_cache(stack, layout=LAYOUT))
            found.append(data_ports(server))
        assert found[0]
        assert len(found[1]) == 2 * len(found[0])  # a port of each interface for each client
        ours = set().union(*map(listening, family(os.getpid())))
        assert (found[1] | ours) - asked(server) <= RANGE
        assert ours - found[1]
