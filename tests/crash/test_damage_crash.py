"""META and the index log with any damaged byte, or lost; and two processes.

The law: every block is found again, except one with a damaged record of its own. Only stored bytes
are served. All processes together keep the capacity, whenever one of them ends.
"""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest

from kvladder.testing.sim import sim_run
from kvladder.tiers.files.log import RECORD_BYTES
from tests.crash.harness import CAPACITY, STRIDE, Machine, key, new_disk
from tests.kit.disk import MODES, Mode, PowerCut

pytestmark = [pytest.mark.crash, pytest.mark.slow]


async def live(machine: Machine) -> None:
    tier, _ = await machine.open()
    await machine.work(tier)
    await tier.aclose()


def lived(seed: int = 0) -> Machine:
    machine = Machine(new_disk(seed=seed))
    sim_run(live(machine))
    assert not machine.errors
    return machine


async def missed(machine: Machine) -> int:
    """Return how many of the promised blocks are not found."""
    tier, recovered = await machine.open()
    found = {(item.key, item.place) for item in recovered}
    assert found <= machine.model.asked
    wanted = [(block, place) for place, block in machine.model.promised.items()]
    got = await machine.get(tier, wanted)
    assert {one for one, ok in zip(wanted, got, strict=True) if ok} == {*wanted} & found
    await tier.aclose()
    return got.count(False)


@pytest.mark.parametrize("name", ["META", "index.log"])
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_any_damaged_byte_costs_one_block_at_most(name: str, mask: int) -> None:
    machine = lived()
    disk, path = machine.disk, machine.home / name
    content = disk.content(path)
    step = 1 if name == "META" else 7  # all bytes of a record, each in another copy
    for byte in range(0, len(content.rstrip(b"\0")), step):
        disk.put(path, content)
        disk.flip(path, byte, mask)
        at_most = 1 if name == "index.log" and byte >= RECORD_BYTES else 0
        assert sim_run(missed(machine)) <= at_most, byte
    disk.put(path, content)
    sim_run(machine.check(all_kept=True))
    machine.close()


@pytest.mark.parametrize("lost", [("META",), ("index.log",), ("META", "index.log")])
@pytest.mark.parametrize("left", [None, b"", b"\0" * 4096])
def test_lost_files_are_rebuilt_from_block_headers(
    lost: tuple[str, ...], left: bytes | None
) -> None:
    machine = lived()
    for name in lost:
        path = machine.home / name
        if left is None:
            machine.disk.unlink(path)
        else:
            machine.disk.put(path, left)
    sim_run(machine.check(all_kept=True))
    found = f"{CAPACITY} blocks were found by their headers"
    assert [found in text for text in machine.told] == ([True] if "index.log" in lost else [])
    machine.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_rewrite_of_a_lost_log_survives_a_power_loss(mode: Mode) -> None:
    for number in count(1):
        machine = lived(seed=number)
        disk = machine.disk
        disk.crash("keep")
        disk.unlink(machine.home / "index.log")
        disk.crash("keep")
        disk.crash_at = disk.calls + number
        try:
            sim_run(missed(machine))
        except PowerCut:
            disk.crash(mode)
            assert sim_run(missed(machine)) == 0 or mode not in {"keep", "drop"}
            machine.close()
            continue
        machine.close()
        assert number > 20
        break


@pytest.mark.parametrize("mode", ["keep", "drop", "tear"])
def test_the_death_of_one_process_at_any_call_leaves_the_other_working(mode: Mode) -> None:
    """Its directory is free after its death: the other process continues, a third takes it."""

    async def both(one: Machine, other: Machine) -> None:
        first, _ = await one.open(engines=2, capacity=CAPACITY // 2)
        await one.put(first, *((n, n) for n in range(CAPACITY // 2)))
        second, _ = await other.open(engines=2, capacity=CAPACITY // 2)
        await other.put(second, *((10 + n, n) for n in range(CAPACITY // 2)))
        one.check_space()
        await other.remove(second, (10, 0))
        await second.aclose()
        third, recovered = await other.open(engines=2, capacity=CAPACITY // 2)
        assert {item.key for item in recovered} == {key(11), key(12), key(13)}
        await third.aclose()
        await first.aclose()

    async def again(one: Machine, other: Machine) -> None:
        first, recovered = await one.open(engines=2, capacity=CAPACITY // 2)
        second, others = await other.open(engines=2, capacity=CAPACITY // 2)
        keys = [item.key for item in (*recovered, *others)]
        assert len(set(keys)) == len(keys), "no block is in both"
        for machine, tier, items in ((one, first, recovered), (other, second, others)):
            found = await machine.get(tier, [(item.key, item.place) for item in items])
            assert all(found) or mode != "keep"
            await machine.put(tier, *((20 + n, n) for n in range(CAPACITY // 2)))
            assert not machine.errors
        one.check_space()
        await first.aclose()
        await second.aclose()
        assert one.disk.open_fds == 0

    for number in count(1):
        disk = new_disk(seed=number)
        machines = Machine(disk), Machine(disk)
        cut = disk.cuts(number, partial(sim_run, both(*machines)))
        disk.crash(mode)
        for machine in machines:
            machine.errors.clear()
        sim_run(again(*machines))
        assert sum(disk.files().values()) > CAPACITY * STRIDE
        for machine in machines:
            machine.close()
        if not cut:
            assert number > 50
            break
