"""Locks end with their owner, whatever it has forked; with real forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvladder
from kvladder.control.sockets import BoundSocket, NobodyThere, ask
from kvladder.keys import BlockKey
from kvladder.tiers import forks
from kvladder.tiers.files.disk import Disk, opened
from tests.patience import PATIENCE_S, until

LAYOUT = kvladder.Layout(block_tokens=16, block_bytes=4096)
KEY = BlockKey(b"k" * 32)
ENGINE = """
import os, signal, sys, time
from tests.unit.test_forks import KEY, LAYOUT, stack
import kvladder

cache = kvladder.open_cache(stack(sys.argv[1]), layout=LAYOUT)
cache.save([KEY]).commit()
while not cache.idle():
    time.sleep(0.01)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
os.kill(os.getpid(), signal.SIGKILL)
"""


def stack(folder: str) -> dict[str, Any]:
    level = {"type": "files", "path": f"{folder}/kv", "capacity": "1 MiB", "when": "commit"}
    return {
        "arena": {"size": "512 KiB"},
        "tiers": [{"type": "host"}, level],
        "control": f"{folder}/kv.sock",
    }


@pytest.mark.slow
def test_an_engine_finds_its_blocks_while_a_child_of_its_predecessor_lives(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    ) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            assert engine.wait(PATIENCE_S) == -signal.SIGKILL
            with pytest.raises(NobodyThere):
                ask(tmp_path / "kv.sock", {"command": "stats"})
            with kvladder.open_cache(stack(str(tmp_path)), layout=LAYOUT) as cache:
                assert cache.lookup([KEY]).total == 1
                assert ask(tmp_path / "kv.sock", {"command": "stats"})["files"]["recovered"] == 1
            homes = [home for home in (tmp_path / "kv").iterdir() if home.is_dir()]
            assert len(homes) == 1
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def in_a_child(what: Any) -> bool:
    """Return whether a forked child finds this to be true."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if what() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_a_child_holds_no_lock_and_closes_no_foreign_descriptor(tmp_path: Path) -> None:
    disk = Disk()
    with opened(disk, tmp_path / "LOCK", os.O_RDWR | os.O_CREAT) as fd:
        assert disk.lock(fd)
        number = os.fstat(fd).st_ino

        def stands_for_nothing() -> bool:
            assert os.fstat(fd).st_ino != number
            other = os.open(tmp_path / "LOCK", os.O_RDWR)
            disk.close(fd)
            return not disk.lock(other)  # its owner holds it

        assert in_a_child(stands_for_nothing)
        with opened(disk, tmp_path / "LOCK", os.O_RDWR) as other:
            assert not disk.lock(other)
    read, write = os.pipe()
    with opened(disk, tmp_path / "LOCK", os.O_RDWR) as fd:
        assert disk.lock(fd)
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    with opened(disk, tmp_path / "LOCK", os.O_RDWR) as fd:
        until(lambda: disk.lock(fd))  # a child lives, and has begun
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)


def test_a_child_that_closes_the_cache_leaves_it_to_its_owner(tmp_path: Path) -> None:
    with kvladder.open_cache(stack(str(tmp_path)), layout=LAYOUT) as cache:
        cache.save([KEY]).commit()

        def closes() -> bool:
            cache.close()
            return True

        assert in_a_child(closes)
        assert cache.lookup([KEY]).host == 1
        assert ask(tmp_path / "kv.sock", {"command": "stats"})["host"]["blocks"] == 1


def test_a_child_that_closes_a_control_socket_leaves_it_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with kvladder.open_cache({**stack(str(tmp_path)), "tiers": [{"type": "host"}]}, layout=LAYOUT):
        bound = BoundSocket(tmp_path / "other")

        def closes() -> bool:
            bound.close()
            return True

        assert in_a_child(closes)
        assert {one.name for one in tmp_path.iterdir()} >= {"other", "other.lock"}
        bound.close()
        assert ask(path, {"command": "stats"})


def test_forks_wait_until_a_lock_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a child would keep a descriptor that is being closed."""
    fd = os.open(tmp_path / "LOCK", os.O_RDWR | os.O_CREAT)
    begun, go_on, closing = threading.Event(), threading.Event(), os.close

    def slow(number: int) -> None:
        if number == fd:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        closing(number)

    forks.own(fd)
    monkeypatch.setattr(os, "close", slow)
    closer = threading.Thread(target=forks.close, args=(fd,))
    closer.start()
    assert begun.wait(PATIENCE_S)
    forked: list[bool] = []
    forking = threading.Thread(target=lambda: forked.append(in_a_child(lambda: True)))
    forking.start()
    time.sleep(0.05)
    assert not forked
    go_on.set()
    until(lambda: forked == [True])
    closer.join()
    forking.join()
