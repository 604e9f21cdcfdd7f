"""A process closes its cache while a tier hangs: it ends, and late writes are harmless."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

import pytest

from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache

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


@pytest.mark.parametrize("ends", [True, False], ids=["at that moment", "later"])
async def test_a_call_with_a_cancelled_caller_is_reported_once(ends: bool) -> None:
    cache = await SimCache.open(LevelSpec(FakeTier()))
    client, go_on, told = cache.levels[0].client, asyncio.Event(), list[bool]()
    slots = cache.arena.lease(2) or []

    async def operation() -> list[bool]:
        loop = asyncio.get_running_loop()  # its end is known to the door, and not yet to the caller
        loop.call_soon(lambda: loop.call_soon(caller.cancel))
        while not (ends or go_on.is_set()):
            with suppress(asyncio.CancelledError):
                await go_on.wait()
        return [True]

    def late() -> None:
        told.append(cache.stack.lock.held())

    call = client.call("put", operation, late, slots=slots, expected=1)
    caller = asyncio.ensure_future(call)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert told == [True] * ends
    go_on.set()
    await asyncio.sleep(1)
    assert told == [True]
    assert client.behind == 0
    assert [cache.arena.claims(slot) for slot in slots] == [1, 1]
    cache.arena.release(slots)
    await cache.aclose()
