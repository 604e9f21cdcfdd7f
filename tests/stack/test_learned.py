"""What a policy has learned outlives the cache, in the directory of a files tier."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvladder.policy.adaptive import Adaptive
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier, Hang
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.ladder.calling.calls import CALLS_TIMEOUT_S
from kvladder.tiers.ladder.calling.client import CLOSE_TIMEOUT_S
from kvladder.tiers.ladder.lifecycle import KEEP_S


def _files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("POLICY*")}


class Remembering(FakeTier):
    """A tier that keeps what policies have learned, and may hang or fail at it."""

    def __init__(self, kept: dict[str, bytes], trouble: str = "") -> None:
        super().__init__(durable=True)
        self.learned = kept
        self.trouble = trouble

    async def _maybe(self) -> None:
        if self.trouble == "hangs":
            await asyncio.Event().wait()
        while self.trouble == "is deaf":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0)
        if self.trouble == "fails":
            raise ValueError("no such luck")

    async def remember(self, name: str, state: bytes) -> None:
        await self._maybe()
        self.learned[name] = state

    async def recall(self, name: str) -> bytes | None:
        await self._maybe()
        return self.learned.get(name)


async def used(cache: SimCache) -> None:
    for round_ in range(30):
        keys = cache.keys(round_ % 4, *range(6))
        cache.save(keys)
        await cache.settle()
        await cache.load(keys)


async def opened(tier: Any, host: Adaptive, own: Adaptive) -> SimCache:
    below = LevelSpec(tier, OffloadRule(when="commit"), 40, policy=own)
    return await SimCache.open(below, slots=16, policy=host)


async def test_both_policies_continue_after_a_restart() -> None:
    kept: dict[str, bytes] = {}
    host, own = Adaptive(), Adaptive()
    cache = await opened(Remembering(kept), host, own)
    await used(cache)
    await cache.aclose()
    states = host.state(), own.state()
    assert states == (kept["host"], kept["own"])
    assert states[0] != Adaptive(16).state()
    host, own = Adaptive(), Adaptive()
    cache = await opened(Remembering(kept), host, own)
    assert (host.state(), own.state()) == states
    await cache.aclose()


async def test_it_is_kept_while_the_cache_runs() -> None:
    kept: dict[str, bytes] = {}
    host = Adaptive()
    cache = await opened(Remembering(kept), host, Adaptive())
    await used(cache)
    assert kept == {}
    await asyncio.sleep(KEEP_S + 1)
    assert kept["host"] == host.state()
    await cache.aclose()


@pytest.mark.parametrize("trouble", ["hangs", "fails", "is deaf"])
async def test_a_tier_that_cannot_keep_it_costs_only_that(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier, loop = Remembering({}, trouble), asyncio.get_running_loop()
    cache = await opened(tier, Adaptive(), Adaptive())
    await used(cache)
    await asyncio.sleep(KEEP_S)  # the cache closes while it tries to keep them
    tier.script.append(Hang(on="aclose", times=None))
    began_s = loop.time()
    await cache.stack.aclose(flush_timeout_s=0)
    assert loop.time() - began_s <= CLOSE_TIMEOUT_S + 2 * CALLS_TIMEOUT_S + 0.1
    tier.trouble = ""
    tier.heal()
    await asyncio.sleep(2.0)  # calls that were left behind end
    await cache.aclose()
    told = [one.getMessage() for one in caplog.records if "learned" in one.getMessage()]
    assert told
    assert all("starts afresh" in message for message in told)


async def test_a_damaged_state_starts_afresh_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = {"own": b"nonsense"}
    own = Adaptive()
    with caplog.at_level(logging.WARNING, "kvladder"):
        cache = await opened(Remembering(kept), Adaptive(), own)
        assert own.state() == Adaptive(40).state()
        await used(cache)
        await cache.aclose()
    (said,) = [one.getMessage() for one in caplog.records if "learned" in one.getMessage()]
    assert "cannot be used: it is damaged" in said
    assert kept["own"] == own.state()


@pytest.mark.real
async def test_the_files_tier_keeps_it_beside_its_index(tmp_path: Path) -> None:
    def tier() -> FilesTier:
        return FilesTier(FilesOptions(path=str(tmp_path / "blocks")))

    host, own = Adaptive(), Adaptive()
    cache = await opened(tier(), host, own)
    await used(cache)
    await cache.aclose()
    states = host.state(), own.state()
    files = _files(tmp_path)
    assert {*files} == {"POLICY", "POLICY-HOST"}
    assert all(path.stat().st_mode & 0o77 == 0 for path in files.values())
    again = Adaptive(), Adaptive()
    cache = await opened(tier(), *again)
    assert tuple(one.state() for one in again) == states
    await cache.aclose()
    files["POLICY"].write_bytes(files["POLICY"].read_bytes()[:100])
    files["POLICY-HOST"].unlink()
    again = Adaptive(), Adaptive()
    cache = await opened(tier(), *again)
    assert [one.state() for one in again] == [Adaptive(16).state(), Adaptive(40).state()]
    await cache.aclose()
