"""A start of a tier that is cancelled, or that fails, leaves its medium to the next one."""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from kvladder.errors import TierError, Unavailable
from kvladder.testing.cancel import cancel_at
from kvladder.testing.fixtures import MakeTier, SampleBlocks, TierFixtures
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.store import FileStore
from tests.kit.disk import FakeDisk
from tests.patience import PATIENCE_S
from tests.tiers.filestests import InFolder, OnFakeDisk


class StartTests(TierFixtures):
    """Cancels ``open`` at each suspension, closes the tier, and opens another one."""

    def left(self) -> str:
        """Return what is left of a start that was given up."""
        return ""

    async def starts_at_all(self, make: MakeTier, context: TierContext, late: bool) -> int:
        """Give starts up at each suspension in turn; return how many suspensions there are."""
        for suspension in count(1):
            tier = make()
            reached = False
            with suppress(TierError):
                reached = await cancel_at(tier.open(context), suspension, late=late)
            await tier.aclose()
            assert not self.left(), f"at suspension {suspension}"
            if not reached:
                return suspension
        raise AssertionError

    @pytest.mark.parametrize("late", [False, True])
    async def test_a_cancelled_start_can_be_repeated(
        self, make: MakeTier, context: TierContext, blocks: SampleBlocks, late: bool
    ) -> None:
        assert await self.starts_at_all(make, context, late) > 1
        await self.used(make(), context, blocks)

    async def used(self, tier: Tier, context: TierContext, blocks: SampleBlocks) -> None:
        """Check that a tier on the same medium works."""
        await tier.open(context)
        items = await blocks.put(tier, 0)
        assert await blocks.get(tier, items) == [True]
        await tier.aclose()


class TestFilesInSimulation(OnFakeDisk, StartTests):
    @pytest.fixture(autouse=True)
    def _kept(self, disk: FakeDisk) -> None:
        self.kept = disk

    def left(self) -> str:
        return f"{self.kept.open_fds} descriptors" if self.kept.open_fds else ""

    @pytest.mark.parametrize("late", [False, True])
    async def test_a_failing_start_can_be_cancelled(
        self, make: MakeTier, disk: FakeDisk, context: TierContext, blocks: SampleBlocks, late: bool
    ) -> None:
        """A start that finds its log lost reads all headers; any of its calls may fail."""
        await self.used(make(), context, blocks)
        (log,) = (Path(path) for path in disk.files() if path.endswith("index.log"))
        first, met = 0, True
        while met:
            disk.put(log, b"")
            first, met = first + 1, False

            def refused(name: str, _: str, last: int = disk.calls + first) -> int:
                nonlocal met
                met |= disk.calls >= last
                return errno.EIO if disk.calls >= last else 0

            disk.refuse = refused
            await self.starts_at_all(make, context, late)
            disk.refuse = lambda _name, _path: 0
        assert first > 10
        await self.used(make(), context, blocks)


class TestFiles(InFolder, StartTests):
    async def test_a_tier_that_never_started_leaves_no_threads(
        self, make: MakeTier, context: TierContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The level closes it while it is left out; the threads read headers before that."""
        others = {*threading.enumerate()}  # of earlier tests, whose calls hang
        tier = make()
        await tier.open(context)
        await tier.aclose()
        home = tmp_path / "kv" / context.namespace.hex()[:16]
        (home / "index.log").write_bytes(b"")
        monkeypatch.setattr(FileStore, "restore", _fails)
        tier = make()
        with pytest.raises(Unavailable):
            await tier.open(context)
        await tier.aclose()
        mine = [one for one in {*threading.enumerate()} - others if one.name == "kvladder-files"]
        for one in mine:
            one.join(PATIENCE_S)
        assert not [one for one in mine if one.is_alive()]


def _fails(*_: object) -> None:
    raise OSError(errno.EIO, "scripted")
