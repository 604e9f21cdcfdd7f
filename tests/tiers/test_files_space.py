"""A files tier and its room: at open, as it grows, and beside earlier namespaces."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from kvladder.errors import ConfigError, TierError, TierFull, Unavailable
from kvladder.tiers.files.meta import SEGMENTS_MAX, sealed
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.purge import purge_files
from kvladder.tiers.files.store import SEGMENTS_MIN
from tests.crash.harness import CAPACITY, ROOT, STRIDE, Machine, key, new_disk
from tests.kit.disk import FakeDisk


@pytest.fixture
def disk() -> FakeDisk:
    return new_disk()


@pytest.fixture
def new(disk: FakeDisk) -> Iterator[Callable[[str], Machine]]:
    """Makes machines of other namespaces on one disk."""
    machines: list[Machine] = []

    def make(salt: str = "first") -> Machine:
        machines.append(Machine(disk, salt=salt))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


New = Callable[..., Machine]


def segments(machine: Machine) -> int:
    """Bytes of the segments of a namespace."""
    files = machine.disk.files().items()
    return sum(size for path, size in files if path.startswith(f"{machine.home}/seg-"))


def change_meta(machine: Machine, **changes: object) -> None:
    """Change fields of META, and keep it valid."""
    path = machine.home / "META"
    meta = msgspec.json.decode(machine.disk.content(path).splitlines()[0])
    machine.disk.put(path, sealed(msgspec.json.encode({**meta, **changes})))


def seal_log(disk: FakeDisk, path: Path, *, version: int) -> None:
    """Change the version in a log's header, and keep it valid."""
    data = bytearray(disk.content(path))
    data[8:10] = version.to_bytes(2, "little")
    data[56:64] = xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    disk.put(path, bytes(data))


# ---- refused at open


async def refused(machine: Machine, **kwargs: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        await machine.open(**kwargs)
    assert machine.disk.open_fds == 0
    return str(caught.value)


async def unavailable(machine: Machine) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        await machine.open()
    assert machine.disk.open_fds == 0
    assert caught.value.path == "path"
    assert caught.value.hint in str(caught.value)
    return caught.value


async def test_a_path_with_a_missing_parent_is_refused(new: New) -> None:
    machine = new()
    machine.disk = FakeDisk(Path("/other"))
    text = await refused(machine)
    assert "/disk/kv cannot be created: /disk does not exist (" in text


async def test_a_missing_path_is_created(new: New) -> None:
    machine = new()
    machine.disk = FakeDisk(ROOT.parent)
    tier, _ = await machine.open()
    await tier.aclose()
    assert machine.disk.files().keys() >= {str(ROOT / "LOCK"), str(machine.home / "META")}


async def test_a_path_that_is_a_file_is_refused(new: New) -> None:
    machine = new()
    machine.disk = FakeDisk(ROOT.parent)
    machine.disk.put(ROOT, b"")
    assert "/disk/kv is a file (expected a directory)" in await refused(machine)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="the path is empty"):
        FilesOptions(path="")


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (
            "open",
            errno.EACCES,
            "is not writable: Permission denied (expected a directory of the user",
        ),
        ("mkdir", errno.EPERM, "is not writable"),
        ("open", errno.EROFS, "is on a read-only file system"),
        ("fallocate", errno.ENOSPC, "has no room for one segment"),
        ("fallocate", errno.EDQUOT, "has no room for one segment"),
        ("fallocate", errno.EOPNOTSUPP, "cannot be used: Operation not supported"),
        ("open", errno.EMFILE, "cannot be used: Too many open files (/disk/kv/LOCK)"),
        ("lock", errno.ENOLCK, "cannot be used: No locks available"),
    ],
)
async def test_errors_of_the_file_system_name_the_path_and_can_be_retried(
    disk: FakeDisk, new: New, call: str, code: int, text: str
) -> None:
    disk.refuse = lambda name, _path: code if name == call else 0
    machine = new()
    error = await unavailable(machine)
    assert str(error).startswith("/disk/kv ")
    assert text in str(error)
    disk.refuse = lambda _name, _path: 0
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    assert machine.errors == []
    await tier.aclose()


