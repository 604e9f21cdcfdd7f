"""The arena: claims, bytes, other processes, and memory that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvladder import mapping
from kvladder.arena import Arena, ArenaHandle, Slot, memory_available
from kvladder.errors import ArenaError, ConfigError
from kvladder.mapping import HUGE_PAGE_BYTES
from tests.kit.memory import writable_slots

SLOT_BYTES = 4096
MIB = 2**20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(4, SLOT_BYTES)
    yield arena
    arena.check()
    for slot in map(Slot, range(arena.slots)):
        arena.release([slot] * arena.claims(slot))
    arena.close()


def state(arena: Arena) -> tuple[int, list[int]]:
    return arena.free, [arena.claims(Slot(slot)) for slot in range(arena.slots)]


# ---- claims


def test_a_lease_gives_all_slots_or_none(arena: Arena) -> None:
    assert arena.lease(3) == [0, 1, 2]
    assert arena.lease(2) is None
    assert state(arena) == (1, [1, 1, 1, 0])
    assert arena.lease(0) == []
    assert arena.lease(1) == [3]
    assert arena.lease(1) is None


def test_e2_a_leased_slot_is_not_handed_out_again(arena: Arena) -> None:
    (first,) = arena.lease(1) or []
    others = arena.lease(3) or []
    assert first not in others
    arena.release(others)
    assert first not in (arena.lease(3) or [])


def test_a_slot_is_free_when_the_last_claim_is_released(arena: Arena) -> None:
    slots = arena.lease(2) or []
    arena.share(slots)
    arena.share(slots[:1])
    arena.release(slots)
    assert state(arena) == (2, [2, 1, 0, 0])
    arena.release(slots)
    assert state(arena) == (3, [1, 0, 0, 0])


@pytest.mark.parametrize(
    "released",
    [
        pytest.param([3], id="never leased"),
        pytest.param([0, 3], id="the second was never leased"),
        pytest.param([1, 1], id="twice in one call"),
        pytest.param([0, 0, 0], id="once too often"),
    ],
)
def test_e9_a_release_too_many_raises_and_changes_nothing(
    arena: Arena, released: list[int]
) -> None:
    arena.share([(arena.lease(2) or [])[0]])
    before = state(arena)
    with pytest.raises(ArenaError, match="more often than it was leased"):
        arena.release([Slot(slot) for slot in released])
    assert state(arena) == before
    arena.check()


def test_a_free_slot_cannot_be_shared(arena: Arena) -> None:
    slots = arena.lease(1) or []
    before = state(arena)
    with pytest.raises(ArenaError, match="slot 2 is free"):
        arena.share([*slots, Slot(2)])
    assert state(arena) == before


class ClaimsMachine(RuleBasedStateMachine):
    """Any order of leases, shares and releases against a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(5, SLOT_BYTES)
        self.model: Counter[Slot] = Counter()

    @rule(count=st.integers(0, 6))
    def lease(self, count: int) -> None:
        slots = self.arena.lease(count)
        if count > 5 - len(+self.model):
            assert slots is None
        else:
            assert slots is not None
            assert len(set(slots)) == count
            assert not any(self.model[slot] for slot in slots)
            self.model.update(slots)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(+self.model)), max_size=4))
        self.arena.share(slots)
        self.model.update(slots)

    @rule(slots=st.lists(st.integers(0, 4).map(Slot), max_size=4))
    def release(self, slots: list[Slot]) -> None:
        if all(self.model[slot] >= count for slot, count in Counter(slots).items()):
            self.arena.release(slots)
            self.model.subtract(slots)
        else:
            with pytest.raises(ArenaError):
                self.arena.release(slots)

    @invariant()
    def agrees(self) -> None:
        self.arena.check()
        assert state(self.arena) == (5 - len(+self.model), [self.model[Slot(n)] for n in range(5)])

    def teardown(self) -> None:
        self.arena.release(list(self.model.elements()))
        self.arena.close()


TestClaims: Any = ClaimsMachine.TestCase


# ---- bytes


