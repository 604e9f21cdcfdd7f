"""This version over bytes that earlier versions stored, see ``tests/upgrade/stored.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvladder
from kvladder.layout import Layout
from kvladder.testing.redisserver import RedisServer, program
from tests.upgrade.elder import LAYOUT, OLDER, PREVIOUS
from tests.upgrade.engine import Engine
from tests.upgrade.stored import BLOCKS, CLEARED, NAME, fill, stack_of, unpack

pytestmark = pytest.mark.slow
has_redis = pytest.mark.skipif(program() is None, reason="install redis-server")


@contextmanager
def opened(level: dict[str, Any]) -> Iterator[Engine]:
    with kvladder.open_cache(stack_of(level), layout=Layout(**LAYOUT)) as cache:
        yield Engine(cache)


def test_blocks_in_the_files_of_an_earlier_version_are_found(tmp_path: Path) -> None:
    unpack(PREVIOUS, tmp_path / "kv")
    with opened({"type": "files", "path": str(tmp_path / "kv")}) as engine:
        assert engine.load(NAME, BLOCKS) == [BLOCKS, 0]
        assert engine.stats("below")["recovered"] == BLOCKS
        assert engine.save("more", 2) == 2


def test_a_directory_of_older_formats_is_cleared_once_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unpack(OLDER, tmp_path / "kv")
    level = {"type": "files", "path": str(tmp_path / "kv")}
    with opened(level) as engine:
        assert engine.load(NAME, BLOCKS) == [0, 0]
        assert engine.save(NAME, BLOCKS) == BLOCKS
    assert [line for line in caplog.messages if CLEARED in line], caplog.messages
    caplog.clear()
    with opened(level) as engine:
        assert engine.load(NAME, BLOCKS) == [BLOCKS, 0]
    assert not [line for line in caplog.messages if CLEARED in line]


@has_redis
def test_values_of_an_earlier_version_are_found_in_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        assert len(fill(PREVIOUS, redis)) >= BLOCKS
        with opened({"type": "redis", "url": redis.url}) as engine:
            assert engine.load(NAME, BLOCKS) == [BLOCKS, 0]
            assert engine.stats("below")["found"] == BLOCKS


@has_redis
def test_values_of_older_formats_are_neither_found_nor_changed_in_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        values = fill(OLDER, redis)
        with opened({"type": "redis", "url": redis.url}) as engine:
            assert engine.load(NAME, BLOCKS) == [0, 0]
            assert engine.save(NAME, BLOCKS) == BLOCKS
            assert engine.load(NAME, BLOCKS) == [BLOCKS, 0]
        assert {name: redis.run("GET", name) for name in values} == values
