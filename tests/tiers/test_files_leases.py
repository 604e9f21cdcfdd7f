"""Several processes on one path: a directory for each, and one capacity for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvladder.errors import ConfigError, Unavailable
from kvladder.tiers.files.directory import FilesDirectory, held_by, leases
from kvladder.tiers.files.purge import purge_files
from kvladder.tiers.files.rest import look
from kvladder.tiers.files.tier import FilesTier
from tests.crash.harness import CAPACITY, ROOT, STRANGERS, STRIDE, Machine, key, new_disk
from tests.kit.disk import FakeDisk


@pytest.fixture
def disk() -> FakeDisk:
    return new_disk()


@pytest.fixture
def two(disk: FakeDisk) -> Iterator[tuple[Machine, Machine]]:
    """Two processes with one configuration."""
    machines = Machine(disk), Machine(disk)
    yield machines
    for machine in machines:
        machine.close()


Two = tuple[Machine, Machine]


def segment_bytes(disk: FakeDisk) -> int:
    return sum(
        size
        for path, size in disk.files().items()
        if "/seg-" in path and Path(path) not in STRANGERS
    )


def directory(tier: FilesTier) -> str:
    return tier.describe()["directory"]


async def test_each_process_takes_a_free_directory_and_one_with_blocks_first(
    disk: FakeDisk, two: Two
) -> None:
    one, other = two
    home = one.home.name
    first, _ = await one.open(engines=2, capacity=4)
    second, _ = await other.open(engines=2, capacity=4)
    assert (directory(first), directory(second)) == (home, f"{home}.1")
    await one.put(first, (0, 0))
    await other.put(second, (1, 0), (2, 3))
    await first.aclose()
    await second.aclose()
    first, recovered = await one.open(engines=2, capacity=4)
    assert directory(first) == f"{home}.1", "it has more in it"
    assert [item.key for item in recovered] == [key(1), key(2)]
    second, recovered = await other.open(engines=2, capacity=4)
    assert directory(second) == home
    assert [item.key for item in recovered] == [key(0)]
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize("engines", [1, 2])
async def test_processes_together_use_no_more_than_the_capacity(
    disk: FakeDisk, two: Two, engines: int
) -> None:
    one, other = two
    share = CAPACITY // engines
    first, _ = await one.open(engines=engines, capacity=share)
    second, _ = await other.open(engines=engines, capacity=share)
    for place in range(share):
        await one.put(first, (place, place))
        await other.put(second, (place, place))
        assert segment_bytes(disk) <= CAPACITY * STRIDE
    if engines == 2:
        assert not one.errors
        assert not other.errors
        assert segment_bytes(disk) == CAPACITY * STRIDE
    else:
        assert {type(error).__name__ for error in (*one.errors, *other.errors)} == {"TierFull"}
        assert segment_bytes(disk) > (CAPACITY - 3) * STRIDE
    await first.aclose()
    await second.aclose()


async def test_a_process_without_room_starts_and_gets_room_when_others_end(
    disk: FakeDisk, two: Two
) -> None:
    one, other = two
    first, _ = await one.open()
    await one.put(first, *((n, n) for n in range(CAPACITY)))
    assert segment_bytes(disk) == CAPACITY * STRIDE
    second, _ = await other.open()
    assert ["other processes use the whole capacity of" in text for text in other.told] == [True]
    await other.put(second, (50, 0))
    assert [type(error).__name__ for error in other.errors] == ["TierFull"]
    other.errors.clear()
    await first.aclose()
    await other.put(second, (50, 0))
    assert not other.errors
    assert segment_bytes(disk) <= CAPACITY * STRIDE
    assert await other.get(second, [(key(50), 0)]) == [True]
    await second.aclose()
    first, recovered = await one.open()
    kept = {item.place for item in recovered}
    assert kept
    assert kept < set(range(CAPACITY)), "a part of it gave way, no more"
    assert all(await one.get(first, [(key(n), n) for n in sorted(kept)]))
    await first.aclose()


async def test_places_of_a_removed_segment_do_not_come_back_as_damage(
    disk: FakeDisk, two: Two
) -> None:
    one, _ = two
    tier, _ = await one.open()
    await one.put(tier, (0, 0), (1, 3), (2, 6))
    await tier.aclose()
    disk.unlink(one.home / "seg-00002")
    tier, recovered = await one.open()
    assert [item.key for item in recovered] == [key(0), key(1)]
    await one.put(tier, (3, 7))  # the segment exists again, and its place 6 is empty
    tier, recovered = await one.open_again(tier)
    assert [item.key for item in recovered] == [key(0), key(1), key(3)]
    assert all(await one.get(tier, [(key(0), 0), (key(1), 3), (key(3), 7)]))
    await tier.aclose()


async def test_a_purge_at_rest_reaches_all_directories_or_none(disk: FakeDisk, two: Two) -> None:
    one, other = two
    first, _ = await one.open()
    second, _ = await other.open()
    await one.put(first, (0, 0))
    await other.put(second, (1, 0))
    await first.aclose()

    def purge(*others: str) -> list[int]:
        done = purge_files(
            disk, ROOT, space=None, salt=None, progress=lambda *_: None, others=others
        )
        return [purged.removed for purged in done]

    for others in ((), ("1",)):
        with pytest.raises(ConfigError, match=rf"\.1 is in use by process {os.getpid()} \(purge"):
            purge(*others)
    assert purge(str(os.getpid())) == [1], "what the other one has it has purged itself"
    first, recovered = await one.open()
    assert recovered == []
    await one.put(first, (5, 0))
    await first.aclose()
    await second.aclose()
    assert purge() == [1, 1]
    assert not segment_bytes(disk)


async def test_a_purge_refuses_a_directory_that_it_cannot_read(disk: FakeDisk, two: Two) -> None:
    one, _ = two
    tier, _ = await one.open()
    await one.put(tier, (0, 0))
    await tier.aclose()
    disk.flip(one.home / "META", 3)
    with pytest.raises(ConfigError, match="META is damaged.*start the engine"):
        purge_files(disk, ROOT, space=None, salt="red", progress=lambda *_: None)
    tier, recovered = await one.open()
    assert len(recovered) == 1
    await tier.aclose()
    (done,) = purge_files(disk, ROOT, space=None, salt=None, progress=lambda *_: None)
    assert done.removed == 1


async def test_the_owner_of_each_directory_is_shown(disk: FakeDisk, two: Two) -> None:
    one, other = two
    first, _ = await one.open()
    second, _ = await other.open()
    await second.aclose()
    found = {one.home.name: (one.bytes, held_by(disk, one.home)) for one in leases(disk, ROOT)}
    home = one.home.name
    assert found == {home: (3 * STRIDE, str(os.getpid())), f"{home}.1": (3 * STRIDE, None)}
    size = f"{3 * STRIDE // 1024} KiB"
    assert look(disk, ROOT) == {
        home: f"{size}, in use by process {os.getpid()}",
        f"{home}.1": f"{size}, not in use",
    }
    await first.aclose()
    assert look(FakeDisk(ROOT), ROOT) == {}, "nothing is made there"


async def test_a_path_that_stays_locked_too_long_is_refused(
    disk: FakeDisk, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvladder.tiers.files.directory.LOCK_WAIT_S", 0.02)
    one, _ = two
    with (
        FilesDirectory(disk, ROOT, one.space).exclusive(),
        pytest.raises(Unavailable, match="another process keeps it locked"),
    ):
        await one.open()
    tier, _ = await one.open()
    await tier.aclose()


# ---- files of other users


@pytest.mark.parametrize("name", ["LOCK", "@", "@/META", "@/index.log", "@/seg-00000", "@/LOCK"])
@pytest.mark.parametrize("how", ["link", "owner", "mode"])
async def test_files_that_others_can_change_are_refused_and_kept(
    disk: FakeDisk, two: Two, name: str, how: str
) -> None:
    one, _ = two
    tier, _ = await one.open()
    await one.put(tier, (0, 0))
    await tier.aclose()
    path = ROOT / name.replace("@", one.home.name)
    if how == "link":
        disk.link(path)
        why = f"{path} is a symbolic link"
    elif how == "owner":
        disk.owners[path] = os.geteuid() + 1
        why = f"{path} belongs to user {os.geteuid() + 1}"
    else:
        disk.modes[path] = 0o620 if "/" in name or name == "LOCK" else 0o770
        why = f"{path} has mode {disk.modes[path]:04o}"
    before = disk.files()
    with pytest.raises(ConfigError, match=why):
        await one.open()
    assert disk.files() == before
    assert disk.open_fds == 0
    if name != "LOCK":
        with pytest.raises(ConfigError):
            purge_files(disk, ROOT, space=None, salt="red", progress=lambda *_: None)
    assert disk.files() == before


@pytest.mark.parametrize("how", ["link", "owner", "mode"])
async def test_a_path_that_others_can_change_is_refused(disk: FakeDisk, two: Two, how: str) -> None:
    if how == "link":
        disk = FakeDisk(ROOT.parent)
        disk.link(ROOT)
    elif how == "owner":
        disk.owners[ROOT] = os.geteuid() + 1
    else:
        disk.modes[ROOT] = 0o777
    two[0].disk = disk
    with pytest.raises(ConfigError, match=f"path: {ROOT} (is a symb|belongs to|has mode 0777)"):
        await two[0].open()


async def test_another_namespace_s_directory_that_is_a_link_is_left_alone(
    disk: FakeDisk, two: Two
) -> None:
    link = ROOT / "00000000000000aa"
    disk.link(link)
    one, _ = two
    tier, _ = await one.open()
    await one.put(tier, *((n, n) for n in range(CAPACITY)))
    await tier.aclose()
    assert link.name in disk.listdir(ROOT)