@pytest.mark.parametrize("code", [errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR])
async def test_an_impossible_path_is_refused(disk: FakeDisk, new: New, code: int) -> None:
    disk.refuse = lambda name, _path: code if name == "open" else 0
    assert f"path: /disk/kv cannot be used: {os.strerror(code)}" in await refused(new())


async def test_a_newer_format_is_refused_and_kept(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    await tier.aclose()
    change_meta(machine, version=4, new=1)
    before = disk.files()
    text = await refused(machine)
    assert "META has format 4: expected 3 or older" in text
    assert disk.files() == before


async def test_an_earlier_format_is_restarted_with_one_notice(disk: FakeDisk, new: New) -> None:
    """Blocks of another format are unreadable, so the start does not scan all headers."""
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0), (1, 3))
    await tier.aclose()
    change_meta(machine, version=2)
    with pytest.raises(ConfigError, match="in format 2.*purge with that version, or remove"):
        purge_files(disk, ROOT, space=None, salt="red", progress=lambda *_: None)
    tier, recovered = await machine.open()
    assert recovered == []
    (notice,) = machine.told
    assert f"{machine.home} has format 2 of an earlier version of kvladder" in notice
    await tier.aclose()
    machine.model.promised.clear()
    await machine.check(all_kept=True)
    assert len(machine.told) == 1


async def test_a_newer_index_log_is_refused_and_kept(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    await tier.aclose()
    seal_log(disk, machine.home / "index.log", version=3)
    before = disk.files()
    assert "index.log has format 3: expected 2 or older" in await refused(machine)
    assert disk.files() == before


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b'{"magic": "x"}',
        b'{"magic": "x", "version": 9}',
        sealed(b'{"magic": "x", "a": ' + b"[" * 50_000),
    ],
)
async def test_a_damaged_meta_file_costs_no_block(disk: FakeDisk, new: New, damage: bytes) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0), (1, 3))
    await tier.aclose()
    disk.put(machine.home / "META", damage)
    await machine.check(all_kept=True)


async def test_a_meta_file_with_another_number_costs_no_block(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0), (1, 3))
    await tier.aclose()
    path = machine.home / "META"
    disk.put(path, disk.content(path).replace(b'"stride":', b'"stride":1'))
    await machine.check(all_kept=True)


