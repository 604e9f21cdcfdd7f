"""NIXL's data connections use the ports that the environment names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvladder import Layout, open_cache
from tests.kit.served import Server

pytestmark = pytest.mark.slow

FIRST, PORTS = 24000, 256
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


def test_data_ports_stay_in_the_range_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{FIRST}-{FIRST + PORTS - 1}")
    server = Server(tmp_path / "server")
    try:
        stack = {"arena": {"size": "4 MiB"}, "tiers": [{"type": "host"}, server.level()]}
        with open_cache(stack, layout=LAYOUT):
            served = set().union(*map(listening, family(server.process.pid)))
            ours = set().union(*map(listening, family(os.getpid()))) - served
            data = served - {int(server.address.rpartition(":")[2])}
            assert data
            assert ours
            assert (data | ours) <= {*range(FIRST, FIRST + PORTS)}
    finally:
        server.stop()
