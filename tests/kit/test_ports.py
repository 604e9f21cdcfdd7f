"""Ports of servers are claimed once, by any thread or process."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvladder.testing import redisserver
from kvladder.testing.redisserver import free_ports


def test_threads_are_given_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = redisserver._claim

    def slow(port: int) -> bool:
        time.sleep(0.001)
        return claim(port)

    monkeypatch.setattr(redisserver, "_claim", slow)
    with ThreadPoolExecutor(4) as threads:
        given = [port for ports in threads.map(free_ports, [4] * 4) for port in ports]
    assert len({*given}) == 16


@pytest.mark.slow
def test_processes_are_given_ports_of_their_own() -> None:
    ports = free_ports(8)
    pid = (ports[0] - redisserver._RANGE.start) * pow(61, -1, len(redisserver._RANGE))
    code = (
        "from kvladder.testing import redisserver\n"
        f"redisserver.os.getpid = lambda: {pid}\n"
        "print(*redisserver.free_ports(8))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    given = [*map(int, told.stdout.split())]
    assert given[0] > ports[0]
    assert {*given}.isdisjoint(ports)
