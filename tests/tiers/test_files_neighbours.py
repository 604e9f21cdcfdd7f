"""A files tier reports other namespaces' blocks and changed fields, whatever files exist."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvladder.tiers.fields import BYTES_MAX, told
from kvladder.tiers.files.meta import sealed
from kvladder.tiers.files.neighbours import MAGIC, compared
from kvladder.tiers.files.purge import purge_files
from kvladder.tiers.files.rest import look
from tests.crash.harness import ROOT, STRIDE, Machine, new_disk
from tests.kit.disk import FakeDisk

SEGMENT = f"{STRIDE // 1024} KiB"


@pytest.fixture
def disk() -> FakeDisk:
    return new_disk()


@pytest.fixture
def new(disk: FakeDisk) -> Iterator[Callable[..., Machine]]:
    """Make machines of other namespaces on one disk, distinguished by a field."""
    machines: list[Machine] = []

    def make(salt: str = "first", **fields: str) -> Machine:
        machine = Machine(disk, salt=salt)
        machine.fields = told({"engine": "e", **fields})
        machines.append(machine)
        return machine

    yield make
    for machine in machines:
        machine.close()


New = Callable[..., Machine]


async def said(machine: Machine, *, put: bool = True) -> dict[str, str]:
    """Return a tier's description of its neighbours; it stores a block before it ends."""
    tier, _ = await machine.open(capacity=3)
    found = {k: v for k, v in tier.describe().items() if k in {"others", "changed", "differs"}}
    if put:
        await machine.put(tier, (0, 0))
    await tier.aclose()
    return found


async def test_a_changed_field_is_named_while_no_blocks_are_found(new: New) -> None:
    one, other = new("1", rope="null"), new("2", rope="yarn")
    assert await said(one) == {}
    since = f"rope changed from null to yarn since {one.home.name}"
    held = f"1 other namespace, {SEGMENT}"
    assert await said(other) == {"others": held, "changed": since}
    assert await said(other) == {"others": held}, "something was found"


async def test_the_nearest_namespace_is_named_and_a_distant_one_as_distant(new: New) -> None:
    far = {f"f{n}": "1" for n in range(40)}
    assert await said(new("1", **far)) == {}
    found = await said(new("2", engine="other", a="1"))
    assert found["differs"].startswith("a added (1), engine changed from e to other, f0 removed")
    assert found["differs"].endswith("and 38 more since " + new("1").home.name)
    near = await said(new("3", a="2"), put=False)
    assert near["others"].startswith("2 other namespaces, ")
    assert near["changed"] == (
        f"a changed from 1 to 2, engine changed from other to e since {new('2').home.name}"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        sealed(b"junk"),
        sealed(b"[1]"),
        sealed(b"1"),
        sealed(b"[" * 100_000),
        sealed(json.dumps({"magic": "other", "version": 1, "fields": {}}).encode()),
        sealed(json.dumps({"magic": MAGIC, "version": 1, "fields": {"a": 1}}).encode()),
        sealed(json.dumps({"magic": MAGIC, "version": 1, "fields": 5}).encode()),
        sealed(json.dumps({"magic": MAGIC, "version": 1}).encode()),
        sealed(json.dumps({"magic": MAGIC, "version": 1, "fields": {"a": "x"}}).encode())[:-2],
        b"x" * (2 * BYTES_MAX),
    ],
)
async def test_a_damaged_or_foreign_fields_file_is_ignored_with_a_notice(
    disk: FakeDisk, new: New, content: bytes
) -> None:
    one, other = new("1"), new("2", rope="yarn")
    await said(one)
    disk.put(one.home / "FIELDS", content)
    assert await said(other) == {"others": f"1 other namespace, {SEGMENT}"}
    assert other.told == [f"{one.home / 'FIELDS'} is damaged: it is ignored"]
    assert len(compared(disk, ROOT, other.told.append)) == 0
    assert len(other.told) == 2
    await said(one)
    assert json.loads(disk.content(one.home / "FIELDS").partition(b"\n")[0])["fields"]


async def test_a_newer_version_is_left_alone(disk: FakeDisk, new: New) -> None:
    one, other = new("1"), new("2", rope="yarn")
    await said(one)
    newer = {"magic": MAGIC, "version": 2, "fields": {"a": 1}}
    disk.put(one.home / "FIELDS", sealed(json.dumps(newer).encode()))
    assert "changed" not in await said(other)
    assert other.told == []


async def test_an_unwritable_fields_file_costs_only_the_explanation(
    disk: FakeDisk, new: New
) -> None:
    one, other = new("1"), new("2", rope="yarn")
    disk.refuse = lambda name, path: (
        errno.ENOSPC if name == "open" and path.endswith("FIELDS.tmp") else 0
    )
    assert await said(one) == {}
    (notice,) = one.told
    assert "FIELDS cannot be written: No space left on device. Later starts cannot report" in notice
    disk.refuse = lambda _name, _path: 0
    assert await said(other) == {"others": f"1 other namespace, {SEGMENT}"}


async def test_the_fields_file_is_written_once_and_removed_with_its_blocks(
    disk: FakeDisk, new: New
) -> None:
    one = new("1")
    await said(one)
    calls: list[str] = []

    def count(name: str, path: str) -> int:
        calls.append(f"{name} {path}")
        return 0

    disk.refuse = count
    await said(one)
    assert not any("FIELDS.tmp" in call for call in calls)
    disk.refuse = lambda _name, _path: 0
    purge_files(disk, ROOT, space=None, salt=None, progress=lambda *_: None)
    assert not [name for name in disk.files() if "FIELDS" in name]


async def test_a_namespace_is_compared_with_the_one_used_last(disk: FakeDisk, new: New) -> None:
    one, other = new("1", rope="null"), new("2", rope="yarn")
    await said(one)
    await said(other)
    assert compared(disk, ROOT, print) == {
        one.home.name: f"rope changed from null to yarn in {other.home.name}, used later"
    }
    assert look(disk, ROOT).keys() == {one.home.name, other.home.name}


async def test_a_link_in_place_of_the_fields_file_is_replaced_and_not_followed(
    tmp_path: Path,
) -> None:
    from kvladder.tiers.files.disk import Disk
    from kvladder.tiers.files.neighbours import keep_fields

    home, target, notices = tmp_path / "0123456789abcdef", tmp_path / "victim", list[str]()
    home.mkdir(0o700)
    target.write_text("not ours")
    (home / "FIELDS").symlink_to(target)
    keep_fields(Disk(), home, {"a": "1"}, notices.append)
    assert target.read_text() == "not ours"
    assert not (home / "FIELDS").is_symlink()
    assert "is not safe to use" in notices[0]
