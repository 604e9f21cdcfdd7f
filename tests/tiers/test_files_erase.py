"""The bytes on a real disk after a purge of a running cache: none of its salt, all of others."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvladder import open_cache
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey, KeyScheme
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from kvladder.runtime import SystemClock
from kvladder.tiers.files import segments
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.purge import purge_files
from tests.patience import until

pytestmark = pytest.mark.slow

BYTES = 100_000
LAYOUT = Layout(block_tokens=1, block_bytes=BYTES, fields={"model": "erased"})


def payload(key: BlockKey) -> bytes:
    return Random(key).randbytes(BYTES // 10) * 10


def stack(path: Path, **more):
    files = {"type": "files", "path": str(path), "capacity": "20 MiB", "when": "commit", **more}
    return {"arena": {"size": "20 MiB"}, "tiers": [{"type": "host"}, files]}


def keys(cache: CacheManager, salt: str, count: int = 20) -> list[BlockKey]:
    scheme = KeyScheme(cache.namespace, block_tokens=1)
    return scheme.chain(range(count), parent=scheme.root(salt=salt))


def save(cache: CacheManager, salt: str, count: int = 20, **options) -> list[BlockKey]:
    wanted = keys(cache, salt, count)
    saving = cache.save(wanted, salt=salt, **options)
    for index, slot in zip(saving.indices, saving.slots, strict=True):
        cache.arena.view(slot)[:BYTES] = payload(wanted[index])
    saving.commit()
    until(cache.idle)
    return wanted


def seen(path: Path, wanted: Sequence[BlockKey]) -> int:
    """Return how many blocks have any bytes in the files."""
    raw = b"".join(file.read_bytes() for file in path.rglob("seg-*"))
    return sum(any(payload(k)[i : i + 32] in raw for i in (0, 4100, 9900)) for k in wanted)


def purged(cache: CacheManager, salt: str) -> int:
    before = int(cache.stats()["files"]["purged"])
    list(cache.purge(salt))
    until(lambda: cache.removals == 0)
    return int(cache.stats()["files"]["purged"]) - before


def require(cache: CacheManager, wanted: Sequence[BlockKey]) -> None:
    """The cache has these, right."""
    fetch = cache.fetch(wanted)
    fetch.wait()
    assert fetch.blocks == len(wanted)
    for key, slot in zip(wanted, fetch.slots, strict=True):
        assert bytes(cache.arena.view(slot)[:BYTES]) == payload(key)
    fetch.release()


@pytest.mark.parametrize("direct", [True, False])
def test_a_running_cache_erases_only_one_salt(tmp_path, direct) -> None:
    with open_cache(stack(tmp_path / "kv", direct=direct), layout=LAYOUT) as cache:
        red, blue = save(cache, "red"), save(cache, "blue")
        assert (seen(tmp_path, red), seen(tmp_path, blue)) == (20, 20)
        assert purged(cache, "red") == 20
        assert (seen(tmp_path, red), seen(tmp_path, blue)) == (0, 20)
        require(cache, blue)
        assert purged(cache, "red") == 0
        require(cache, save(cache, "red"))
        assert cache.stats()["files"]["corrupt"] == 0
    with open_cache(stack(tmp_path / "kv"), layout=LAYOUT) as cache:
        require(cache, red)
        require(cache, blue)


def test_blocks_removed_earlier_are_erased_too_even_after_a_restart(tmp_path) -> None:
    with open_cache(stack(tmp_path / "kv"), layout=LAYOUT) as cache:
        red, blue = save(cache, "red"), save(cache, "blue")
        cache.remove([*red, *blue])
        until(lambda: cache.removals == 0)
        assert (seen(tmp_path, red), seen(tmp_path, blue)) == (20, 20), "bytes stay as they are"
    with open_cache(stack(tmp_path / "kv"), layout=LAYOUT) as cache:
        assert purged(cache, "red") == 20
        assert (seen(tmp_path, red), seen(tmp_path, blue)) == (0, 20)
        cache.clear(erase=True)
        until(lambda: cache.removals == 0)
        assert (seen(tmp_path, red), seen(tmp_path, blue)) == (0, 0)


@pytest.mark.parametrize("level", [True, False])
def test_blocks_that_expired_between_runs_are_erased(tmp_path, monkeypatch, level) -> None:
    ttl = {"ttl": "1 h"} if level else {}
    with open_cache(stack(tmp_path / "kv", **ttl), layout=LAYOUT) as cache:
        red, blue = save(cache, "red", ttl_s=None if level else 3600.0), save(cache, "blue")
    ahead_s = 4000.0
    monkeypatch.setattr(SystemClock, "wall", lambda _self: time.time() + ahead_s)
    with open_cache(stack(tmp_path / "kv", **ttl), layout=LAYOUT) as cache:
        until(lambda: cache.removals == 0)
        assert seen(tmp_path, red) == 20, "bytes stay as they are"
        purged(cache, "red")
        assert seen(tmp_path, red) == 0
    ahead_s = 0.0
    with open_cache(stack(tmp_path / "kv", **ttl), layout=LAYOUT) as cache:
        assert cache.lookup(red).total == 0
        assert cache.lookup(blue).total == (0 if level else 20)


def test_bytes_behind_a_shorter_block_are_erased(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(segments, "SKIP_BYTES", 4096)
    with open_cache(stack(tmp_path / "kv"), layout=LAYOUT) as cache:
        red = save(cache, "red")
        cache.remove(red)
        until(lambda: cache.removals == 0)
    with open_cache(stack(tmp_path / "kv", codecs=["zstd", "checksum"]), layout=LAYOUT) as cache:
        blue = save(cache, "blue")
        left = seen(tmp_path, red)
        assert left == 20, "a compressed block covers a part of what was there"
        assert purged(cache, "red") == 0, "no whole block was there any more"
        assert seen(tmp_path, red) == 0
        cache._stack.host.index.check(cache.arena.slots)
        with cache._stack.lock:
            cache._stack.host.remove(blue)
        require(cache, blue)


def test_no_bytes_of_a_block_are_stored_behind_another(tmp_path) -> None:
    codecs = ["zstd", "checksum"]
    with open_cache(stack(tmp_path / "kv", codecs=codecs), layout=LAYOUT) as cache:
        red = save(cache, "red")
        assert seen(tmp_path, red) == 20, "what zstd cannot pack is stored as it is"
        blue = keys(cache, "blue")
        saving = cache.save(blue, salt="blue")
        for slot in saving.slots:
            cache.arena.view(slot)[:BYTES] = bytes(BYTES)
        saving.commit()
        until(cache.idle)
        purged(cache, "red")
        raw = b"".join(file.read_bytes() for file in (tmp_path / "kv").rglob("seg-*"))
        left = [k for k in red if any(payload(k)[i : i + 32] in raw for i in range(0, 9900, 500))]
        assert left == []
        with cache._stack.lock:
            cache._stack.host.remove(blue)
        assert cache.lookup(blue).total == 20


def test_a_disk_that_fails_is_tried_again(tmp_path, monkeypatch) -> None:
    failing = iter([errno.EIO, errno.EIO])

    class Worn(Disk):
        def pwritev(self, fd, buffers, offset):
            if not bytes(buffers[0][:4096]).strip(b"\0") and (code := next(failing, 0)):
                raise OSError(code, os.strerror(code))
            return super().pwritev(fd, buffers, offset)

    monkeypatch.setattr("kvladder.tiers.files.tier.Disk", Worn)
    breaker = {"failures": 3, "retry": "10 ms"}
    with open_cache(stack(tmp_path / "kv", breaker=breaker), layout=LAYOUT) as cache:
        red = save(cache, "red")
        assert purged(cache, "red") > 0, "what went well beside a failure is not counted"
        assert seen(tmp_path, red) == 0
        assert cache.stats()["files"]["errors"] >= 1


def test_reads_and_writes_of_others_continue_during_an_erasure(tmp_path) -> None:
    with open_cache(stack(tmp_path / "kv"), layout=LAYOUT) as cache:
        for round_ in range(5):
            red, blue = save(cache, "red", 40), save(cache, f"blue{round_}", 20)
            with cache._stack.lock:
                cache._stack.host.remove(blue)
            fetch = cache.fetch(blue)
            purging = cache.purge("red")
            green = save(cache, f"green{round_}", 20)
            list(purging)
            fetch.wait()
            assert fetch.blocks == 20
            fetch.release()
            until(lambda: cache.removals == 0)
            assert seen(tmp_path, red) == 0
            require(cache, green)
            cache.clear()
            until(cache.idle)
        assert cache.stats()["files"]["corrupt"] == 0


def test_a_directory_at_rest_is_erased_on_a_real_disk(tmp_path) -> None:
    path = tmp_path / "kv"
    with open_cache(stack(path), layout=LAYOUT) as cache:
        red, blue = save(cache, "red"), save(cache, "blue")
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} .*control"):
            purge_files(Disk(), path, space=None, salt="red", progress=lambda *_: None)
    told: list[tuple[int, ...]] = []

    def progress(*numbers: int) -> None:
        told.append(numbers)

    (done,) = purge_files(Disk(), path, space=None, salt="red", progress=progress)
    assert (done.removed, done.erased) == (20, 20)
    assert told[-1][0] == told[-1][1] > 40
    assert (seen(path, red), seen(path, blue)) == (0, 20)
    with open_cache(stack(path), layout=LAYOUT) as cache:
        assert cache.lookup(red).total == 0
        require(cache, blue)
