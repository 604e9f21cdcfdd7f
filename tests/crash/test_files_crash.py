"""The files tier when the power goes, or a call fails, at every single call to the disk.

The law: whatever happened, ``get`` gives the right bytes or a miss, ``recover`` lists each place
and key at most once, nothing written aside is left over, and the capacity is honoured again.
"""

from __future__ import annotations

import errno
from functools import partial
from itertools import count
from typing import Any

import pytest

from kvladder.errors import TierFull
from kvladder.testing.sim import sim_run
from kvladder.tiers.codecs.aesgcm import AesGcmCodec
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.files import segments
from kvladder.tiers.files.tier import FilesTier
from tests.crash.harness import Machine, WrongBytes, new_disk
from tests.kit.disk import MODES, FakeDisk, Mode, PowerCut
from tests.tiers.coded import CodedTier

pytestmark = [pytest.mark.crash, pytest.mark.slow]


async def live(machine: Machine, *, verify: bool = True, tries: int = 1) -> None:
    """One process: open, work, close."""
    tier, _ = await machine.open(verify=verify, tries=tries)
    await machine.work(tier)
    await tier.aclose()


@pytest.fixture(scope="module")
def used() -> FakeDisk:
    """A disk on which another namespace was first, and is in the way now; to be copied."""
    disk = new_disk()
    machine = Machine(disk, salt="another")
    sim_run(live(machine))
    machine.close()
    return disk


class CodedMachine(Machine):
    """A machine with compressed and encrypted blocks, which leave the end of their slots empty."""

    def wrap(self, tier: FilesTier) -> Any:
        return CodedTier(tier, [ZstdCodec(), AesGcmCodec()])


@pytest.fixture(params=[Machine, CodedMachine])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    monkeypatch.setattr(segments, "SKIP_BYTES", 4096)
    chosen: type[Machine] = request.param
    return chosen


@pytest.mark.parametrize("mode", MODES)
def test_files_survive_a_power_loss_at_every_call(
    mode: Mode, kind: type[Machine], used: FakeDisk
) -> None:
    for number in count(1):
        disk = used.copied(seed=number)
        machine = kind(disk)
        cut = disk.cuts(number, partial(sim_run, live(machine)))
        disk.crash(mode)
        sim_run(machine.check(all_kept=mode == "keep"))
        machine.close()
        if not cut:
            assert number > 100
            break


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_files_survive_one_failure_of_every_call(
    code: int, kind: type[Machine], used: FakeDisk
) -> None:
    for number in count(1):
        disk = used.copied(seed=0)
        machine = kind(disk)
        disk.fail_at = disk.calls + number
        disk.fail_errno = code
        sim_run(live(machine, tries=2))  # no call's failure is a wrong setting
        if code == errno.ENOSPC:
            found = zip(machine.failed, machine.errors, strict=True)
            for call, error in found:  # all other calls without room have failed
                assert isinstance(error, TierFull) == (call == "put"), (call, error)
                assert error.temporary
        machine.errors.clear()
        machine.failed.clear()
        failed = disk.calls >= (disk.fail_at or 0)
        disk.fail_at = None
        sim_run(machine.check(all_kept=True))
        machine.close()
        if not failed:
            assert number > 100
            break


def test_without_checks_a_torn_write_is_served() -> None:
    """The negative control: the disk does tear blocks, and it is the checksum that finds out."""

    async def look(machine: Machine) -> bool:
        tier, _ = await machine.open(verify=False)
        wrong = False
        for wanted in sorted(machine.model.asked):
            try:
                await machine.get(tier, [wanted])
            except WrongBytes:
                wrong = True
        await tier.aclose()
        return wrong

    for number in count(1):
        disk = new_disk(seed=number)
        machine = Machine(disk)
        disk.crash_at = disk.calls + number
        with pytest.raises(PowerCut):
            sim_run(live(machine, verify=False))
        disk.crash("tear")
        wrong = sim_run(look(machine))
        machine.close()
        if wrong:
            break
