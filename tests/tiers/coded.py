"""A tier behind the codecs of a level, for the suite and for tests of the codecs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from kvladder.arena import Arena, Slot
from kvladder.layout import Layout
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.base import ChecksumCodec, Codec
from kvladder.tiers.codecs.pipeline import CodecPipeline, PipelineSettings
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Labels, Read, RecoveredBlock, Ref, Write

SCRATCH = 3


class CodedTier(Tier):
    """A level's view of a tier through its codecs, with the labels of tests."""

    def __init__(self, inner: Tier, codecs: Sequence[Codec], **settings) -> None:
        self.inner = inner
        self.codecs = codecs
        self.settings = settings
        self.batch_max, self.durable = inner.batch_max, inner.durable

    async def open(self, context: TierContext) -> None:
        scratch = [Slot(context.arena.slots + number) for number in range(SCRATCH)]
        settings = PipelineSettings(tuple(self.codecs), **self.settings)
        self.pipeline = CodecPipeline(
            self.inner, settings, scratch, verify=any(c.checks for c in self.codecs)
        )
        self.context = context
        self.pipeline.open(context, context.run_blocking)
        await self.inner.open(context)
        self.batch_max = self.inner.batch_max

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        """Give each loaded block a label of its own: its bytes were checked and decoded."""
        blocks = [self.pipeline.side.read(one.key, one.place, one.slot) for one in reads]
        found = await self.pipeline.get(blocks)
        for read, ok in zip(reads, found, strict=True):
            if ok:
                data = read.view[: self.context.layout.block_bytes]
                label = Labels(self.context.namespace, len(data), verify=True).pack(read.key, data)
                read.came(label, len(data))
        return found

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        return await self.pipeline.put(writes)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        await self.inner.remove(blocks)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        return await self.inner.contains(blocks)

    def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        return self.inner.recover()

    def describe(self) -> dict[str, str]:
        return self.inner.describe()

    async def aclose(self) -> None:
        await self.inner.aclose()


@pytest.mark.product("codecs")
class CodedTests:
    """Runs the suite through codecs; comes before ``TierTests`` among the bases.

    Tests of a tier's labels are left out: there the codecs make them.
    """

    test_keeps_lengths_and_what_codecs_did: Any = None
    test_labels_survive: Any = None

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
