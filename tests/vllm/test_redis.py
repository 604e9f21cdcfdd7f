"""Two engines that share only a Redis server share computed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.redisserver import RedisServer
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS

ALL = len(PROMPTS) * HITS
Tokens = list[list[int]]
PIECE = 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


KEY = {"KVLADDER_KEY": "5a" * 32}
CODECS: list[list[str]] = [["checksum"], ["zstd", "checksum"], ["aes-gcm"]]
"""The codecs of one level each, in the database of that number."""


def over_redis(server: RedisServer) -> dict[str, Any]:
    """Return host memory, and three databases of one server below it, each with its own codecs."""
    levels = [
        {
            "name": codecs[0],
            "type": "redis",
            "url": f"{server.url}/{db}",
            "capacity": "64 MiB",
            "when": "commit",
            "codecs": codecs,
        }
        for db, codecs in enumerate(CODECS)
    ]
    fetch = {"deadline": "1 m"}
    return {"arena": {"size": "64 MiB"}, "fetch": fetch, "tiers": [{"type": "host"}, *levels]}


def values(server: RedisServer) -> list[dict[bytes, bytes]]:
    """Return the values in each of the databases."""
    found: list[dict[bytes, bytes]] = []
    for db in range(len(CODECS)):
        with closing(server.client(db=db)) as client:
            names: Any = client.keys("kvladder:*")
            found.append({name: client.get(name) for name in names})
    return found


def keep_one_copy(server: RedisServer) -> list[int]:
    """Keep one copy of each block, in alternate databases; return how many are left in each."""
    names = sorted(values(server)[0])
    for db in range(len(CODECS)):
        with closing(server.client(db=db)) as client:
            client.delete(*(name for at, name in enumerate(names) if at % len(CODECS) != db))
    return [len(one) for one in values(server)]


def test_two_engines_share_prefixes_through_redis_only_with_every_codec(
    start: Start, server: RedisServer, reference: Tokens
) -> None:
    """The second engine finds every third block in another database."""
    steps = [["each", {"prompts": PROMPTS}], ["stats"], ["shutdown"]]
    cold, first, _ = start(over_redis(server), *steps, env=KEY).finish()
    assert cold["tokens"] == reference
    assert cold["external"] == 0
    plain, packed, sealed = values(server)
    for codecs, found in zip(CODECS, (plain, packed, sealed), strict=True):
        assert first[codecs[0]]["stored"] * BLOCK == len(found) * BLOCK == ALL
    assert plain.keys() == packed.keys() == sealed.keys()
    for name, value in plain.items():
        assert len(packed[name]) < 0.97 * len(value), "it is compressed"
        assert len(sealed[name]) == len(value)
        assert value[-PIECE:] not in sealed[name], "it is encrypted"
    left = keep_one_copy(server)
    assert sum(left) * BLOCK == ALL

    warm, second, _ = start(over_redis(server), *steps, env=KEY).finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    for codecs, count in zip(CODECS, left, strict=True):
        stats = second[codecs[0]]
        assert stats["found"] == stats["hits"] == count > 0
        assert (stats["corrupt"], stats["unreadable"]) == (0, 0)

    damaged = [min(found) for found in values(server)]
    for db, name in enumerate(damaged):
        with closing(server.client(db=db)) as client:
            client.setrange(name, 5000, b"\0\1\2\3damage")
    again, third, _ = start(over_redis(server), *steps, env=KEY).finish()
    assert again["tokens"] == reference
    assert 0 < again["external"] < ALL, "what follows a damaged block is computed"
    corrupt = [third[codecs[0]]["corrupt"] for codecs in CODECS]
    assert max(corrupt) == 1
    assert sum(corrupt) >= 1
