"""Two engines that have nothing in common but a Redis server share what they computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.redisserver import RedisServer
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS

ALL = len(PROMPTS) * HITS
Tokens = list[list[int]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def over_redis(server: RedisServer) -> dict[str, Any]:
    """Host memory, and Redis below it."""
    redis = {"type": "redis", "url": server.url, "capacity": "64 MiB", "when": "commit"}
    return {"arena": {"size": "64 MiB"}, "tiers": [{"type": "host"}, redis]}


def test_two_engines_share_prefixes_through_redis_only(
    start: Start, server: RedisServer, reference: Tokens
) -> None:
    steps = [["each", {"prompts": PROMPTS}], ["stats"], ["shutdown"]]
    cold, first, _ = start(over_redis(server), *steps).finish()
    assert cold["tokens"] == reference
    assert cold["external"] == 0
    assert first["redis"]["stored"] * BLOCK == ALL
    assert server.run("DBSIZE") * BLOCK == ALL

    warm, second, _ = start(over_redis(server), *steps).finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    assert second["redis"]["found"] * BLOCK == second["redis"]["hits"] * BLOCK == ALL
    assert (second["redis"]["stored"], second["redis"]["corrupt"]) == (0, 0)

    damaged = min(server.run("KEYS", "kvladder:*"))
    server.run("SETRANGE", damaged, 5000, b"\0\1\2\3damage")
    again, third, _ = start(over_redis(server), *steps).finish()
    assert again["tokens"] == reference
    assert 0 < again["external"] < ALL, "what follows a damaged block is computed"
    assert third["redis"]["corrupt"] == 1
