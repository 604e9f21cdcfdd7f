"""A purge of a directory at rest when the power goes, or a call fails, at every single call.

The law: once success was reported nothing of a purged block is on the disk and no index names it,
whatever the disk loses; and a purge that was cut short is made good by the next one.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from itertools import count

import pytest

from kvladder.errors import ConfigError
from kvladder.keys import salt_digest
from kvladder.testing.fixtures import SampleBlock
from kvladder.testing.sim import sim_run
from kvladder.tiers.files.purge import Purged, purge_files
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Ref
from tests.crash.harness import CAPACITY, ROOT, STRANGERS, Machine, data, key, new_disk
from tests.kit.disk import MODES, FakeDisk, Mode

pytestmark = [pytest.mark.crash, pytest.mark.slow]

RED = {0: 0, 1: 3, 2: 5}
"""Blocks of the salt that is purged, by number: their places."""
BLUE = {10: 1, 11: 6}
GONE = (30, 7)
"""A block of that salt that was removed before: only its bytes are left."""


class Salted(Machine):
    """Some of its blocks have a salt."""

    def some(self, blocks: Sequence[tuple[int, int]]) -> list[SampleBlock]:
        red = salt_digest(self.space, "red")
        blue = salt_digest(self.space, "blue")
        return [
            block.of(salt=red if number in {*RED, GONE[0]} else blue)
            for block, (number, _) in zip(super().some(blocks), blocks, strict=True)
        ]


async def live(machine: Machine) -> None:
    tier, _ = await machine.open()
    await machine.put(tier, *RED.items())
    await machine.put(tier, *BLUE.items())
    await machine.put(tier, GONE)
    await machine.remove(tier, GONE)
    await tier.aclose()


def purge(disk: FakeDisk, salt: str | None = "red") -> list[Purged]:
    return purge_files(disk, ROOT, space=None, salt=salt, progress=lambda *_: None)


def filled(seed: int = 0) -> Salted:
    machine = Salted(new_disk(seed=seed))
    sim_run(live(machine))
    assert not machine.errors
    return machine


def bytes_of(machine: Machine, numbers: Sequence[int]) -> list[int]:
    """Return the blocks that have identifying bytes in a segment."""
    home = f"{machine.home}/seg-"
    raw = b"".join(
        machine.disk.content(path)
        for path in map(type(ROOT), machine.disk.files())
        if str(path).startswith(home)
    )
    parts = {number: data(key(number)) for number in numbers}
    windows = (*range(0, 1000, 100), 990)  # there are some in each sector
    return [n for n, part in parts.items() if any(part[i : i + 16] in raw for i in windows)]


async def look(machine: Machine, *, red: bool, blue: bool | None) -> None:
    """Check which blocks a tier finds; ``blue`` is None if the disk may have lost some."""
    tier, recovered = await machine.open()
    keys = {item.key for item in recovered}
    assert red or not keys & {key(number) for number in (*RED, GONE[0])}
    wanted = [(key(number), place) for number, place in RED.items()]
    assert red or not any(await machine.get(tier, wanted))
    others = await machine.get(tier, [(key(number), place) for number, place in BLUE.items()])
    assert blue is None or all(others) == blue
    assert not machine.errors
    machine.check_space()
    await tier.aclose()


def test_a_purge_removes_all_blocks_of_one_salt_and_no_others() -> None:
    machine = filled()
    assert bytes_of(machine, [*RED, GONE[0]]) == [*RED, GONE[0]], "they can be told"
    assert purge(machine.disk) == [Purged(machine.space.hex(), len(RED), len(RED) + 1)]
    assert bytes_of(machine, [*RED, *BLUE, GONE[0]]) == [*BLUE]
    sim_run(look(machine, red=False, blue=True))
    assert purge(machine.disk) == [Purged(machine.space.hex(), 0, 0)]
    assert machine.disk.open_fds == 0
    machine.close()


def test_a_purge_of_all_removes_our_files_and_keeps_foreign_ones() -> None:
    machine = filled()
    stored = len(RED) + len(BLUE)
    assert purge(machine.disk, None) == [Purged(machine.space.hex(), stored, stored + 1)]
    assert set(machine.disk.files()) == {str(path) for path in (*STRANGERS, ROOT / "LOCK")}
    assert purge(machine.disk, None) == []
    sim_run(look(machine, red=False, blue=False))
    machine.close()


@pytest.mark.parametrize("salt", ["red", None])
@pytest.mark.parametrize("mode", MODES)
def test_a_purge_survives_a_power_loss_at_every_call(mode: Mode, salt: str | None) -> None:
    for number in count(1):
        machine = filled(seed=number)
        disk = machine.disk
        if mode == "misdirect":  # a block inside another, whole one is not found
            disk.crash("keep")
        cut = disk.cuts(number, partial(purge, disk, salt))
        disk.crash(mode)
        if cut:
            purge(disk, salt)
            disk.crash(mode)
        assert bytes_of(machine, [*RED, GONE[0]]) == []
        kept = mode == "keep" and salt is not None
        sim_run(look(machine, red=False, blue=True if kept else None))
        machine.close()
        if not cut:
            assert number > 20
            break


async def reuse(machine: Machine) -> None:
    """Store blocks of another salt at places of the purged one, and one block of a third salt."""
    tier, _ = await machine.open()
    await machine.remove(tier, *RED.items())
    await machine.put(tier, (12, 0), (13, 3))
    await machine.remove(tier, (12, 0))
    await machine.put(tier, (14, 5))
    await machine.put(tier, (15, 0), (1, 2))
    await tier.aclose()


async def erase(machine: Machine, *, capacity: int = CAPACITY) -> None:
    """Erase blocks as a running cache does in a purge."""
    red = salt_digest(machine.space, "red")
    tier, recovered = await machine.open(capacity=capacity)
    await tier.remove([Ref(one.key, one.place) for one in recovered if one.facts.salt == red])
    start: int | None = 0
    while start is not None:
        _, start = await tier.erase(red, start)
    await tier.aclose()


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_reuse_of_a_purged_salts_places_survives_a_power_loss(mode: Mode, *, runs: bool) -> None:
    """The header of the new block may be there, followed by bytes of the old one."""
    for number in count(1):
        machine = filled(seed=number)
        disk = machine.disk
        disk.crash("keep")
        cut = disk.cuts(number, partial(sim_run, reuse(machine)))
        disk.crash(mode)
        if runs:
            sim_run(erase(machine))
        else:
            purge(disk)
        assert bytes_of(machine, [*RED, GONE[0]]) == [], number
        sim_run(look(machine, red=False, blue=True if mode == "keep" else None))
        machine.close()
        if not cut:
            assert number > 20
            break


def test_a_running_cache_compares_blocks_with_their_headers_once() -> None:
    machine = filled()
    reads: list[int] = []

    def count_reads(call: str, path: str) -> int:
        if call == "preadv" and "/seg-" in path:
            reads[-1] += 1
        return 0

    async def erase_twice() -> None:
        tier, _ = await machine.open()
        machine.disk.refuse = count_reads
        for _ in range(2):
            reads.append(0)
            start: int | None = 0
            while start is not None:
                _, start = await tier.erase(salt_digest(machine.space, "green"), start)
        await machine.put(tier, (16, 2))
        reads.append(0)
        await tier.erase(salt_digest(machine.space, "green"), 0)
        await tier.aclose()

    sim_run(erase_twice())
    assert reads == [2 * CAPACITY, CAPACITY, CAPACITY], "a page of each, and once what is behind it"
    machine.close()


async def shrink(machine: Machine, capacity: int, *, runs: bool) -> None:
    """Have less room, from a start on, or while the tier runs."""
    tier, _ = await machine.open(capacity=CAPACITY if runs else capacity)
    if runs:
        await tier.resize(capacity)
    await tier.aclose()


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("resizes", [True, False])
@pytest.mark.parametrize("capacity", [7, 6])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "misdirect"])
def test_what_a_smaller_capacity_cut_off_stays_so_after_a_purge(
    mode: Mode, capacity: int, *, resizes: bool, is_lost: bool, runs: bool
) -> None:
    """The bytes that the files gave up before the purge do not come back: a part of a segment, or
    a whole one.
    """
    machine = filled()
    disk = machine.disk
    disk.crash("keep")
    sim_run(shrink(machine, capacity, runs=resizes))
    if is_lost:
        disk.unlink(type(ROOT)(machine.home) / "index.log")
    if runs:
        sim_run(erase(machine, capacity=capacity))
    else:
        purge(disk)
    disk.crash(mode)
    assert bytes_of(machine, [*RED, GONE[0]]) == []
    machine.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("salt", ["red", None])
def test_a_purge_survives_one_failure_of_every_call(code: int, salt: str | None) -> None:
    """An incomplete purge reports an error."""
    for number in count(1):
        machine = filled()
        disk = machine.disk
        disk.fail_at, disk.fail_errno = disk.calls + number, code
        reported = True
        try:
            purge(disk, salt)
        except ConfigError:
            reported = False
        failed = disk.calls >= (disk.fail_at or 0)
        disk.fail_at = None
        assert disk.open_fds == 0
        if not reported:
            purge(disk, salt)
        assert bytes_of(machine, [*RED, GONE[0]]) == []
        sim_run(look(machine, red=False, blue=salt is not None))
        machine.close()
        if not failed:
            assert number > 20
            break


def test_a_purge_refuses_a_directory_in_use() -> None:
    machine = filled()

    async def running() -> None:
        tier: FilesTier
        tier, _ = await machine.open()
        with pytest.raises(ConfigError, match="in use by process .* control socket"):
            purge(machine.disk)
        await tier.aclose()

    sim_run(running())
    sim_run(look(machine, red=True, blue=True))
    machine.close()


def test_a_synced_removal_outlives_a_compaction_that_began_earlier() -> None:
    """A log being rewritten must not bring back blocks that a purge reported as gone."""
    machine = filled()

    async def work() -> None:
        tier, _ = await machine.open()
        log = tier._store.log  # type: ignore[union-attr]

        def stopped() -> bool:
            log.remove([Ref(key(number), place) for number, place in RED.items()])
            log.sync()
            return False

        log.compact(stopped)

    sim_run(work())
    machine.disk.crash("zero")
    sim_run(look(machine, red=False, blue=None))
    machine.close()
