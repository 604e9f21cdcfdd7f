"""The files tier when the power goes, or a call fails, while its capacity changes."""

from __future__ import annotations

import errno
from functools import partial
from itertools import count

import pytest

from kvladder.errors import TierError
from kvladder.testing.sim import sim_run
from kvladder.tiers.files.tier import FilesTier
from tests.crash.harness import CAPACITY, Machine, new_disk
from tests.kit.disk import MODES, Mode

pytestmark = [pytest.mark.crash, pytest.mark.slow]


async def resized(machine: Machine, tier: FilesTier, capacity: int) -> bool:
    try:
        await tier.resize(capacity)
    except TierError as error:
        machine._failed("resize", error)
        return False
    return True


async def live(machine: Machine) -> None:
    """Grow over a segment's end, shrink below it, and grow again."""
    tier, _ = await machine.open(capacity=5)
    await machine.put(tier, (0, 0), (1, 1), (4, 4))
    for turn in range(2):
        if await resized(machine, tier, CAPACITY):
            await machine.put(tier, (5 + turn, 5), (50 + turn, 7))
            await machine.remove(tier, (5 + turn, 5), (50 + turn, 7))
        await machine.put(tier, (20 + turn, 2))
        if turn == 0:
            await machine.remove(tier, (4, 4), (4, 3))
            await resized(machine, tier, 3)
        held = [(block, place) for place, block in machine.model.promised.items()]
        assert all(await machine.get(tier, held)) or machine.failed
    await tier.aclose()


@pytest.mark.parametrize("mode", MODES)
def test_a_change_of_capacity_survives_a_power_loss(mode: Mode) -> None:
    # each mode a third of the calls, all modes together each of them twice
    for number in count(1 + MODES.index(mode) % 3, 3):
        disk = new_disk(seed=number)
        machine = Machine(disk)
        cut = disk.cuts(number, partial(sim_run, live(machine)))
        disk.crash(mode)
        sim_run(machine.check(all_kept=mode == "keep"))
        machine.close()
        if not cut:
            assert number > 50
            break


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_change_of_capacity_survives_one_failure_of_any_call(code: int) -> None:
    failed = set[str]()
    for number in count(1 if code == errno.EIO else 2, 2):
        disk = new_disk()
        machine = Machine(disk)
        disk.fail_at = disk.calls + number
        disk.fail_errno = code
        try:
            sim_run(live(machine))
        except TierError:  # it did not open
            assert not machine.model.asked
        is_over = disk.calls < (disk.fail_at or 0)
        failed.update(machine.failed)
        machine.errors.clear()
        machine.failed.clear()
        disk.fail_at = None
        sim_run(machine.check(all_kept=True))
        machine.close()
        if is_over:
            break
    assert "resize" in failed
