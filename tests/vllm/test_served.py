"""Engines that share computed blocks through a server, and through each other, over NIXL."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvladder.control.sockets import ask
from kvladder.testing.redisserver import free_ports
from tests.patience import PATIENCE_S, until
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, connector
from tests.vllm.server import Server as Vllm

pytest.importorskip("nixl", reason="the extra nixl is not installed")
from tests.kit.served import Server

ALL = len(PROMPTS) * HITS
Tokens = list[list[int]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    with Server(folder, block="256 KiB", arena="256 MiB") as server:
        yield server


def served_by_two(folder: Path, stack: dict[str, Any]) -> Vllm:
    """Two ranks of data parallelism with these settings."""
    command = f"vllm serve MODEL --kv-transfer-config '{json.dumps(connector(stack))}'"
    two = ["--data-parallel-size", "2", "--data-parallel-backend", "mp", "--api-server-count", "1"]
    return Vllm(folder, command, *two, VLLM_CPU_OMP_THREADS_BIND="nobind")


def over(level: dict[str, Any], **more: Any) -> dict[str, Any]:
    fetch = {"deadline": "1 m"}
    tiers = [{"type": "host"}, level]
    return {"arena": {"size": "64 MiB"}, "fetch": fetch, "tiers": tiers, **more}


def test_engines_share_prefixes_through_a_server_and_read_each_other(
    start: Start, server: Server, reference: Tokens, tmp_path: Path
) -> None:
    """The second engine finds all blocks of the first on the server.

    The third finds the blocks in the first one's memory when the server is dead. Without either,
    only these blocks are lost.
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
    again, counts, _ = start(over(level), *steps, ["shutdown"]).finish()
    assert again["tokens"] == reference
    assert again["external"] == 0
    assert counts["far"]["corrupt"] == 0


def test_ranks_of_data_parallelism_share_through_a_server_that_is_killed_in_between(
    model: Path, tmp_path: Path, server: Server, started: list[Vllm]
) -> None:
    """Each rank loads the other's blocks, and gives the same answers.

    Without the server both compute, and with it they share again. Each rank also exports its
    blocks.
    """
    (tmp_path / "MODEL").symlink_to(model)
    export = {"listen": "127.0.0.1:0", "keys": str(server.keys / "server.keys")}
    level = server.level(breaker={"failures": 1000})
    stack = over(level, export=export, control=str(tmp_path / "rank"))
    stack["arena"], stack["fetch"]["when"] = {"size": "16 MiB"}, "always"
    started.append(vllm := served_by_two(tmp_path, stack))
    vllm.ready()

    def stats(rank: int) -> dict[str, Any]:
        path = tmp_path / ("rank", "rank.dp1")[rank]
        return dict(ask(path, {"command": "stats"}, timeout_s=PATIENCE_S))

    assert len({stats(rank)["export"]["port"] for rank in (0, 1)} - {0}) == 2

    numbers, prompts = random.Random(31), list[list[int]]()
    whole = (700 - 1) // BLOCK * BLOCK

    def said(by: int, prompt: list[int]) -> tuple[list[int], int]:
        return vllm.complete(prompt, "a tenant", rank=by)

    def shared(first: int) -> tuple[bool, bool]:
        """Return whether the ranks give the same answer, and whether the second got all of it."""
        prompts.append(numbers.choices(range(3, 1000), k=700))
        before = server.stats()["export"]["taken"]
        tokens, cached = said(first, prompts[-1])
        assert cached == 0
        until(lambda: server.stats()["export"]["taken"] >= before + whole // BLOCK)
        again, cached = said(1 - first, prompts[-1])
        return again == tokens, cached == whole

    assert shared(0) == shared(1) == (True, True)

    server.kill()
    alone = numbers.choices(range(3, 1000), k=700)
    answers = [said(rank, alone) for rank in (0, 1)]
    assert answers[0] == answers[1] == (answers[0][0], 0)
    for prompt in prompts:
        assert said(0, prompt)[0] == said(1, prompt)[0]

    def stores(rank: int) -> bool:
        before = stats(rank)["far"]["stored"]
        said(rank, numbers.choices(range(3, 1000), k=2 * BLOCK))
        time.sleep(0.5)
        return bool(stats(rank)["far"]["stored"] > before)

    server.again()
    for rank in (0, 1):  # it is reconnected in the background, without a message
        until(lambda rank=rank: stores(rank))  # type: ignore[misc]
    assert shared(0) == shared(1) == (True, True)
    assert server.stats()["export"]["lies"] == 0
    vllm.stop()
