"""``kvladder stats``, ``describe`` and ``purge`` with caches that run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvladder import open_cache
from kvladder.cli import main
from kvladder.keys import KeyScheme
from kvladder.layout import Layout
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "operated"})
ROOT = Path(__file__).parents[2]
BLOCKS = 12


def mark(salt):
    return f"this is of {salt} ".encode() * 64


def keys(cache, salt):
    scheme = KeyScheme(cache.namespace, block_tokens=1)
    return scheme.chain(range(BLOCKS), parent=scheme.root(salt=salt))


def fill(cache):
    for salt in ("red", "blue"):
        saving = cache.save(keys(cache, salt), salt=salt)
        for slot in saving.slots:
            cache.arena.view(slot)[: len(mark(salt))] = mark(salt)
        saving.commit()
    while not cache.idle():
        time.sleep(0.005)


def engine(config):
    """Run the engine in the other process until its input ends."""
    with open_cache(config, layout=LAYOUT) as cache:
        fill(cache)
        for line in chain([""], sys.stdin):
            if line == "die\n":
                os._exit(9)
            found = [cache.lookup(keys(cache, salt)).total for salt in ("red", "blue")]
            print(json.dumps({"found": found, "namespace": cache.namespace.hex()}), flush=True)


class Engine:
    def __init__(self, process, namespace):
        self.process = process
        self.namespace = namespace

    def look(self, line=""):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["found"]


@contextmanager
def running(config):
    process: Any = subprocess.Popen(
        [sys.executable, __file__, config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    try:
        first = json.loads(process.stdout.readline())
        assert first["found"] == [BLOCKS, BLOCKS]
        yield Engine(process, first["namespace"])
    finally:
        process.stdin.close()
        process.wait(PATIENCE_S)
        process.stdout.close()


@pytest.fixture
def config(tmp_path, request):
    isolate = getattr(request, "param", False)
    return write(tmp_path, isolate=isolate, control=str(tmp_path / "kv.sock"))


IN_A_PROCESS_OR_NOT = pytest.mark.parametrize("config", [False, True], indirect=True)


def write(tmp_path, *, isolate=False, **more):
    files = {"type": "files", "path": str(tmp_path / "kv"), "capacity": "1 MiB", "when": "commit"}
    files["isolate"] = isolate
    whole = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, files], **more}
    path = tmp_path / "stack.yaml"
    path.write_text(yaml.safe_dump(whole))
    return str(path)


def lies(tmp_path):
    """Return the salts with bytes in the files."""
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("seg-*"))
    return [salt for salt in ("red", "blue") if mark(salt)[:100] in raw]


@IN_A_PROCESS_OR_NOT
def test_a_running_cache_is_purged_and_reports_the_counts(config, tmp_path, capsys):
    with running(config) as engine:
        assert main(["stats", config, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out).values()
        assert found["files"]["blocks"] == 2 * BLOCKS
        assert main(["purge", config, "--salt", "red"]) == 0
        assert capsys.readouterr().out == (
            f"kv.sock: host: {BLOCKS} blocks removed\n"
            f"kv.sock: files: {BLOCKS} blocks removed, {BLOCKS} purged from its tier\n"
        )
        assert engine.look() == [0, BLOCKS]
        assert lies(tmp_path) == ["blue"]
        assert main(["stats", str(tmp_path / "kv.sock")]) == 0
        out = capsys.readouterr().out.splitlines()
        row = dict(zip(out[1].split(), out[3].split()[1:], strict=True))
        assert out[3].startswith("files ")
        assert (row["blocks"], row["removed"], row["removals"]) == (str(BLOCKS), str(BLOCKS), "0")
        assert main(["describe", config]) == 0
        out = capsys.readouterr().out
        assert "level 1: files (files)" in out
        assert f"namespace {engine.namespace}\n" in out
        assert main(["purge", config, "--all"]) == 0
        assert engine.look() == [0, 0]
        assert lies(tmp_path) == []
        assert main(["purge", config, "--namespace", "0" * 64]) == 2
        assert "expected namespace " in capsys.readouterr().err


@IN_A_PROCESS_OR_NOT
def test_without_an_engine_the_directory_is_purged(config, tmp_path, capsys):
    with running(config):
        pass
    assert lies(tmp_path) == ["red", "blue"]
    assert main(["purge", config, "--salt", "red"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"files: {BLOCKS} blocks removed, {BLOCKS} overwritten, in namespace ")
    assert lies(tmp_path) == ["blue"]
    with open_cache(config, layout=LAYOUT) as cache:
        assert cache.lookup(keys(cache, "red")).total == 0
        assert cache.lookup(keys(cache, "blue")).total == BLOCKS
        namespace = cache.namespace.hex()
    for other in (namespace[:16] + "0" * 48, "0" * 64):
        assert main(["purge", config, "--namespace", other]) == 0
        assert capsys.readouterr().out == "files: nothing is stored there\n"
    assert lies(tmp_path) == ["blue"]
    assert main(["purge", config, "--namespace", namespace]) == 0
    assert lies(tmp_path) == []
    assert not list((tmp_path / "kv").glob("*/*")), "its files are gone"
    assert main(["purge", config, "--all"]) == 0


@IN_A_PROCESS_OR_NOT
def test_blocks_of_a_killed_engine_are_purged_at_rest(config, tmp_path, capsys):
    with running(config) as engine, pytest.raises(ValueError):  # noqa: PT011 - it says no more
        engine.look("die")
    assert (tmp_path / "kv.sock").is_socket()
    assert main(["stats", config]) == 2
    assert "no answer: Connection refused" in capsys.readouterr().err
    assert main(["purge", config, "--salt", "red"]) == 0
    assert f"files: {BLOCKS} blocks removed" in capsys.readouterr().out
    assert lies(tmp_path) == ["blue"]


def test_an_engine_without_a_control_socket_prevents_a_purge(tmp_path, capsys):
    config = write(tmp_path)
    with running(config) as engine:
        assert main(["purge", config, "--salt", "red"]) == 2
        said = capsys.readouterr().err
        assert f"in use by process {engine.process.pid}" in said
        assert "setting control" in said
        assert engine.look() == [BLOCKS, BLOCKS]
    assert main(["stats", config]) == 2
    wrong = "neither control nor http is configured (add `control: PATH` or `http: 127.0.0.1:9480`,"
    wrong += " and restart the engine)\n"
    assert capsys.readouterr().err == f"kvladder: {config}: {wrong}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "purge: choose what to purge: --salt, --salt-file, --session, --prefix, --older-than"),
        (["--salt", ""], "--salt: empty"),
        (["--salt", "a", "--all"], "more than one is given"),
        (["--salt", "a", "--salt-file", "-"], "more than one is given"),
        (["--namespace", "beef"], "--namespace: 'beef' (expected 64 hexadecimal digits"),
        (["--all", "--wait", "-1"], "--wait: -1"),
        (["--all", "--wait", "nan"], "--wait: nan"),
    ],
)
def test_a_purge_refuses_wrong_arguments(config, capsys, arguments, says):
    assert main(["purge", config, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_stats_refuse_missing_sockets_and_wrong_intervals(config, tmp_path, capsys):
    assert main(["stats", config]) == 2
    assert "no control socket at" in capsys.readouterr().err
    assert main(["stats", str(tmp_path / "nowhere")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["stats", config, "--watch", "0"]) == 2
    assert "--watch: 0" in capsys.readouterr().err


def test_watching_ends_with_the_engine(config, capsys):
    with running(config) as engine:
        watching: Any = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from kvladder.cli import main; sys.exit(main())",
                *("stats", config, "--watch", "0.05"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
        )
        lines = [watching.stdout.readline() for _ in range(12)]
        assert engine.look() == [BLOCKS, BLOCKS]
    _, said = watching.communicate(timeout=PATIENCE_S)
    assert watching.returncode == 2
    assert "kvladder: " in said
    assert sum(" slots free" in line for line in lines) >= 2


if __name__ == "__main__":
    engine(sys.argv[1])
