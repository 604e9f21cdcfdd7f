"""``kvladder bench``: what it measures, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from kvladder.cli import main
from kvladder.measuring.blocks import MIB
from kvladder.measuring.files import RawFile, Threads
from kvladder.measuring.worth import load_s, worth
from kvladder.policy.fetch_cost import GAIN
from kvladder.testing.redisserver import RedisServer
from tests.kit.far import Far
from tests.kit.objectserver import BUCKET, ObjectServer
from tests.patience import PATIENCE_S, until

obstore.put(MemoryStore(), "x", b"")  # the library keeps threads and files: start it now
pytestmark = pytest.mark.slow
SMALL = ("--sizes", "64KiB,256KiB", "--depths", "1,4", "--bytes", "64MiB")


def measured(capsys: Any, medium: str, *more: str) -> Any:
    """Return the results of a run that must succeed."""
    assert main(["bench", medium, *SMALL, "--json", *more]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: Any, *arguments: str) -> str:
    """Return the one line of an error."""
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return str(captured.err)


def test_a_directory_is_measured_beside_its_limit_and_left_as_it_was(
    tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "foreign").write_text("mine")
    found = measured(capsys, str(tmp_path), "--settings", "{threads: 2}")
    assert found["type"] == "files"
    assert found["limit"] in {"raw O_DIRECT", "raw, page cache"}
    assert found["facts"]["threads"] == "2"
    cases = [(one["block_bytes"], one["blocks"]) for one in found["cases"]]
    assert cases == [(65536, 1), (65536, 4), (262144, 1), (262144, 4)]
    for one in found["cases"]:
        assert {*one["seconds"]} == {"write", "read", "limit write", "limit read"}
        for spread in one["seconds"].values():
            assert 0 < spread["least_s"] <= spread["median_s"] <= spread["most_s"]
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    settings = [("requirepass", "sesame")]
    with RedisServer(tmp_path_factory.mktemp("redis"), settings) as running:
        yield running


@pytest.mark.parametrize(("way", "first"), [("write", b"old new"), ("read", b"old old")])
def test_the_limit_of_files_takes_checksums_before_a_write_and_after_a_read(
    tmp_path: Path, way: str, first: bytes
) -> None:
    path, seen = tmp_path / "file", list[bytes]()
    path.write_bytes(b"old " * MIB)
    memory = memoryview(bytearray(b"new " * MIB))
    file, threads = RawFile(path, memory, direct=False), Threads(1)

    def checksum(part: memoryview) -> None:
        assert len(part) == 2 * MIB
        seen.append(path.read_bytes()[:4] + bytes(part[:3]))

    try:
        assert file.seconds(way, threads, 2 * MIB, 0, checksum=checksum) > 0
    finally:
        threads.close()
        file.close()
    assert len(seen) == 2
    assert seen[0] == first
    assert path.read_bytes() == bytes(memory)


def test_a_redis_is_measured_and_no_key_is_left_or_touched(
    server: RedisServer, capsys: Any
) -> None:
    with server.client(password="sesame") as client:
        client.set("kvladder:mine", "1")
        url = server.url.replace("://", "://:sesame@")
        found = measured(capsys, url, "--codec", "zstd")
        assert client.keys() == [b"kvladder:mine"]
    assert found["limit"] == "raw RESP"
    assert "sesame" not in json.dumps(found)
    assert len(found["cases"]) == 4


def test_a_store_is_measured_and_no_object_is_left(tmp_path: Path, capsys: Any) -> None:
    with ObjectServer(tmp_path) as running:
        keys = {name: running.options[name] for name in ("access_key_id", "secret_access_key")}
        settings = json.dumps({"options": {"region": "us-east-1", **keys}})
        url = f"{running.address}/{BUCKET}"
        found = measured(capsys, url, "--settings", settings, "--sizes", "1MiB")
        assert b"<Key>" not in (running.ask("GET", BUCKET) or b"")
    assert found["type"] == "object"
    assert found["limit"] == "obstore alone"
    assert "hunter2" not in json.dumps(found)


def test_a_cache_server_is_measured(tmp_path: Path, capsys: Any) -> None:
    with Far(tmp_path, slots=32, block_bytes=256 << 10) as far:
        settings = json.dumps({"keys": far.keys, "interfaces": "lo"})
        found = measured(capsys, far.address, "--settings", settings)
    assert (found["type"], found["limit"]) == ("nixl", "memcpy")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvladder", "bench", str(tmp_path), "--budget", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        until(lambda: [*tmp_path.glob("*/*/raw")])
        child.send_signal(number)
        _, said = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + number
    assert said == "kvladder: interrupted; what it wrote is removed\n"
    assert [*tmp_path.iterdir()] == []


def test_it_prints_from_how_many_tokens_on_it_is_worth_it(tmp_path: Path, capsys: Any) -> None:
    arguments = ["bench", str(tmp_path), "--block-bytes", "64 KiB", "--depths", "1,4"]
    assert main([*arguments, "--prefill", "0.001"]) == 0
    captured = capsys.readouterr()
    table = captured.out.splitlines()
    assert table[-1].startswith("worth it from 16 tokens on: loading ")
    assert main([*arguments, "--prefill", "1e15"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("not worth it at any length: ")


def test_worth_follows_the_rule_of_the_fetch_cost_model() -> None:
    took = {1: 0.010, 4: 0.016, 16: 0.032}
    assert load_s(1, took) == 0.010
    assert load_s(3, took) == pytest.approx(0.014)
    assert load_s(35, took) == pytest.approx(0.032 * 2 + 0.014)
    found = worth(16, 0.00025, took)  # a block takes 4 ms to compute
    assert found.tokens is not None
    blocks = found.tokens // 16
    for count in range(blocks, blocks + 200):
        assert load_s(count, took) <= GAIN * count * 0.004
    assert load_s(blocks - 1, took) > GAIN * (blocks - 1) * 0.004
    assert worth(16, 0.0001, took).tokens is None  # 1.6 ms, less than a read block of 2 ms


def test_its_file_gives_speeds_to_replay_and_plan(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "disk").mkdir()
    out = tmp_path / "speeds.json"
    found = measured(capsys, str(tmp_path / "disk"), "--out", str(out))
    assert json.loads(out.read_text()) == found
    trace, stack = tmp_path / "trace.jsonl", tmp_path / "stack.yaml"
    lines = [
        {"timestamp": n * 500, "input_length": 1024, "output_length": 1, "hash_ids": [n % 90, n]}
        for n in range(200)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiers = "[{type: host}, {name: cold, type: memory, capacity: 8 MiB, when: commit}]"
    stack.write_text(f"arena: {{size: 1 MiB}}\ntiers: {tiers}\n")
    more = [str(trace), "--block-bytes", "4 KiB", "--prefill", "2000", "--json"]
    for given in (str(out), f"{found['speeds']['read']:.0f}"):
        assert main(["plan", *more, "--disk-read", given]) == 0
    assert main(["replay", *more, "--config", str(stack), "--speeds", f"cold={out}"]) == 0
    capsys.readouterr()
    out.write_text("{}")
    assert main(["plan", *more, "--disk-read", str(out)]) == 2
    error = capsys.readouterr().err
    hint = "expected a file that kvladder bench --out wrote"
    assert error == f"kvladder: --disk-read: {out} has no speeds ({hint})\n"


def test_a_medium_that_cannot_be_used_is_one_line(
    server: RedisServer, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "file"
    file.touch()
    for arguments, wanted in (
        ([str(tmp_path / "absent")], "no such directory (expected a directory, redis://"),
        ([str(file)], "is not a directory"),
        (["ftp://far/x"], "ftp://far/x: unknown scheme ftp:// (expected a directory"),
        (["redis://127.0.0.1:1"], "redis://127.0.0.1:1: "),
        ([server.url], "requires a password, but none is set"),
        ([server.url.replace("://", "://:wrong@")], "refuses the login"),
        (["127.0.0.1:7470"], "the keys of a client are missing (expected --settings"),
        (["http://127.0.0.1"], "names no bucket (expected http://host:port/bucket"),
        ([str(tmp_path), "--settings", "{thread: 3}"], "did you mean 'threads'"),
        ([str(tmp_path), "--settings", "[1"], "--settings: "),
        ([str(tmp_path), "--codec", "zst"], "--codec: "),
        ([str(tmp_path), "--depths", "0"], "expected numbers from 1 to 1024"),
        ([str(tmp_path), "--sizes", "5 parsecs"], "--sizes: '5 parsecs'"),
        ([str(tmp_path), "--bytes", "4096"], "--bytes: 4096 (expected at least 128 KiB)"),
        ([str(tmp_path), "--budget", "-1"], "--budget: -1.0 (expected a number above 0)"),
    ):
        error = refused(capsys, *arguments)
        assert wanted in error
        assert "wrong" not in error
    assert [*tmp_path.iterdir()] == [file]


def test_a_full_disk_is_not_asked_for_more(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(tmp_path)
    values = [*found]
    values[4] = (36 << 20) // found.f_frsize  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))
    error = refused(capsys, str(tmp_path), "--sizes", "4MiB")
    assert "no room: " in error
    assert "a block of 4 MiB needs 40 MiB" in error
    assert [*tmp_path.iterdir()] == []
    few = measured(capsys, str(tmp_path), "--sizes", "64KiB", "--depths", "1,64")
    assert [one["blocks"] for one in few["cases"]] == [1, 3]


def test_it_writes_no_more_bytes_than_it_may(tmp_path: Path, capsys: Any) -> None:
    found = measured(capsys, str(tmp_path), "--bytes", "1 MiB")
    written = sum(2 * one["block_bytes"] * one["blocks"] * one["rounds"] for one in found["cases"])
    assert written <= 1 << 20
    assert found["skipped"] > 0
