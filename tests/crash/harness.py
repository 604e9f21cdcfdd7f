"""A files tier on a fake disk, and the invariants that hold after any crash."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvladder.arena import Arena
from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.testing.fixtures import SampleBlock
from kvladder.testing.sim import SimClock, inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.fields import told
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Labels, Outcome, RecoveredBlock, Ref, SlotAccess, Write
from kvladder.units import Size
from tests.kit.disk import FakeDisk, InlinePool
from tests.tiers.coded import SCRATCH

LAYOUT = Layout(block_tokens=16, block_bytes=5000)
STRIDE = 4096 + LAYOUT.slot_bytes
CAPACITY = 8
ROOT = Path("/disk/kv")
STRANGERS = {
    ROOT / "notes.txt": b"not ours",
    ROOT / "0123456789abcdef" / "seg-00000": b"in a directory that is not ours",
}


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"crash %d" % number).digest())


def data(block: BlockKey) -> bytes:
    """Return compressible bytes in which no two sectors are alike."""
    return Random(block).randbytes(LAYOUT.block_bytes // 5) * 5


class WrongBytes(AssertionError):
    """The tier lied."""


@dataclass
class Model:
    """The blocks that the tier reported as stored, and all that it was ever asked to store."""

    promised: dict[int, BlockKey] = field(default_factory=dict[int, BlockKey])
    """Blocks by place that must be found as long as the disk keeps its bytes."""
    asked: set[tuple[BlockKey, int]] = field(default_factory=set[tuple[BlockKey, int]])


class Machine:
    """Opens tiers on one fake disk, one after the other, and asks them for blocks."""

    def __init__(self, disk: FakeDisk, *, salt: str = "crash") -> None:
        self.disk = disk
        self.model = Model()
        self.errors: list[TierError] = []
        self.told: list[str] = []
        """Messages of tiers."""
        self.failed: list[str] = []
        """The calls that ended with ``errors``."""
        self.space = LAYOUT.namespace(salt=salt)
        self.fields: Mapping[str, str] = told(LAYOUT.all_fields, salt=salt)
        self.home = ROOT / self.space.hex()[:16]
        self.labels = Labels(self.space, LAYOUT.block_bytes, verify=True)
        """Labels of the level that the tier was opened for."""
        self.refused = Counter[Outcome | None]()
        """The verdicts of reads without a block."""
        self._arena = Arena.create(CAPACITY + SCRATCH, LAYOUT.slot_bytes)
        self._arena.set_aside(SCRATCH)
        slots = self._arena.lease(CAPACITY)
        assert slots is not None
        self._slots = slots

    def wrap(self, tier: FilesTier) -> Any:
        """Wrap the tier."""
        return tier

    async def open(
        self,
        *,
        verify: bool = True,
        capacity: int = CAPACITY,
        direct: bool | None = None,
        engines: int = 1,
        segment: int = 3 * STRIDE,
        segments_min: int = 2,
        tries: int = 1,
    ) -> tuple[FilesTier, list[RecoveredBlock]]:
        """Open a tier with segments of three blocks; return it and its recovered blocks.

        After a failure it opens the tier again, as a level does, ``tries`` times in all.
        """
        tier = self.wrap(
            FilesTier(
                FilesOptions(path=str(ROOT), segment=Size(segment), direct=direct, engines=engines),
                disk=self.disk,
                pool=InlinePool(),
                log_slack_records=4,
                segments_min=segments_min,
            )
        )
        self.labels = Labels(self.space, LAYOUT.block_bytes, verify=verify)
        clock = SimClock(asyncio.get_running_loop())
        context = TierContext(
            self._arena,
            LAYOUT,
            self.space,
            capacity,
            clock,
            inline_blocking,
            say=self.told.append,
            fields=self.fields,
        )
        open_fds = self.disk.open_fds
        for left in reversed(range(tries)):
            try:
                await tier.open(context)
                break
            except TierError as error:
                assert self.disk.open_fds == open_fds
                if not left:
                    raise
                self._failed("open", error)
        return tier, [kept async for batch in tier.recover() for kept in batch]

    async def open_again(
        self, tier: FilesTier, *, verify: bool = True, capacity: int = CAPACITY
    ) -> tuple[FilesTier, list[RecoveredBlock]]:
        """Close a tier and open another one on its files."""
        await tier.aclose()
        return await self.open(verify=verify, capacity=capacity)

    def some(self, blocks: Sequence[tuple[int, int]]) -> list[SampleBlock]:
        """``(number, place)`` pairs as blocks with a slot each."""
        return [SampleBlock(key(number), place, self._slots[place]) for number, place in blocks]

    def writes(self, blocks: Sequence[SampleBlock]) -> list[Write]:
        """Return writes as a level makes them, with their bytes in their slots."""
        for block in blocks:
            self._arena.view(block.slot)[: LAYOUT.block_bytes] = data(block.key)
        return [
            Write(self.labels, *block.ref, block.slot, self._arena.view(block.slot), block.facts)
            for block in blocks
        ]

    async def put(self, tier: FilesTier, *blocks: tuple[int, int]) -> None:
        writes = self.writes(self.some(blocks))
        for write in writes:
            self.model.promised.pop(write.place, None)
            self.model.asked.add((write.key, write.place))
        try:
            kept = await tier.put(writes)
        except TierError as error:
            self._failed("put", error)
            return
        for write, ok in zip(writes, kept, strict=True):
            if ok:
                self.model.promised[write.place] = write.key

    async def remove(self, tier: FilesTier, *blocks: tuple[int, int]) -> None:
        for _, place in blocks:
            self.model.promised.pop(place, None)
        try:
            await tier.remove([Ref(key(number), place) for number, place in blocks])
        except TierError as error:
            self._failed("remove", error)

    def _failed(self, call: str, error: TierError) -> None:
        self.failed.append(call)
        self.errors.append(error)

    async def get(self, tier: FilesTier, wanted: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """Return which of these the tier has, and assert that the bytes are right."""
        found: list[bool] = []
        for block, place in wanted:
            view = self._arena.view(self._slots[0])
            view[:] = b"\xa5" * LAYOUT.slot_bytes
            read = SlotAccess(self.labels, self._arena.view).read(block, place, self._slots[0])
            try:
                (ok,) = await tier.get([read])
            except TierError as error:
                self._failed("get", error)
                ok = False
            if ok and read.check():
                if bytes(view[: LAYOUT.block_bytes]) != data(block):
                    raise WrongBytes(f"wrong bytes for place {place}")
            else:
                self.refused[read.verdict[0]] += 1
            found.append(bool(ok) and read.check())
        return found

    async def work(self, tier: FilesTier) -> None:
        """A life: three segments, reused places, and a log that is compacted."""
        await self.put(tier, (0, 0), (1, 1))
        await self.put(tier, (2, 2), (3, 3), (4, 5))
        await self.remove(tier, (1, 1))
        await self.put(tier, (5, 1), (6, 6))
        await self.get(tier, sorted(self.model.asked))
        for turn in range(6):
            await self.remove(tier, (6 + turn, 6), (2, 2))
            await self.put(tier, (2, 2), (7 + turn, 6))
        await self.put(tier, (20, 4), (21, 7))
        await self.remove(tier, (0, 0))
        await self.get(tier, sorted(self.model.asked))

    async def check(self, *, all_kept: bool) -> None:
        """Open once more and assert the laws; ``all_kept`` if the disk lost nothing."""
        tier, recovered = await self.open()
        places = {item.place for item in recovered}
        keys = {item.key for item in recovered}
        assert len(places) == len(keys) == len(recovered)
        assert all(0 <= place < CAPACITY for place in places)
        assert {(item.key, item.place) for item in recovered} <= self.model.asked
        await self.get(tier, sorted(self.model.asked))
        if all_kept:
            promised = [(block, place) for place, block in self.model.promised.items()]
            assert set(promised) <= {(item.key, item.place) for item in recovered}
            assert all(await self.get(tier, promised))
        self.check_space()
        assert not [text for text in self.told if "FIELDS is damaged" in text]
        self.model = Model()
        everywhere = [(100 + place, place) for place in range(CAPACITY)]
        for block in everywhere:
            await self.put(tier, block)
        assert not self.errors
        assert all(await self.get(tier, [(key(number), place) for number, place in everywhere]))
        self.check_space()
        await tier.aclose()
        assert self.disk.open_fds == 0

    def check_space(self) -> None:
        """Nothing written aside is left, the capacity is kept, and strangers are untouched."""
        files = self.disk.files()
        assert not [path for path in files if path.startswith(f"{self.home}/") and ".tmp" in path]
        segments = [
            size for path, size in files.items() if "/seg-" in path and Path(path) not in STRANGERS
        ]
        assert sum(segments) <= CAPACITY * STRIDE
        for path, content in STRANGERS.items():
            assert self.disk.content(path) == content

    def close(self) -> None:
        self._arena.release(self._slots)
        self._arena.close()


def new_disk(seed: int = 0) -> FakeDisk:
    """Return a disk with foreign files, and another namespace that takes half of the room."""
    disk = FakeDisk(Path("/disk"), ROOT, ROOT / "0123456789abcdef", seed=seed)
    for path, content in STRANGERS.items():
        disk.put(path, content)
    return disk
