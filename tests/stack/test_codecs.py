"""Levels with codecs: the bytes that a tier sees, the keys that encrypt them, and damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from struct import pack

import pytest
from xxhash import xxh3_64_intdigest

from kvladder.errors import ConfigError
from kvladder.keys import BlockKey, salt_digest
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Stage, Subject
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.label import Coding, Labels, packed_step
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.records.meta import BlockMeta


def level(tier: FakeTier, *codecs: Codec) -> LevelSpec:
    settings = LevelSettings(pipeline=PipelineSettings(codecs))
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
    assert [digest in record.label[128:] for record in records] == [False, False, True, True]
    assert not any(SimCache.payload(record.key) in record.data for record in records)
    assert await cache.load(SimCache.keys(0, 0)) == ["level1", "level1"]
    assert await cache.load(SimCache.keys(1, 0)) == ["level1", "level1"]
    await cache.aclose()


class Coarse(Codec):
    """Keeps the upper half of each byte."""

    name = "coarse"
    id = 60001
    stage = Stage.REDUCE
    lossy = True

    def __init__(self, *kinds: str) -> None:
        self.allowed = frozenset(kinds)

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes]:
        target[: len(data)] = bytes(byte & 0xF0 for byte in data)
        return target[: len(data)], b""

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview:
        return data


MIXED = replace(LAYOUT, kinds=("full", "window", "full"))


async def test_a_lossy_codec_skips_groups_that_it_is_not_allowed_for() -> None:
    tier = FakeTier(checks=False)
    cache = await SimCache.open(level(tier, Coarse("window", "local")), layout=MIXED)
    groups = [SimCache.keys(group) for group in range(3)]
    for group, keys in enumerate(groups):
        cache.save(keys, group=group)
    (unknown,) = SimCache.keys(3)  # a recovered or found block: its group is unknown
    _, (slot,), _ = cache.stack.reserve([unknown], [BlockMeta()], explicit=True)
    cache.arena.view(slot)[:64] = SimCache.payload(unknown)
    cache.stack.publish([unknown], [slot])
    await cache.settle()
    exact = {one.key: SimCache.payload(one.key) in one.data for one in tier.records.values()}
    assert exact == {groups[0][0]: True, groups[1][0]: False, groups[2][0]: True, unknown: True}
    await cache.aclose()


async def test_a_codec_for_all_kinds_needs_no_kinds_and_one_for_none_is_refused() -> None:
    tier = FakeTier(checks=False)
    cache = await SimCache.open(level(tier, Coarse("full", "window")), layout=MIXED)
    assert not cache.manager.kinds
    cache.save(SimCache.keys(0))
    await cache.settle()
    (record,) = tier.records.values()
    assert SimCache.payload(record.key) not in record.data
    await cache.aclose()
    with pytest.raises(ConfigError, match=r"codecs.allow_lossy: coarse .*full, window .*\[full\]"):
        await SimCache.open(level(FakeTier(), Coarse("local")), layout=MIXED)


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


def bad_labels(cache: SimCache, key: BlockKey, data: bytes) -> dict[str, tuple[bytes, str]]:
    """Return invalid labels for a block by kind; all but the first have right checks."""
    space = cache.manager.namespace
    labels = Labels(space, len(data), verify=True)
    plain = labels.pack(key, data)

    def forged(at: int, field: bytes) -> bytes:
        body = plain[:at] + field + plain[at + len(field) : -8]
        return body + pack("<Q", xxh3_64_intdigest(body))

    unknown = Coding(len(data), packed_step(60000, b"params"))
    many = Coding(len(data), packed_step(ZstdCodec.id, b"") * 100)
    return {
        "noise": (Random(1).randbytes(len(plain)), "corrupt"),
        "cut": (plain[:100], "corrupt"),
        "nothing": (b"", "corrupt"),
        "another version": (forged(8, b"\xff\xff"), "corrupt"),
        "a huge length": (forged(16, b"\xff" * 8), "corrupt"),
        "no length": (forged(16, bytes(8)), "corrupt"),
        "steps beyond it": (forged(12, b"\xff\xff"), "corrupt"),
        "too many steps": (labels.pack(key, data, coding=many), "corrupt"),
        "another checksum": (forged(112, bytes(16)), "corrupt"),
        "another key": (forged(24, bytes(32)), "foreign"),
        "another namespace": (forged(56, bytes(32)), "foreign"),
        "no checksum": (forged(10, b"\0"), "foreign"),
        "a codec that is not here": (labels.pack(key, data, coding=unknown), "unreadable"),
    }


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("checks", [True, False])
async def test_a_bad_label_is_a_miss_and_is_replaced(*, shared: bool, checks: bool) -> None:
    tier = (SharedFakeTier if shared else FakeTier)(checks=checks)
    cache = await SimCache.open(level(tier, ChecksumCodec()), slots=4)
    keys, others = SimCache.keys(*range(4)), SimCache.keys(*range(10, 14))
    await saved(cache, keys)
    await saved(cache, others)
    kinds = bad_labels(cache, keys[2], SimCache.payload(keys[2]))
    for kind, (label, reason) in kinds.items():
        (where,) = [at for at, record in tier.records.items() if record.key == keys[2]]
        tier.records[where] = tier.records[where]._replace(label=label)
        before = counted(cache)
        assert await cache.load(keys) == ["level1"] * 2, kind
        assert counted(cache) - before == Counter({reason: 1}), kind
        await saved(cache, keys)
        await saved(cache, others)
        assert await cache.load(keys) == ["level1"] * 4, f"{kind}: it was replaced"
        await saved(cache, others)
    await cache.aclose()


@pytest.mark.usefixtures("master")
async def test_without_its_key_an_encrypted_block_is_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = FakeTier(durable=True)
    keys = SimCache.keys(1, 2)
    first = await SimCache.open(level(tier, AesGcmCodec()), slots=2)
    await saved(first, keys)
    await first.aclose()
    monkeypatch.setenv("KVLADDER_KEY", "22" * 32)
    again = FakeTier(store=tier.store, durable=True)
    second = await SimCache.open(level(again, AesGcmCodec()), slots=2)
    assert await second.load(keys) == []
    assert +counted(second) == {"unreadable": 2}
    await saved(second, keys)
    await saved(second, SimCache.keys(3, 4))
    assert await second.load(keys) == ["level1"] * 2
    await second.aclose()


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("forged", [1, 2])
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("encrypted", [True, False])
async def test_wrong_bytes_with_a_valid_label_pass_unless_encrypted(
    *, encrypted: bool, checks: bool, forged: int
) -> None:
    """A program with write access to a medium can make such a label: it needs no secret."""
    tier = FakeTier(checks=checks)
    codec = AesGcmCodec() if encrypted else ChecksumCodec()
    cache = await SimCache.open(level(tier, codec), slots=2)
    keys = SimCache.keys(1, 2)
    await saved(cache, keys)
    await saved(cache, SimCache.keys(3, 4))
    poison = bytes([7]) * LAYOUT.block_bytes
    labels = Labels(cache.manager.namespace, len(poison), verify=True)
    for where, record in [*tier.records.items()]:
        if record.key in keys[:forged]:
            label = labels.pack(record.key, poison)
            tier.records[where] = record._replace(data=poison, label=label)
    fetch = cache.manager.fetch(keys)
    await cache.settle()
    assert fetch.done
    found = [bytes(cache.manager.arena.view(slot)[: len(poison)]) for slot in fetch.slots]
    rest = [SimCache.payload(key) for key in keys[forged:]]
    assert found == ([] if encrypted else [poison] * forged + rest)
    assert +counted(cache) == ({"unreadable": forged} if encrypted else {})
    fetch.release()
    await cache.aclose()


async def saved(cache: SimCache, keys: Sequence[BlockKey]) -> None:
    cache.save(keys)
    await cache.settle()


def counted(cache: SimCache) -> Counter[str]:
    """Return the refused blocks by reason."""
    stats = cache.manager.stats()["level1"]
    return Counter({name: stats[name] for name in ("corrupt", "foreign", "unreadable")})