async def test_a_layout_with_too_many_files_is_restarted(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    tier, recovered = await machine.open_again(tier, capacity=3 * SEGMENTS_MAX)
    assert len(recovered) == 1
    tier, recovered = await machine.open_again(tier, capacity=3 * SEGMENTS_MAX + 1)
    assert recovered == []
    assert tier.describe()["segment"].startswith("13 blocks")  # 1/128 of the capacity
    await tier.aclose()


async def test_a_meta_file_of_another_shape_is_restarted(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    await tier.aclose()
    change_meta(machine, stride=STRIDE * 2)
    await machine.check(all_kept=False)


# ---- O_DIRECT


@pytest.mark.parametrize(
    ("possible", "direct", "io"),
    [
        (True, None, "O_DIRECT"),
        (True, True, "O_DIRECT"),
        (True, False, "buffered, through aiofiles"),
        (False, None, "buffered, through aiofiles"),
        (False, False, "buffered, through aiofiles"),
    ],
)
async def test_direct_io_is_used_where_possible(
    disk: FakeDisk, new: New, possible: bool, direct: bool | None, io: str
) -> None:
    disk.direct = possible
    machine = new()
    tier, _ = await machine.open(direct=direct)
    assert tier.describe()["io"] == io
    assert tier.describe()["segment"] == f"3 blocks, {3 * STRIDE // 1024} KiB"
    await machine.put(tier, (0, 0))
    assert await machine.get(tier, [(key(0), 0)]) == [True]
    await tier.aclose()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
async def test_o_direct_that_opens_but_cannot_read_is_not_used(
    disk: FakeDisk, new: New, code: int
) -> None:
    disk.refuse = lambda name, path: code if (name, path[-9:]) == ("preadv", "seg-00000") else 0
    if code == errno.EIO:
        assert "cannot be used" in str(await unavailable(new()))
        return
    tier, _ = await new().open()
    assert tier.describe()["io"] == "buffered, through aiofiles"
    await tier.aclose()


async def test_missing_o_direct_is_refused_if_required(disk: FakeDisk, new: New) -> None:
    disk.direct = False
    assert "direct: /disk/kv is on a file system without O_DIRECT (leave" in await refused(
        new(), direct=True
    )


# ---- a disk that fills up


async def test_a_full_disk_is_tier_full_and_the_rest_stays_usable(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0), (1, 1), (2, 2))
    disk.capacity_bytes = sum(disk.files().values()) + STRIDE
    await machine.put(tier, (3, 3), (4, 0))
    assert [type(error) for error in machine.errors] == [TierFull]
    machine.errors.clear()
    for turn in range(40):  # the log is compacted in place
        await machine.remove(tier, (10 + turn - 1, 1))
        await machine.put(tier, (10 + turn, 1))
    assert machine.errors == []
    wanted = [(key(49), 1), (key(2), 2)]
    assert await machine.get(tier, wanted) == [True, True]
    tier, recovered = await machine.open_again(tier)
    assert {(item.key, item.place) for item in recovered} >= set(wanted)
    disk.capacity_bytes = None
    await machine.put(tier, (3, 3))
    assert await machine.get(tier, [*wanted, (key(3), 3)]) == [True] * 3
    await tier.aclose()


async def test_an_exhausted_disk_quota_counts_as_a_full_disk(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    disk.refuse = lambda name, path: errno.EDQUOT if name == "pwritev" and "seg" in path else 0
    await machine.put(tier, (0, 0))
    assert [type(error) for error in machine.errors] == [TierFull]
    await tier.aclose()


@pytest.mark.parametrize(
    ("code", "temporary"), [(errno.EIO, True), (errno.EMFILE, True), (errno.EROFS, False)]
)
async def test_other_errors_are_tier_errors(
    disk: FakeDisk, new: New, code: int, temporary: bool
) -> None:
    machine = new()
    tier, _ = await machine.open()
    disk.refuse = lambda name, path: code if name == "pwritev" and "log" in path else 0
    await machine.put(tier, (0, 0))
    await machine.remove(tier, (0, 0))
    assert [type(error) for error in machine.errors] == [TierError] * 2
    assert {error.temporary for error in machine.errors} == {temporary}
    disk.refuse = lambda _name, _path: 0
    assert await machine.get(tier, [(key(0), 0)]) == [False]
    await tier.aclose()


async def test_too_many_open_files_fail_a_read(disk: FakeDisk, new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    tier, _ = await machine.open_again(tier)
    disk.refuse = lambda name, _path: errno.EMFILE if name == "open" else 0
    assert await machine.get(tier, [(key(0), 0)]) == [False]
    assert [str(error) for error in machine.errors] == [
        f"[Errno 24] Too many open files: '{machine.home / 'seg-00000'}'"
    ]
    disk.refuse = lambda _name, _path: 0
    assert await machine.get(tier, [(key(0), 0)]) == [True]
    await tier.aclose()


# ---- the capacity, and other users of the path


async def test_a_lower_capacity_gives_room_back(new: New) -> None:
    machine = new()
    tier, _ = await machine.open()
    await machine.put(tier, *((n, n) for n in range(CAPACITY)))
    assert segments(machine) == CAPACITY * STRIDE
    tier, recovered = await machine.open_again(tier, capacity=4)
    assert segments(machine) == 4 * STRIDE
    assert [item.place for item in recovered] == [0, 1, 2, 3]
    assert all(await machine.get(tier, [(key(n), n) for n in range(4)]))
    tier, recovered = await machine.open_again(tier)
    assert [item.place for item in recovered] == [0, 1, 2, 3]
    await machine.put(tier, (7, 7))
    assert await machine.get(tier, [(key(7), 7)]) == [True]
    assert segments(machine) == (4 + 2) * STRIDE  # segment 1 is as short as it was
    await tier.aclose()


async def fill(machine: Machine, places: int) -> None:
    tier, _ = await machine.open()
    await machine.put(tier, *((n, n) for n in range(places)))
    await tier.aclose()


async def test_other_namespaces_are_removed_least_recently_used_first(new: New) -> None:
    a, b, c = new("a"), new("b"), new("c")
    await fill(b, 3)
    await fill(a, 2)
    await fill(b, 3)  # used again: now a is the older one
    tier, _ = await c.open()
    assert (segments(a), segments(b), segments(c)) == (0, 3 * STRIDE, 3 * STRIDE)
    assert str(a.home / "META") not in a.disk.files()
    await c.put(tier, (0, 3))
    assert (segments(b), segments(c)) == (0, 6 * STRIDE)
    await tier.aclose()
    c.check_space()


async def test_other_namespaces_stay_as_long_as_there_is_room(new: New) -> None:
    a, b = new("a"), new("b")
    await fill(a, 3)
    await fill(b, 3)
    assert (segments(a), segments(b)) == (3 * STRIDE, 3 * STRIDE)
    tier, recovered = await a.open()
    assert len(recovered) == 3
    assert all(await a.get(tier, [(key(n), n) for n in range(3)]))
    await tier.aclose()


async def test_a_namespace_with_few_blocks_removes_no_others(new: New) -> None:
    """A segment has at most a sixteenth of the capacity, however large its setting is."""
    capacity = 16 * 2
    large: dict[str, Any] = {"capacity": capacity, "segment": capacity * STRIDE}
    machines = [new(str(number)) for number in range(16)]
    for machine in machines:
        tier, _ = await machine.open(**large, segments_min=SEGMENTS_MIN)
        await machine.put(tier, (0, 0), (1, 1))
        await tier.aclose()
    for machine in machines:
        tier, recovered = await machine.open(**large, segments_min=SEGMENTS_MIN)
        assert len(recovered) == 2
        await tier.aclose()


async def test_other_namespaces_are_removed_on_a_full_disk_too(disk: FakeDisk, new: New) -> None:
    a, b = new("a"), new("b")
    await fill(a, 3)
    disk.capacity_bytes = sum(disk.files().values()) + STRIDE
    await fill(b, 3)
    assert (segments(a), segments(b)) == (0, 3 * STRIDE)
    assert b.errors == []


async def test_a_stranger_s_file_in_another_namespace_stays(disk: FakeDisk, new: New) -> None:
    a, b = new("a"), new("b")
    await fill(a, CAPACITY)
    disk.put(a.home / "notes.txt", b"mine")
    await fill(b, CAPACITY)
    assert [path for path in disk.files() if path.startswith(str(a.home))] == [
        str(a.home / "notes.txt")
    ]


async def test_a_newer_version_s_namespace_is_left_alone(disk: FakeDisk, new: New) -> None:
    a, b = new("a"), new("b")
    await fill(a, CAPACITY)
    change_meta(a, version=4)
    await fill(b, 3)
    assert segments(a) == CAPACITY * STRIDE


async def test_the_free_bytes_of_the_disk_are_told_at_each_write(disk: FakeDisk, new: New) -> None:
    disk.capacity_bytes = 1 << 20
    machine = new()
    tier, _ = await machine.open()
    for number in range(2):
        held = sum(disk.files().values())
        assert tier.gauges() == {"disk_free_bytes": (1 << 20) - held, "disk_size_bytes": 1 << 20}
        disk.put(ROOT.parent / f"of-others-{number}", b"x" * 1000)
        await machine.put(tier, (number, number))
    await tier.aclose()
