"""An operator's day: engines side by side, killed and started again; a full disk; an upgrade."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvladder.tiers.files.meta import sealed
from tests.patience import PATIENCE_S
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, PROMPTS, connector, stack
from tests.vllm.harness import HITS as ALL_HITS
from tests.vllm.server import Server

PAIR = [random.Random(seed).choices(range(3, 1000), k=700) for seed in (21, 22)]
HITS = (len(PAIR[0]) - 1) // BLOCK * BLOCK
TENANT = "a tenant"
Tokens = list[list[int]]


def two_engines(folder: Path, kv: Path) -> Server:
    """One server with two engines that are given one path."""
    given = json.dumps(connector(stack(kv, capacity="128 MiB")))
    command = (
        f"vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --shutdown-timeout 30"
        f" --kv-transfer-config '{given}'"
    )
    two = ["--data-parallel-size", "2", "--data-parallel-backend", "mp", "--api-server-count", "1"]
    return Server(folder, command, *two, VLLM_CPU_OMP_THREADS_BIND="nobind")


def owners(kv: Path) -> dict[str, int]:
    """Below a path, the directories of blocks and the processes that took them."""
    return {lock.parent.name: int(lock.read_text()) for lock in kv.glob("*/LOCK")}


def until(server: Server, reached: Any) -> None:
    """Send each engine requests until a condition holds: their counters come with answers."""
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, server.log.read_text()[-6000:]
        for rank in (0, 1):
            server.complete([5, 6, 7], TENANT, tokens=1, rank=rank)


def ask_to_the_end(server: Server, failures: list[OSError]) -> list[threading.Thread]:
    """Have both engines answer until they are killed."""

    def ask(rank: int, prompt: Sequence[int]) -> None:
        try:
            while True:
                server.complete(prompt[::-1], TENANT, tokens=1300, rank=rank)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(PAIR)]
    for thread in threads:
        thread.start()
    return threads


def test_two_engines_on_one_path_are_killed_and_find_their_blocks_again(
    model: Path, tmp_path: Path, started: list[Server]
) -> None:
    (tmp_path / "MODEL").symlink_to(model)
    kv = tmp_path / "kv"
    started.append(server := two_engines(tmp_path, kv))
    server.ready()
    said = [server.complete(prompt, TENANT, rank=at) for at, prompt in enumerate(PAIR)]
    assert [cached for _, cached in said] == [0, 0]
    until(server, lambda: min(server.counts("blocks", "files"), default=0) * BLOCK >= HITS)
    before = owners(kv)
    (home, number) = sorted(before)
    assert number == f"{home}.1"
    assert len({*before.values()} & {*server.alive()}) == 2

    failures: list[OSError] = []
    threads = ask_to_the_end(server, failures)
    until(server, lambda: server.running() >= 2)
    server.kill()
    for thread in threads:
        thread.join()
    assert len(failures) == 2, "both were killed while they answered"

    started.append(server := two_engines(tmp_path, kv))
    server.ready()
    for prompt, (expected, _) in zip(PAIR, said, strict=True):
        again = [server.complete(prompt, TENANT, rank=rank) for rank in (0, 1)]
        assert [tokens for tokens, _ in again] == [expected] * 2
        assert sorted(cached for _, cached in again) == [0, HITS], "one of them has its blocks"
    after = owners(kv)
    assert after.keys() == before.keys(), "whoever was killed has lost no directory"
    assert len({*after.values()} & {*server.alive()}) == 2
    server.stop()


def another_model(home: Path) -> tuple[Path, str]:
    """Make a directory of another model number; return it and the text of the change."""
    other = home.with_name("0123456789abcdef")
    other.mkdir(0o700)
    shutil.copy(home / "META", other)
    told = json.loads((home / "FIELDS").read_bytes().splitlines()[0])
    fields: dict[str, str] = told["fields"]
    name = next(name for name in fields if name.endswith("hf_config.rms_norm_eps"))
    told["fields"] = {**fields, name: "0.5"}
    (other / "FIELDS").write_bytes(sealed(json.dumps(told).encode()))
    return other, f"{name} changed from 0.5 to {fields[name]}"


def test_an_upgrade_and_a_full_disk_are_reported_once_and_cost_only_hits(
    start: Start, files: Path, reference: Tokens
) -> None:
    (meta,) = files.glob("*/META")
    line = msgspec.json.decode(meta.read_bytes().splitlines()[0])
    other, changed = another_model(meta.parent)
    meta.write_bytes(sealed(msgspec.json.encode({**line, "version": 1})))
    each = ["each", {"prompts": PROMPTS}]
    run = start(
        stack(files),
        ["each", {"prompts": PROMPTS[:1]}],
        ["stats"],
        ["call", {"function": "tests.vllm.operate:fill_disk"}],
        *[each, ["reset"], each, ["stats"], ["shutdown"]],
    )
    _, before, _, cold, _, warm, stats, _ = run.finish()
    assert (before["files"]["recovered"], before["files"]["stored"] * BLOCK) == (0, ALL_HITS)
    assert cold["tokens"] == warm["tokens"] == reference
    assert warm["external"] == len(PROMPTS) * ALL_HITS, "host has them"
    assert stats["files"]["dropped_full"] > 0
    log = run.log.read_text()
    assert log.count(f"files: no blocks in {meta.parent}, beside 1 other namespace, ") == 1
    assert log.count(f"cold: {changed} since {other.name}") == 1
    for text in ("has format 1 of an earlier version of kvladder", "medium is full"):
        assert log.count(text) == 1, text
