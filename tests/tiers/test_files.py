"""The files tier: the suite on real files and on the fake disk, and what is special to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvladder.testing.disk import FakeDisk, InlinePool
from kvladder.testing.fixtures import MakeTier
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Item, Tier
from kvladder.tiers.files import FilesOptions, FilesTier

HEADER = 4096


class FilesTests(TierTests):
    """What the suite needs to look behind the back of a files tier."""

    survives = True

    @pytest.fixture
    def capacity(self) -> int:
        return 16

    def where(self, tier: Tier, item: Item) -> tuple[Path, int]:
        """The file and the offset of a block's header, worked out anew."""
        assert isinstance(tier, FilesTier)
        context = tier.context
        stride = HEADER + context.layout.slot_bytes
        places = max(1, tier.options.segment // stride)
        home = Path(tier.options.path) / context.namespace.hex()[:16]
        return home / f"seg-{item.place // places:05d}", item.place % places * stride

    def read(self, path: Path, offset: int, size: int) -> bytes:
        return path.read_bytes()[offset : offset + size]

    def flip(self, path: Path, offset: int) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    async def raw_get(self, tier: Tier, item: Item) -> bytes | None:
        path, offset = self.where(tier, item)
        size = tier.context.layout.block_bytes
        data = self.read(path, offset, HEADER + size)
        return data[HEADER:] if item.key in data[:HEADER] else None

    async def raw_corrupt(self, tier: Tier, item: Item) -> None:
        path, offset = self.where(tier, item)
        self.flip(path, offset + HEADER)


class TestFiles(FilesTests):
    real = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        return lambda: FilesTier(FilesOptions(path=str(tmp_path / "kv"), threads=2))


class TestBuffered(FilesTests):
    real = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        options = FilesOptions(path=str(tmp_path / "kv"), threads=2, direct=False)
        return lambda: FilesTier(options)


class TestFake(FilesTests):
    @pytest.fixture
    def disk(self) -> FakeDisk:
        return FakeDisk(Path("/disk"))

    @pytest.fixture
    def make(self, disk: FakeDisk) -> MakeTier:
        options = FilesOptions(path="/disk/kv")
        return lambda: FilesTier(options, disk=disk, pool=InlinePool())

    @pytest.fixture(autouse=True)
    def _disk(self, disk: FakeDisk) -> None:
        self.disk_of_test = disk

    def read(self, path: Path, offset: int, size: int) -> bytes:
        return self.disk_of_test.content(path)[offset : offset + size]

    def flip(self, path: Path, offset: int) -> None:
        self.disk_of_test.flip(path, offset, 0x10)
