"""Levels with codecs: what a tier gets to see, whose keys encrypt it, and what damage comes to."""

from __future__ import annotations

import pytest

from kvladder.keys import salt_digest
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.base import ChecksumCodec, Codec
from kvladder.tiers.codecs.edge import EdgeSettings
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.ladder.door import LevelSettings


def level(tier: FakeTier, *codecs: Codec) -> LevelSpec:
    settings = LevelSettings(edge=EdgeSettings(codecs))
    return LevelSpec(tier, OffloadRule(when="commit"), settings=settings)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)


@pytest.mark.usefixtures("master")
async def test_a_block_is_encrypted_with_the_key_of_its_salt() -> None:
    tier = FakeTier(checks=False)
    cache = await SimCache.open(level(tier, ZstdCodec(), AesGcmCodec()), slots=2)
    for first, salt in enumerate(("", "tenant")):
        cache.save(SimCache.keys(first, 0), salt=salt)
        await cache.settle()
    records = list(tier.records.values())
    digest = salt_digest(cache.manager.namespace, "tenant")
    assert [digest in record.note for record in records] == [False, False, True, True]
    assert not any(SimCache.payload(record.item.key) in record.data for record in records)
    assert await cache.load(SimCache.keys(0, 0)) == ["level1", "level1"]
    assert await cache.load(SimCache.keys(1, 0)) == ["level1", "level1"]
    await cache.aclose()


async def test_damage_below_the_codecs_ends_a_prefix_and_is_counted() -> None:
    tier = FakeTier(checks=False)
    cache = await SimCache.open(level(tier, ZstdCodec(), ChecksumCodec()), slots=3)
    keys = SimCache.keys(0, 0, 0)
    cache.save(keys)
    await cache.settle()
    cache.save(SimCache.keys(1, 0, 0))
    await cache.settle()
    tier.corrupt(keys[1])
    assert await cache.load(keys) == ["level1"]
    assert cache.manager.stats()["level1"]["corrupt"] == 1
    await cache.aclose()
