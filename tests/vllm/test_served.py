"""Engines that share what they computed through a server, and through each other, over NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.redisserver import free_ports
from tests.patience import PATIENCE_S
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS

pytest.importorskip("nixl", reason="the extra nixl is not installed")
from tests.kit.served import Server


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


ALL = len(PROMPTS) * HITS
Tokens = list[list[int]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    with Server(folder, block="256 KiB", arena="256 MiB") as server:
        yield server


def over(level: dict[str, Any], **more: Any) -> dict[str, Any]:
    fetch = {"deadline": "1 m"}
    tiers = [{"type": "host"}, level]
    return {"arena": {"size": "64 MiB"}, "fetch": fetch, "tiers": tiers, **more}


def test_engines_share_prefixes_through_a_server_and_read_each_other(
    start: Start, server: Server, reference: Tokens, tmp_path: Path
) -> None:
    """The second finds all that the first stored, and the third what the first has in memory,
    when the server is dead; without either, nothing but that is lost.
    """
    (port,), goes_on = free_ports(1), tmp_path / "goes on"
    waits = ["call", {"function": "tests.vllm.operate:until", "path": str(goes_on)}]
    steps = [["each", {"prompts": PROMPTS}], ["stats"]]
    level = server.level(codecs=["zstd", "checksum"])
    export = {"listen": f"127.0.0.1:{port}", "keys": str(server.keys / "server.keys")}
    first = start(over(level, export=export), *steps, waits, ["shutdown"])
    until(lambda: len(first.so_far()) == 2 or first.process.poll() is not None)
    cold, counts = first.so_far()
    assert cold["tokens"] == reference
    assert cold["external"] == 0
    assert counts["far"]["stored"] * BLOCK == ALL
    assert server.stats()["export"]["taken"] == ALL // BLOCK

    warm, counts, _ = start(over(level), *steps, ["shutdown"]).finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    assert counts["far"]["hits"] == ALL // BLOCK
    assert server.stats()["export"]["lies"] == 0

    server.kill()
    peer = server.level(servers=[], peers=[f"127.0.0.1:{port}"], when="never")
    warm, counts, _ = start(over(peer), *steps, ["shutdown"]).finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    assert counts["far"]["hits"] == ALL // BLOCK

    first.kill()
    again, counts, _ = start(over({**level, "required": False}), *steps, ["shutdown"]).finish()
    assert again["tokens"] == reference
    assert again["external"] == 0
    assert counts["far"]["corrupt"] == 0
