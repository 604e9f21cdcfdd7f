"""A process that is killed in the middle of a purge: the next one completes it.

Run as a script, this is the process: it opens a cache, saves blocks and waits for its end.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvladder import open_cache
from kvladder.control.sockets import ask
from kvladder.errors import ConfigError
from kvladder.forgetting.receipt import Signer, read_receipt
from kvladder.keys import START, BlockKey
from kvladder.layout import Layout
from tests.patience import PATIENCE_S, until

pytestmark = [pytest.mark.crash, pytest.mark.slow]

KEY = "a key of 16 and more characters"
LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "killed"})
BLOCKS = 1500
"""Blocks of each tenant."""


def keys(tenant: int) -> list[BlockKey]:
    names = (f"{tenant} {number}".encode() for number in range(BLOCKS))
    return [BlockKey(hashlib.sha256(name).digest()) for name in names]


def stack(folder: Path) -> dict[str, Any]:
    files = {"type": "files", "path": str(folder / "kv"), "capacity": "32 MiB", "when": "commit"}
    return {
        "arena": {"size": 2 * BLOCKS * LAYOUT.slot_bytes + (1 << 20)},
        "control": str(folder / "kv.sock"),
        "forget": {"path": str(folder / "purges"), "key": KEY},
        "tiers": [{"type": "host"}, files],
    }


def main(folder: Path) -> None:
    with open_cache(stack(folder), layout=LAYOUT) as cache:
        for number, salt in ((1, "red"), (2, "blue")):
            for start in range(0, BLOCKS, 250):
                part = keys(number)[start : start + 250]
                saving = cache.save(part, salt=salt, parent=START)
                for index, slot in zip(saving.indices, saving.slots, strict=True):
                    cache.arena.view(slot)[:] = part[index] * (LAYOUT.slot_bytes // 32)
                saving.commit()
        until(lambda: cache.stats()["files"]["blocks"] == 2 * BLOCKS and cache.idle())
        print("ready", flush=True)
        time.sleep(PATIENCE_S)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.03])
def test_a_purge_survives_kill_9(tmp_path: Path, after_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    purges = tmp_path / "purges"

    def purge() -> None:
        with suppress(ConfigError):  # the process is killed meanwhile
            ask(tmp_path / "kv.sock", {"command": "purge", "salt": "red"}, timeout_s=PATIENCE_S)

    asking = threading.Thread(target=purge)
    try:
        assert process.stdout.readline() == "ready\n"
        asking.start()
        until(lambda: list(purges.glob("*.json")), every_s=0.0005)  # it is promised from here on
        time.sleep(after_s)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    asking.join()
    (path,) = purges.glob("*.json")
    before = read_receipt(path.read_bytes(), "receipt")
    if not after_s:
        assert not before.complete, "it was killed in the middle"
    marks = [key * (LAYOUT.slot_bytes // 32) for key in keys(1)[::97]]
    with open_cache(stack(tmp_path), layout=LAYOUT) as cache:
        assert not any(cache.holding(keys(1)))
        assert all(cache.holding(keys(2)))
        until(lambda: read_receipt(path.read_bytes(), "receipt").complete)
        receipt = read_receipt(path.read_bytes(), "receipt")
        assert Signer(KEY).wrong(receipt) == ""
        request = {"command": "receipt", "receipt": msgspec.to_builtins(before)}
        found = ask(tmp_path / "kv.sock", request)
        assert [level["finding"] for level in found["levels"]] == ["clean", "clean"]
    stored = b"".join(one.read_bytes() for one in (tmp_path / "kv").rglob("seg-*"))
    assert not any(mark[:512] in stored for mark in marks), "overwritten, too"
    assert (keys(2)[0] * 16)[:512] in stored


if __name__ == "__main__":
    main(Path(sys.argv[1]))
