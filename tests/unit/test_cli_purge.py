"""``kvladder purge`` where something fails: nothing passes for done that is not."""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO, TextIOWrapper

import pytest

from kvladder import open_cache
from kvladder.cli import main
from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.keys import BlockKey
from kvladder.layout import Layout

LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "purged"})
KEYS = [BlockKey(bytes([number]) * 32) for number in range(3)]
SPACE = LAYOUT.namespace().hex()


@pytest.fixture
def config(tmp_path):
    """A stack with a control socket and files, as a file."""
    return write(tmp_path)


def write(tmp_path, *below):
    files = {"type": "files", "path": str(tmp_path / "kv"), "capacity": "1 MiB", "when": "commit"}
    whole = {
        "arena": {"size": "1 MiB"},
        "control": str(tmp_path / "kv.sock"),
        "tiers": [{"type": "host"}, files, *below],
    }
    path = tmp_path / "stack.yaml"
    path.write_text(json.dumps(whole))  # which is YAML, too
    return str(path)


def save(config):
    with open_cache(config, layout=LAYOUT) as cache:
        saving = cache.save(KEYS, salt="red")
        saving.commit()


def left(config):
    with open_cache(config, layout=LAYOUT) as cache:
        return cache.lookup(KEYS).total


@contextmanager
def listening(path):
    """Hold the socket, and never answer."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        yield
    path.unlink()


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(import_module("kvladder.cli.purge"), "MARGIN_S", 0.2)


def test_a_cache_that_does_not_answer_is_not_purged_at_rest(config, tmp_path, capsys):
    save(config)
    with listening(tmp_path / "kv.sock"):
        assert main(["purge", config, "--salt", "red", "--wait", "0"]) == 2
    assert f"{tmp_path / 'kv.sock'}: no answer: timed out" in capsys.readouterr().err
    assert left(config) == 3


def test_a_cache_that_refuses_this_user_is_not_purged_at_rest(
    config, tmp_path, capsys, monkeypatch
):
    save(config)

    def refused(_stream, _address):
        raise PermissionError(13, "Permission denied")

    with listening(tmp_path / "kv.sock"), monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", refused)
        assert main(["purge", config, "--salt", "red"]) == 2
    assert "no answer: Permission denied (ask as the user that" in capsys.readouterr().err
    assert left(config) == 3


@pytest.mark.slow
def test_caches_that_answer_are_purged_and_the_others_named(config, tmp_path, capsys):
    with open_cache(config, layout=LAYOUT) as cache:
        cache.save(KEYS, salt="red").commit()
        with listening(tmp_path / "kv.dp1.sock"), listening(tmp_path / "kv.dp2.sock"):
            assert main(["purge", config, "--salt", "red", "--wait", "1"]) == 2
        said = capsys.readouterr().err
        assert cache.lookup(KEYS).total == 0
    for name in ("kv.dp1.sock", "kv.dp2.sock"):
        assert f"{tmp_path / name}: no answer: timed out" in said
    assert "already done: kv.sock: host: 3 blocks removed" in said


def test_running_caches_are_asked_despite_leftovers_of_killed_ones(config, tmp_path, capsys):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "kv.dp1.sock"))
    with open_cache(config, layout=LAYOUT):
        for command in ("stats", "describe"):
            assert main([command, config]) == 0
            said = capsys.readouterr().out
            assert str(tmp_path / "kv.sock") in said
            assert "kv.dp1.sock" not in said
    for command in ("stats", "describe"):
        assert main([command, config]) == 2
        assert "kv.dp1.sock: no answer: Connection refused" in capsys.readouterr().err


def test_blocks_of_an_ended_engine_are_purged_beside_running_ones(config, tmp_path, capsys):
    """Two engines of one configuration, each with its own directory; one has ended."""
    with open_cache(config, layout=LAYOUT) as cache:
        cache.save(KEYS, salt="red").commit()
        with open_manager(load_config(config), LAYOUT, instance=1) as second:
            second.save(KEYS, salt="red").commit()
            assert f"directory {SPACE[:16]}.1" in second.describe()
        assert main(["purge", config, "--salt", "red", "--wait", "10"]) == 0
        said = capsys.readouterr().out
        assert "kv.sock: host: 3 blocks removed" in said
        assert f"files: 3 blocks removed, 3 overwritten, in namespace {SPACE}" in said
    whole = load_config(config)
    with open_manager(whole, LAYOUT) as one, open_manager(whole, LAYOUT, instance=1) as other:
        assert one.lookup(KEYS).total == other.lookup(KEYS).total == 0


def test_without_a_namespace_that_a_server_needs_nothing_is_purged(tmp_path, capsys):
    away = {"type": "redis", "url": "redis://127.0.0.1:1", "capacity": "1 MiB"}
    alone = write(tmp_path)
    save(alone)
    for what in (["--all"], ["--salt", "red"]):
        config = write(tmp_path, away)
        assert main(["purge", config, *what]) == 2
        assert "--namespace: missing (level redis needs it" in capsys.readouterr().err
        assert left(write(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True])
def test_completed_purges_are_reported_when_a_server_fails(tmp_path, capsys, isolate):
    save(write(tmp_path))
    away = {"type": "redis", "url": "redis://127.0.0.1:1", "capacity": "1 MiB", "isolate": isolate}
    assert main(["purge", write(tmp_path, away), "--namespace", SPACE]) == 2
    said = capsys.readouterr().err
    assert "already done: files: 3 blocks removed" in said
    assert "kvladder: redis.url: 127.0.0.1:1" in said


def test_a_salt_that_is_no_text_is_refused(config, capsys):
    with open_cache(config, layout=LAYOUT):
        assert main(["purge", config, "--salt", os.fsdecode(b"\xff")]) == 2
    assert "--salt: not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("from_file", [True, False])
def test_a_salt_is_read_from_a_file_or_standard_input(
    config, tmp_path, monkeypatch, ending, from_file
):
    save(config)
    assert left(config) == 3
    name = tmp_path / "salt"
    name.write_bytes(b"red" + ending)
    if not from_file:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"red" + ending)))
    assert main(["purge", config, "--salt-file", str(name) if from_file else "-"]) == 0
    assert left(config) == 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"red\nblue\n", "has more than one line"),
        (b"r" * 9000, "too long"),
        (b"\xff", "is not UTF-8 text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_salt_that_is_not_one_line_of_a_file_is_refused(config, tmp_path, capsys, data, why):
    save(config)
    if data is not None:
        (tmp_path / "salt").write_bytes(data)
    assert main(["purge", config, "--salt-file", str(tmp_path / "salt")]) == 2
    said = capsys.readouterr().err
    assert f"--salt-file: {tmp_path / 'salt'} " in said
    assert why in said
    assert left(config) == 3


@pytest.mark.parametrize("every_s", ["1e12", "inf", "nan", "-1"])
def test_an_interval_that_is_too_long_is_refused(config, capsys, every_s):
    assert main(["stats", config, "--watch", every_s]) == 2
    assert "--watch: " in capsys.readouterr().err


def test_an_impossible_target_is_refused(tmp_path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for target, why in ((tmp_path / ("x" * 300), "File name too long"), (loop / "a", "Too many")):
        assert main(["stats", str(target)]) == 2
        assert why in capsys.readouterr().err
