"""A process closes its cache while a tier hangs: it ends, and what still writes may do so."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys, threading
import msgspec
import kvladder
from kvladder.config.registry import register
from kvladder.tiers.memory import MemoryTier

way = sys.argv[1]
begun, go_on, written = threading.Event(), threading.Event(), threading.Event()

class Hanging(MemoryTier):
    class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        pass

    def __init__(self, options=None):
        super().__init__()

    async def put(self, items):
        arena = self.context.arena
        where = [arena.address + item.slot * arena.slot_bytes for item in items]
        if way == "loop":
            self.write(where)
        await self.context.run_blocking(self.write, where)
        return [True] * len(items)

    def write(self, where):  # as a library does, which knows nothing but addresses
        begun.set()
        go_on.wait()
        for address in where:
            ctypes.memset(address, 1, 4096)
        written.set()

register("tiers", "hanging", Hanging)
layout = kvladder.Layout(block_tokens=4, block_bytes=4096)
level = {"type": "hanging", "capacity": "1 MiB", "when": "commit", "timeout": "10 m"}
stack = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]}
cache = kvladder.open_cache(stack, layout=layout)
cache.save([kvladder.BlockKey(bytes([n]) * 32) for n in range(8)]).commit()
begun.wait()
cache.close(timeout_s=0.1)
arena = cache.arena
mapped = lambda: "kvladder-arena" in open("/proc/self/maps").read()
print("mapped", mapped(), flush=True)
if way != "never":
    del cache
    go_on.set()
    written.wait()
    print("written", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["thread", "loop", "never"])
def test_a_process_ends_though_a_tier_hangs_and_its_memory_stays(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mapped", "True", *(["written"] * (way != "never"))]
    assert "Traceback" not in done.stderr
    assert "Task was destroyed" not in done.stderr
    assert ("the arena stays mapped" in done.stderr) == (way != "loop")
