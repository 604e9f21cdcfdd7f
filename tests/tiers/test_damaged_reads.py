"""Blocks on a medium that is damaged at random: each is a miss, and never a wrong byte.

The profile sets the number: 2,250 reads in CI, 75,000 at night.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvladder.testing.fixtures import SampleBlock, SampleBlocks, TierFixtures
from kvladder.testing.redisserver import RedisServer
from kvladder.tiers.base import Tier
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.tiers.coded import CodedTests, CodedTier
from tests.tiers.redistests import PATIENT

pytestmark = pytest.mark.slow
COUNT = 125
BLOCK = 12_000
ROUNDS = max(1, settings().max_examples // 100)
PAGE = 4096
Damage = Callable[[random.Random], object]


class Mixed(SampleBlocks):
    """Every other block can be compressed."""

    def data(self, block: SampleBlock) -> bytes:
        data = super().data(block)
        return data if block.place % 2 else data[:50] * (len(data) // 50)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def damage_files(folder: Path, chance: random.Random) -> None:
    """Flip bits, blank ranges, or write parts of blocks over others."""
    for path in folder.rglob("seg-*"):
        data = bytearray(path.read_bytes())
        for _ in range(12):
            at, kind = chance.randrange(len(data)), chance.random()
            if kind < 0.6:
                data[at] ^= 1 << chance.randrange(8)
            elif kind < 0.8:
                end = min(len(data), at + chance.randrange(1, 5000))
                data[at:end] = bytes(end - at)
            else:
                length = chance.choice([PAGE, 4 * PAGE])
                source, target = (chance.randrange(0, len(data) - length, PAGE) for _ in "ab")
                data[target : target + length] = data[source : source + length]
        with path.open("r+b") as file:
            file.write(data)


def damage_redis(client: Any, chance: random.Random) -> None:
    """Change bytes, store other values, or copy blocks over others."""
    names = sorted(client.keys("kvladder:*"))
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            kind = chance.random()
            if kind < 0.5:
                pipe.setrange(name, chance.randrange(9000), chance.randbytes(1))
            elif kind < 0.6:
                pipe.set(name, chance.randbytes(chance.randrange(BLOCK + 1000)))
            elif kind < 0.7 and (other := chance.choice(names)) != name:
                pipe.copy(other, name, replace=True)
        pipe.execute()


class TestDamage(CodedTests, TierFixtures):
    real = True

    @pytest.fixture
    def block_bytes(self) -> int:
        return BLOCK

    @pytest.fixture
    def capacity(self) -> int:
        return COUNT

    @pytest.fixture
    def blocks(self, arena: Any, layout: Any, namespace: Any, capacity: int) -> Any:
        blocks = Mixed(arena, layout, capacity, namespace)
        yield blocks
        blocks.close()

    @pytest.fixture(params=["files", "redis"])
    def medium(
        self, request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer
    ) -> Iterator[tuple[Callable[[], Tier], Damage]]:
        """Return a function that makes the tier, and one that damages its medium."""
        if request.param == "files":
            options = FilesOptions(path=str(tmp_path))
            yield lambda: FilesTier(options), lambda chance: damage_files(tmp_path, chance)
            return
        server.run("FLUSHALL")
        there = RedisOptions(url=server.url, connect_timeout=PATIENT)
        with server.client() as client:
            yield lambda: RedisTier(there), lambda chance: damage_redis(client, chance)

    @pytest.fixture
    def make(self, medium: Any, codecs: Any) -> Callable[[], Tier]:
        return lambda: CodedTier(medium[0](), codecs())

    async def test_a_damaged_block_is_a_miss_and_never_wrong(
        self, tier: CodedTier, blocks: Mixed, medium: Any
    ) -> None:
        """``SampleBlocks.get`` compares all loaded bytes."""
        chance, found = random.Random(1), [0, 0]
        stored = blocks.some(*range(COUNT))
        for _ in range(ROUNDS):
            await blocks.store(tier, [block._replace(replace=True) for block in stored])
            medium[1](chance)
            for ok in await blocks.get(tier, stored):
                found[bool(ok)] += 1
        refused = sum(tier.pipeline.refused.values())
        assert sum(found) == ROUNDS * COUNT
        assert min(found) > ROUNDS
        assert refused == found[False]
