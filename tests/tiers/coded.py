"""A tier behind an edge, as a level has it, for the suite and for tests of the edge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from kvladder.arena import Arena, Slot
from kvladder.layout import Layout
from kvladder.tiers.base import Item, Tier, TierContext
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.base import ChecksumCodec, Codec
from kvladder.tiers.codecs.edge import Edge, EdgeSettings
from kvladder.tiers.codecs.zstd import ZstdCodec

SCRATCH = 3


class CodedTier(Tier):
    """What a level sees of a tier through its edge."""

    def __init__(self, inner: Tier, codecs: Sequence[Codec], **settings) -> None:
        self.inner = inner
        self.codecs = codecs
        self.settings = settings
        self.batch_max, self.durable = inner.batch_max, inner.durable

    async def open(self, context: TierContext) -> None:
        scratch = [Slot(context.arena.slots + number) for number in range(SCRATCH)]
        settings = EdgeSettings(tuple(self.codecs), **self.settings)
        self.edge = Edge(self.inner, settings, scratch)
        self.context = context
        self.edge.open(context, context.run_blocking)
        await self.inner.open(context)
        self.batch_max = self.inner.batch_max

    async def get(self, items: Sequence[Item]) -> Sequence[bool | None]:
        return await self.edge.get(items)

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        return await self.edge.put(items)

    async def remove(self, items: Sequence[Item]) -> None:
        await self.inner.remove(items)

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        return await self.inner.contains(items)

    def recover(self) -> AsyncIterator[Sequence[Item]]:
        return self.inner.recover()

    def corrupt_blocks(self) -> int:
        return self.inner.corrupt_blocks() + self.edge.corrupt

    def describe(self) -> dict[str, str]:
        return self.inner.describe()

    async def aclose(self) -> None:
        await self.inner.aclose()


class CodedTests:
    """Has the suite run behind an edge; comes before ``TierTests`` among the bases."""

    @pytest.fixture(params=["zstd", "checksum", "encrypted"])
    def codecs(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], list[Codec]]:
        chains: dict[str, Callable[[], list[Codec]]] = {
            "checksum": lambda: [ChecksumCodec()],
            "zstd": lambda: [ZstdCodec(), ChecksumCodec()],
            "encrypted": lambda: [ZstdCodec(), AesGcmCodec()],
        }
        monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
        return chains[request.param]

    @pytest.fixture
    def arena(self, layout: Layout, capacity: int) -> Iterator[Arena]:
        arena = Arena.create(capacity + SCRATCH, layout.slot_bytes)
        arena.set_aside(SCRATCH)
        yield arena
        free = arena.free
        arena.close()
        assert free == arena.slots, "somebody still claims a slot"
