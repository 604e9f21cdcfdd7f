"""Quotas of cache salts, and limits of request priorities, in every level."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import kvladder
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import Limits, Shares
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from tests.patience import until

LAYOUT = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "m"})


def keys(name: int, count: int) -> list[BlockKey]:
    return SimCache.keys(name, *range(count - 1))


def salts_of(cache: SimCache) -> dict[bytes, int]:
    index = cache.stack.host.index
    found = [index.salt(place) for key in index if (place := index.place(key)) is not None]
    return {salt: found.count(salt) for salt in found}


async def test_above_its_quota_a_salt_gives_up_its_own_blocks_and_no_more_than_it_needs() -> None:
    cache = await SimCache.open(slots=16, shares=Shares(tenant=4))
    assert cache.save(keys(1, 10), salt="others") == 4, "what is above is not taken"
    cache.save(keys(2, 8))
    assert cache.save(keys(3, 3), salt="greedy") == 3
    assert cache.save(keys(4, 2), salt="greedy") == 2
    digest = cache.manager._digest
    assert salts_of(cache) == {digest("others"): 4, b"": 8, digest("greedy"): 4}
    assert cache.manager.lookup(keys(3, 3)).host == 2, "one gave way, the end of the prompt"
    assert cache.manager.lookup(keys(2, 8)).host == 8
    assert cache.manager.stats()["host"]["dropped_quota"] == 6
    assert cache.manager.stats()["host"]["tenants"] == {
        digest("others").hex(): 4,
        digest("greedy").hex(): 4,
    }
    cache.manager.check()
    await cache.aclose()


async def test_a_salts_blocks_of_lowest_priority_are_evicted_first() -> None:
    cache = await SimCache.open(slots=16, shares=Shares(tenant=4))
    cache.save(keys(1, 2), salt="a", priorities=[80, 80])
    cache.save(keys(2, 2), salt="a")
    assert cache.save(keys(3, 1), salt="a") == 1
    assert cache.manager.lookup(keys(1, 2)).host == 2
    assert cache.save(keys(4, 4), salt="a") == 2, "what it ranks higher stays"
    assert cache.manager.lookup(keys(1, 2)).host == 2
    await cache.aclose()


async def test_a_level_below_keeps_a_quota_without_evicting_other_salts() -> None:
    rule = OffloadRule(when="commit")
    level = LevelSpec(FakeTier(), rule, 8, shares=Shares(tenant=4))
    cache = await SimCache.open(level, slots=32)
    cache.save(keys(1, 4), salt="others")
    await cache.settle()
    for name in range(2, 8):
        cache.save(keys(name, 3), salt="greedy")
        await cache.settle()
    below = cache.levels[0].index
    assert all(key in below for key in keys(1, 4))
    assert below.spare(cache.manager._digest("greedy")) == 0
    assert len(below) == 8
    assert all(key in below for key in keys(7, 3)), "its earlier blocks made no room for these"
    await cache.aclose()


async def test_priorities_raised_beyond_a_share_are_lowered_from_the_prompts_end() -> None:
    cache = await SimCache.open(slots=16, shares=Shares(raised=8, raised_tenant=4))
    cache.save(keys(1, 6), salt="a", priorities=[100] * 6, durations_s=[1e6] * 6)
    index = cache.stack.host.index
    ranks = [index.priority(index.place(key) or 0) for key in keys(1, 6)]
    assert ranks == [100] * 4 + [35] * 2
    cache.save(keys(2, 6), priorities=[90] * 6)
    cache.save(keys(3, 4), salt="b", priorities=[100] * 4)
    ranks = [index.priority(index.place(key) or 0) for key in [*keys(1, 4), *keys(2, 6)]]
    assert ranks.count(100) + ranks.count(90) == 8, "those of all salts together"
    assert ranks[:4] == [100] * 4, "nobody loses what another asks for"
    assert cache.manager.stats()["host"]["clipped"] == 2 + 2 + 4
    cache.manager.check()
    await cache.aclose()


async def test_limits_clip_the_terms_of_a_request_and_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = await SimCache.open(slots=16, limits=Limits(priority=80, pin_s=60.0))
    with caplog.at_level(logging.WARNING, "kvladder"):
        for name in (1, 2):
            cache.save(keys(name, 2), priorities=[100, 50], durations_s=[None, 10.0])
    index = cache.stack.host.index
    metas = [index.meta(index.place(key) or 0) for key in keys(1, 2)]
    now_s = cache.stack.clock.now()
    assert [(meta.priority, meta.until_s - now_s) for meta in metas] == [(80, 60.0), (50, 10.0)]
    assert cache.manager.stats()["host"]["clipped"] == 2
    assert sum("limits.priority" in record.message for record in caplog.records) == 1
    await cache.aclose()


# ---- from settings


def source(path: Path, **settings: Any) -> dict[str, Any]:
    files = {"type": "files", "path": str(path), "capacity": "2 MiB", "segment": "512 KiB"}
    quota = settings.pop("files", {})
    tiers = [{"type": "host"}, {**files, "when": "commit", **quota}]
    return {"arena": {"size": "512 KiB"}, "tiers": tiers, **settings}


def saved(cache: Any, name: str, count: int, **told: Any) -> int:
    wanted = SimCache.keys(*name.encode(), *range(count))[-count:]
    save = cache.save(wanted, salt=name, **told)
    found = len(save.slots)
    save.commit()
    until(cache.idle)
    return found


def test_one_clients_pins_do_not_keep_others_out(tmp_path: Path) -> None:
    with kvladder.open_cache(source(tmp_path), layout=LAYOUT) as cache:
        for _ in range(4):
            saved(cache, "greedy", 64, priorities=[100] * 64, durations_s=[86400.0] * 64)
        assert saved(cache, "others", 32) == 32
        assert cache.stats()["host"]["clipped"] > 0


def test_a_quota_holds_over_a_restart_and_a_smaller_one_is_kept_to_at_once(tmp_path: Path) -> None:
    with kvladder.open_cache(source(tmp_path), layout=LAYOUT) as cache:
        saved(cache, "a", 60)
        saved(cache, "b", 20)
        assert cache.stats()["files"]["blocks"] == 80
    smaller = source(tmp_path, files={"quota": {"tenant": "160 KiB"}})
    with kvladder.open_cache(smaller, layout=LAYOUT) as cache:
        tenants = cache._stack.levels[0].index.tenants
        assert tenants is not None
        most = tenants.shares.tenant
        assert cache.stats()["files"]["tenants"] == {
            cache._digest("a").hex(): most,
            cache._digest("b").hex(): 20,
        }
        cache.check()


def test_settings_of_shares_are_shown_and_wrong_ones_refused(tmp_path: Path) -> None:
    told = {
        "quota": {"tenant": "25 %"},
        "limits": {"priority": 90, "pin": "1 h", "raised": "1 MiB"},
    }
    with kvladder.open_cache(source(tmp_path, **told), layout=LAYOUT) as cache:
        text = cache.describe()
        assert "32 blocks per salt" in text
        for setting in ("limits.priority", "limits.pin", "limits.raised_tenant", "quota.tenant"):
            assert setting in text
        tenants = cache._stack.host.index.tenants
        assert tenants is not None
        assert tenants.shares == Shares(32, 128, 32)
    for wrong, what in (
        ({"quota": {"tenant": "0 %"}}, r"quota\.tenant.*a percentage of the capacity"),
        ({"quota": {"tennant": "5 %"}}, "did you mean 'tenant'"),
        ({"limits": {"priority": 101}}, r"limits\.priority"),
        ({"limits": {"pins": "1 h"}}, "did you mean 'pin'"),
        ({"files": {"quota": {"tenant": "x"}}}, r"tiers\[1\]\.quota\.tenant"),
    ):
        with pytest.raises(ConfigError, match=what):
            kvladder.open_cache(source(tmp_path, **wrong), layout=LAYOUT)