def test_slots_are_pages_side_by_side(arena: Arena) -> None:
    assert arena.address % SLOT_BYTES == 0
    assert arena.size_bytes % HUGE_PAGE_BYTES == 0
    for slot in map(Slot, range(4)):
        view = arena.view(slot)
        assert len(view) == SLOT_BYTES
        assert not view.readonly
        view[:] = bytes([slot]) * SLOT_BYTES
    assert [set(arena.view(Slot(slot))) for slot in range(4)] == [{0}, {1}, {2}, {3}]


def test_an_attached_arena_is_the_same_memory(arena: Arena) -> None:
    other = Arena.attach(arena.handle)
    other.view(Slot(1))[:3] = b"abc"
    assert bytes(arena.view(Slot(1))[:3]) == b"abc"
    other.close()
    assert bytes(arena.view(Slot(1))[:3]) == b"abc"


def test_a_guarded_mapping_allows_writes_only_to_allowed_slots(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.view(Slot(1))[:3] = b"abc"
    arena.allow_writes([0])
    arena.forbid_writes([0])
    assert writable_slots(arena) == [0, 1, 2, 3], "an arena that is the owner's is not guarded"
    other = Arena.attach(arena.handle, writable=False)
    assert writable_slots(other) == []
    assert bytes(other.view(Slot(1))[:3]) == b"abc"
    other.allow_writes([3, 0, 1])
    assert writable_slots(other) == [0, 1, 3]
    other.view(Slot(1))[:3] = b"def"
    other.forbid_writes([1])
    assert writable_slots(other) == [0, 3]
    other.forbid_writes([0, 2, 3])
    assert writable_slots(other) == []
    assert bytes(arena.view(Slot(1))[:3]) == b"def"

    def refuses(address: int, size: int, *, writable: bool) -> None:
        if writable and address > other.address:
            raise OSError(12, "Cannot allocate memory")
        mapping.protect(address, size, writable=writable)

    monkeypatch.setattr("kvladder.arena.protect", refuses)
    with pytest.raises(OSError, match="allocate"):
        other.allow_writes([0, 2])
    assert writable_slots(other) == [], "all of them or none"
    other.close()


def test_a_read_only_descriptor_allows_no_writes(
    arena: Arena,
) -> None:
    fd = os.open(f"/proc/self/fd/{arena.handle.fd}", os.O_RDONLY)
    other = Arena.attach(arena.handle, inherited=fd, writable=False)
    with pytest.raises(PermissionError):
        other.allow_writes([1])
    assert writable_slots(other) == []
    other.close()


ATTACH = """
import sys
from kvladder import mapping
from kvladder.arena import Arena, ArenaHandle, Slot
arena = Arena.attach(ArenaHandle(*map(int, sys.argv[1:])))
assert bytes(arena.view(Slot(2))[:5]) == b"hello"
arena.view(Slot(3))[:5] = b"there"
arena.close()
"""


def other_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_another_process_sees_the_bytes(arena: Arena) -> None:
    arena.view(Slot(2))[:5] = b"hello"
    handle = arena.handle
    with other_process(ATTACH, handle.pid, handle.fd, handle.slots, handle.slot_bytes) as process:
        pass
    assert process.returncode == 0
    assert bytes(arena.view(Slot(3))[:5]) == b"there"


OWN = """
import os
from kvladder.arena import Arena, Slot
arena = Arena.create(4, 4096)
arena.view(Slot(0))[:4] = b"mine"
handle = arena.handle
inode = os.fstat(handle.fd).st_ino
print(inode, handle.pid, handle.fd, handle.slots, handle.slot_bytes, flush=True)
input()
"""


def who_maps(inode: int) -> list[int]:
    """Return the processes that have this arena mapped; it exists nowhere else."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        if any("kvladder-arena" in line and int(line.split()[4]) == inode for line in lines):
            found.append(int(process.name))
    return found


@pytest.mark.crash
def test_kill_9_of_the_owner_leaves_nothing_behind() -> None:
    with other_process(OWN) as process:
        assert process.stdout is not None
        inode, *numbers = map(int, process.stdout.readline().split())
        handle = ArenaHandle(*numbers)
        assert who_maps(inode) == [handle.pid]
        attached = Arena.attach(handle)
        process.kill()
    assert bytes(attached.view(Slot(0))[:4]) == b"mine", "a worker may finish its copies"
    assert who_maps(inode) == [os.getpid()]
    attached.close()
    assert who_maps(inode) == []
    assert not [path for path in Path("/dev/shm").iterdir() if "kvladder" in path.name]
    with pytest.raises(ArenaError, match=f"arena of process {handle.pid}"):
        Arena.attach(handle)


def resident_bytes(arena: Arena) -> int:
    """Return how much of its mapping has pages in this process."""
    wanted = f"{arena.address:x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(wanted))
    line = next(line for line in lines[start:] if line.startswith("Rss:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14),
    reason="before Linux 5.14 pages are mapped when they are first used",
)
def test_no_copy_has_to_map_pages() -> None:
    arena = Arena.create(9, MIB)
    assert resident_bytes(arena) == arena.size_bytes
    attached = Arena.attach(arena.handle)
    for thread in threading.enumerate():
        if thread.name == "kvladder-populate":
            thread.join()
    assert resident_bytes(attached) == arena.size_bytes
    attached.close()
    Arena.attach(arena.handle).close()
    assert "kvladder-populate" not in [thread.name for thread in threading.enumerate()]
    arena.close()


def mapped(arena: Arena, field: str) -> str:
    """Return a field of its mapping from smaps in ``/proc/self``, or its line in numa_maps."""
    name = "numa_maps" if field == "policy" else "smaps"
    lines = Path("/proc/self", name).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{arena.address:x}"))
    if field == "policy":
        return lines[start].split()[1]
    return next(line for line in lines[start:] if line.startswith(field)).split()[1]


def test_several_threads_map_huge_pages_or_log_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapping, "MAKE_BYTES", 4 * MIB)
    with caplog.at_level("INFO", logger="kvladder"):
        arena = Arena.create(9, MIB)
    assert arena.address % HUGE_PAGE_BYTES == 0
    huge = int(mapped(arena, "ShmemPmdMapped")) * 1024
    assert (huge == arena.size_bytes) != ("of the arena has no huge pages" in caplog.text)
    assert resident_bytes(arena) == arena.size_bytes
    assert not any(arena.view(Slot(8)))
    arena.close()


def test_an_arena_without_huge_pages_works_and_logs_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapping, "MAKE_BYTES", 4 * MIB)
    monkeypatch.setattr(mapping, "_MADV_COLLAPSE", 0xBAD)
    with caplog.at_level("INFO", logger="kvladder"):
        arena = Arena.create(9, MIB)
    assert resident_bytes(arena) == arena.size_bytes
    assert [record.message for record in caplog.records] == [
        "100 % of the arena has no huge pages: Invalid argument"
    ]
    arena.close()


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA nodes"
)
@pytest.mark.parametrize(
    ("nodes", "policy"), [((), "default"), ((0,), "prefer:0"), ((0, 0), "prefer:0")]
)
def test_memory_is_placed_near_the_named_nodes(nodes: tuple[int, ...], policy: str) -> None:
    arena = Arena.create(1, MIB, nodes=nodes)
    assert mapped(arena, "policy").replace(" (many)", "") == policy
    arena.close()


def test_attaching_something_other_than_the_arena_is_refused(arena: Arena) -> None:
    with pytest.raises(ArenaError, match="is not"):
        Arena.attach(replace(arena.handle, slots=HUGE_PAGE_BYTES))
    with pytest.raises(ArenaError, match="No such file"):
        Arena.attach(replace(arena.handle, fd=999_999))


def test_an_arena_may_be_closed_twice_and_while_a_slot_is_viewed() -> None:
    arena = Arena.create(1, SLOT_BYTES)
    view = arena.view(Slot(0))
    arena.close()
    arena.close()
    assert view[0] == 0, "who still looks at a slot keeps its memory"


# ---- memory that is not there


@pytest.mark.parametrize("slots", [0, -1])
def test_an_arena_smaller_than_a_block_is_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match=r"arena\.size: .*at least one block, 4096 bytes"):
        Arena.create(slots, SLOT_BYTES)


@pytest.mark.parametrize("slot_bytes", [0, 1, 4095, 4097, -4096])
def test_slots_are_whole_pages(slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match="a multiple of 4096"):
        Arena.create(1, slot_bytes)


def test_an_arena_larger_than_free_memory_is_refused_with_the_size_that_fits() -> None:
    with pytest.raises(ConfigError) as refusal:
        Arena.create(4096, MIB, available_bytes=1024 * MIB)
    assert str(refusal.value) == (
        "arena.size: 4.00 GiB do not fit in the 1.00 GiB of memory that are available here"
        " (0.90 GiB would fit)"
    )
    fits = Arena.create(921, 4096, available_bytes=1024 * MIB)
    fits.close()


def test_an_arena_larger_than_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="would fit"):
        Arena.create(2**40, SLOT_BYTES)


def test_a_reservation_that_fails_is_refused_and_closes_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fallocate(fd: int, offset: int, size: int) -> None:
        del fd, offset, size
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(ConfigError, match="cannot reserve .* shared memory: No space left"):
        Arena.create(1, SLOT_BYTES)


def machine(root: Path, **files: str) -> Path:
    """A fake root with 100 MiB of memory and these files below /sys/fs/cgroup."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 204800 kB\nMemAvailable:   102400 kB\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "memory.max", "memory.current", "memory.stat"
V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"


def limits(names: tuple[str, str, str], limit: str, used: int, stat: str = "") -> dict[str, str]:
    return dict(zip(names, (f"{limit}\n", f"{used}\n", stat), strict=True))


def test_without_a_limit_the_machines_memory_is_available(tmp_path: Path) -> None:
    assert memory_available(machine(tmp_path)) == 100 * MIB


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
def test_a_containers_limit_counts_where_it_is_less(
    tmp_path: Path, names: tuple[str, str, str]
) -> None:
    files = limits(names, str(50 * MIB), 20 * MIB)
    assert memory_available(machine(tmp_path, **files)) == 30 * MIB


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
def test_a_containers_page_cache_counts_as_available(
    tmp_path: Path, names: tuple[str, str, str]
) -> None:
    total = "total_" if names == V1 else ""
    stat = f"anon 5\n{total}inactive_file {10 * MIB}\n{total}active_file {4 * MIB}\nfile 1\n"
    files = limits(names, str(50 * MIB), 20 * MIB, stat)
    assert memory_available(machine(tmp_path, **files)) == 44 * MIB


@pytest.mark.parametrize(
    ("names", "line"),
    [(V1, "4:cpu,memory:/pods/one"), (V2, "0::/pods/one")],
    ids=["v1", "v2"],
)
@pytest.mark.parametrize("where", ["pods/one", "pods", "."])
def test_the_limits_of_every_group_around_the_process_count(
    tmp_path: Path, names: tuple[str, str, str], line: str, where: str
) -> None:
    files = limits(names, str(50 * MIB), 20 * MIB)
    base = "memory/" if names == V1 else ""
    nested = {f"{base}{where}/{name.removeprefix(base)}": text for name, text in files.items()}
    root = machine(tmp_path, **nested)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(f"8:pids:/elsewhere\n{line}\n")
    assert memory_available(root) == 30 * MIB


def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert memory_available(machine(tmp_path, **limits(V2, str(50 * MIB), 60 * MIB))) == 0


@pytest.mark.parametrize(("names", "limit"), [(V2, "max"), (V1, "9223372036854771712")])
def test_an_unlimited_container_has_the_machines_memory(
    tmp_path: Path, names: tuple[str, str, str], limit: str
) -> None:
    assert memory_available(machine(tmp_path, **limits(names, limit, MIB))) == 100 * MIB


def test_a_closed_arena_stays_mapped_until_the_last_claim_is_released() -> None:
    arena = Arena.create(4, 4096)
    first, second = arena.lease(2) or []
    view = arena.view(first)
    view[:4] = b"here"
    view.release()
    assert not arena.close()
    assert not arena.close()
    arena.release([first])
    assert bytes(arena.view(first)[:4]) == b"here"
    arena.share([second])
    arena.release([second, second])
    with pytest.raises(ValueError, match="released"):
        arena.view(first)
    assert arena.close()


def test_slots_set_aside_do_not_keep_the_arena_mapped() -> None:
    arena = Arena.create(4, 4096)
    arena.set_aside(2)
    assert arena.close()
    with pytest.raises(ValueError, match="released"):
        arena.view(Slot(0))
