"""What tests of the files tier share: where a tier has its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvladder.testing.fixtures import MakeTier
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from tests.kit.disk import FakeDisk, InlinePool


class InFolder:
    """Tiers over a folder of the test."""

    real = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeTier:
        return lambda: FilesTier(FilesOptions(path=str(tmp_path / "kv"), threads=2))


class OnFakeDisk:
    """Tiers over a simulated disk, without threads."""

    @pytest.fixture
    def disk(self) -> FakeDisk:
        return FakeDisk(Path("/disk"))

    @pytest.fixture
    def make(self, disk: FakeDisk) -> MakeTier:
        options = FilesOptions(path="/disk/kv")
        return lambda: FilesTier(options, disk=disk, pool=InlinePool())
