"""The files tier: the suite on real files and on the fake disk, and tests of its own."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvladder.arena import NO_SLOT
from kvladder.errors import TierError
from kvladder.testing.fixtures import MakeTier, SampleBlocks
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.files import tier as files
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import LABEL_BYTES, Labels, Ref, Write, told
from kvladder.units import Size
from tests.kit.disk import FakeDisk
from tests.patience import PATIENCE_S
from tests.tiers.filestests import InFolder, OnFakeDisk

HEADER = 4096


class FilesTests(TierTests):
    """Gives the suite access to the files of a tier."""

    survives = True
    ends = False

    @pytest.fixture
    def capacity(self) -> int:
        return 16

    def where(self, tier: Tier, ref: Ref) -> tuple[Path, int]:
        """Return the file and the offset of a block's header, computed independently."""
        assert isinstance(tier, FilesTier)
        context = tier.context
        stride = HEADER + context.layout.slot_bytes
        places = max(1, min(tier.options.segment // stride, context.capacity_blocks // 16))
        home = Path(tier.options.path) / context.namespace.hex()[:16]
        return home / f"seg-{ref.place // places:05d}", ref.place % places * stride

    def read(self, path: Path, offset: int, size: int) -> bytes:
        return path.read_bytes()[offset : offset + size]

    def flip(self, path: Path, offset: int) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        assert isinstance(tier, FilesTier)
        layout, disk = tier.context.layout, tier._disk
        labels = Labels(tier.context.namespace, layout.block_bytes, verify=True)
        view = memoryview(mmap.mmap(-1, layout.slot_bytes))
        assert list(await tier.put([Write(labels, *ref, NO_SLOT, view)])) == [True]
        path, offset = self.where(tier, ref)
        lies = label.ljust(HEADER, b"\0") + data[: len(view)].ljust(len(view), b"\0")
        fd = disk.open(path, os.O_RDWR)
        assert disk.pwritev(fd, [lies], offset) == len(lies)
        disk.close(fd)

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        path, offset = self.where(tier, ref)
        label = told(self.read(path, offset, LABEL_BYTES))
        if label is None or label.key != ref.key:
            return None
        return self.read(path, offset + HEADER, label.length)

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        path, offset = self.where(tier, ref)
        self.flip(path, offset + HEADER)


class StuckDisk(Disk):
    """A disk with reads that hang until they are released."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.reading = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reading.set()
        assert self.go.wait(PATIENCE_S)
        return super().preadv(fd, buffers, offset)


class TestFiles(InFolder, FilesTests):
    async def test_only_the_owner_may_read_the_files(
        self, tier: Tier, blocks: SampleBlocks, tmp_path: Path
    ) -> None:
        await blocks.put(tier, 0)
        found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in found}
        home = tier.context.namespace.hex()[:16]
        assert modes == {
            "kv": "0o700",
            home: "0o700",
            "LOCK": "0o600",
            "META": "0o600",
            "index.log": "0o600",
            "seg-00000": "0o600",
        }

    async def test_each_owner_has_a_directory_of_its_own(
        self, tier: Tier, make: MakeTier, context: TierContext
    ) -> None:
        home = context.namespace.hex()[:16]
        other = make()
        await other.open(context)
        assert [one.describe()["directory"] for one in (tier, other)] == [home, f"{home}.1"]
        await tier.aclose()
        third = make()
        await third.open(context)
        assert third.describe()["directory"] == home
        await third.aclose()
        await other.aclose()

    async def test_a_removed_directory_fails_writes_and_keeps_open_files_usable(
        self, blocks: SampleBlocks, context: TierContext, tmp_path: Path
    ) -> None:
        stride = HEADER + context.layout.slot_bytes
        options = FilesOptions(path=str(tmp_path / "kv"), segment=Size(4 * stride))
        tier = FilesTier(options, log_slack_records=1)
        await tier.open(context)
        items = await blocks.put(tier, *range(4))
        shutil.rmtree(tmp_path / "kv")
        with pytest.raises(TierError) as caught:
            await tier.put(blocks.writes(blocks.some(4)))
        assert not caught.value.temporary
        for _ in range(20):  # open files stay usable, the log is compacted in place
            await blocks.remove(tier, items[:1])
            await blocks.put(tier, 0)
        assert await blocks.get(tier, items) == [True] * 4
        await tier.aclose()
        tier = FilesTier(options)
        await tier.open(context)
        assert await blocks.get(tier, items) == [False] * 4
        assert [batch async for batch in tier.recover()] == []
        await tier.aclose()

    async def test_a_hanging_disk_does_not_stop_a_close(
        self,
        blocks: SampleBlocks,
        context: TierContext,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(files, "CLOSE_TIMEOUT_S", 0.01)
        disk = StuckDisk()
        tier = FilesTier(FilesOptions(path=str(tmp_path / "kv"), threads=1), disk=disk)
        await tier.open(context)
        items = await blocks.put(tier, 0)
        disk.go.clear()
        disk.reading.clear()
        reading = asyncio.create_task(blocks.get(tier, items))
        assert await asyncio.to_thread(disk.reading.wait, PATIENCE_S)
        await tier.aclose()
        other = FilesTier(tier.options)
        await other.open(context)  # the call may still touch the files: the lock is kept
        assert other.describe()["directory"].endswith(".1")
        await other.aclose()
        disk.go.set()
        assert await reading == [True]
        for thread in threading.enumerate():  # its thread closes the files afterwards
            if thread.name.startswith("kvladder-files"):
                thread.join(PATIENCE_S)
        other = FilesTier(tier.options)
        await other.open(context)
        assert await blocks.get(other, items) == [True]
        await other.aclose()

    async def test_a_cancelled_open_is_undone_by_aclose(
        self, make: MakeTier, context: TierContext
    ) -> None:
        tier = make()
        opening = asyncio.create_task(tier.open(context))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await tier.aclose()
        tier = make()
        await tier.open(context)
        await tier.aclose()

    async def test_the_log_is_compacted_while_blocks_come_and_go(
        self, blocks: SampleBlocks, context: TierContext, tmp_path: Path
    ) -> None:
        options = FilesOptions(path=str(tmp_path / "kv"), threads=2)
        tier = FilesTier(options, log_slack_records=16)
        await tier.open(context)
        await blocks.put(tier, *range(8))
        for turn in range(60):
            await blocks.remove(tier, blocks.some(turn % 8))
            await blocks.put(tier, turn % 8)
        for turn in range(160):  # more than arrived during the last compaction
            if tier._compacting is not None:
                await asyncio.wait({tier._compacting})
            await blocks.put(tier, turn % 8)
        assert await blocks.get(tier, blocks.some(*range(8))) == [True] * 8
        await tier.aclose()
        log = next((tmp_path / "kv").rglob("index.log"))
        used = log.read_bytes().rstrip(b"\0")
        assert len(used) < 64 * (1 + 2 * 8 + 16 + 8)
        tier = FilesTier(options)
        await tier.open(context)
        recovered = [kept.place async for batch in tier.recover() for kept in batch]
        assert sorted(recovered) == list(range(8))
        await tier.aclose()


class TestManyThreads(FilesTests):
    """More threads than blocks, and segments of one block."""

    real = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        return lambda: FilesTier(
            FilesOptions(path=str(tmp_path / "kv"), threads=32, segment=Size(1))
        )


class TestBuffered(FilesTests):
    real = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        options = FilesOptions(path=str(tmp_path / "kv"), threads=2, direct=False)
        return lambda: FilesTier(options)


class TestFake(OnFakeDisk, FilesTests):
    @pytest.fixture(autouse=True)
    def _disk(self, disk: FakeDisk) -> None:
        self.disk_of_test = disk

    def read(self, path: Path, offset: int, size: int) -> bytes:
        return self.disk_of_test.content(path)[offset : offset + size]

    def flip(self, path: Path, offset: int) -> None:
        self.disk_of_test.flip(path, offset, 0x10)


def test_options_outside_their_limits_are_refused() -> None:
    def options(**values: object) -> FilesOptions:
        return msgspec.convert({"path": "/kv", **values}, FilesOptions, dec_hook=lambda t, v: t(v))

    assert options() == FilesOptions(path="/kv")
    assert options(threads=1, direct=True).threads == 1
    for wrong in ({"threads": 0}, {"threads": 65}, {"direct": 1}, {"thread": 2}, {"path": ""}):
        with pytest.raises(msgspec.ValidationError):
            options(**wrong)
