"""A files tier with damaged, truncated, stale and unreadable blocks."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvladder.arena import Arena
from kvladder.errors import TierError
from kvladder.testing.fixtures import SampleBlocks, coded
from kvladder.testing.sim import SimClock, inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.files import segments
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import LABEL_BYTES, Outcome
from tests.crash.harness import CAPACITY, LAYOUT, STRIDE, Machine, key, new_disk
from tests.kit.disk import FakeDisk, InlinePool

SEGMENT = "seg-00000"


@pytest.fixture
def disk() -> FakeDisk:
    return new_disk()


@pytest.fixture
def machine(disk: FakeDisk) -> Iterator[Machine]:
    machine = Machine(disk)
    yield machine
    machine.close()


@pytest.fixture
async def tier(machine: Machine) -> AsyncIterator[FilesTier]:
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0), (1, 1), (2, 2))
    yield tier
    await tier.aclose()


BLOCKS = [(key(n), n) for n in range(3)]


@pytest.mark.parametrize(
    "byte",
    [
        *range(0, LABEL_BYTES, 16),
        LABEL_BYTES - 1,
        LABEL_BYTES,
        4088,
        4096,
        4096 + LAYOUT.block_bytes - 1,
    ],
)
async def test_a_flipped_byte_is_a_miss(machine: Machine, tier: FilesTier, byte: int) -> None:
    """In the label, or anywhere in the payload; the bytes after the label serve lost logs only."""
    fields = LABEL_BYTES
    machine.disk.flip(machine.home / SEGMENT, STRIDE + byte, 0x10)
    damaged = byte < fields or byte >= 4096
    assert await machine.get(tier, BLOCKS) == [True, not damaged, True]
    assert machine.refused == ({Outcome.CORRUPT: 1} if damaged else {})


async def test_another_block_in_the_place_is_stale_not_corrupt(
    machine: Machine, tier: FilesTier
) -> None:
    path = machine.home / SEGMENT
    content = machine.disk.content(path)
    machine.disk.put(path, content[:STRIDE] * 2 + content[2 * STRIDE :])
    other, _ = await machine.open_again(tier)
    assert await machine.get(other, BLOCKS) == [True, False, True]
    assert machine.refused == {Outcome.STALE: 1}
    await other.aclose()


@pytest.mark.parametrize("size", [0, 100, 4096, STRIDE, STRIDE + 4096 + 10])
async def test_a_truncated_segment_is_misses_and_is_used_again(
    machine: Machine, tier: FilesTier, size: int
) -> None:
    path = machine.home / SEGMENT
    machine.disk.put(path, machine.disk.content(path)[:size])
    other, recovered = await machine.open_again(tier)
    assert len(recovered) == size // STRIDE, "what has no place any more is forgotten"
    assert await machine.get(other, BLOCKS) == [size >= STRIDE, False, False]
    await machine.put(other, (1, 1))
    assert await machine.get(other, BLOCKS[1:2]) == [True]
    await other.aclose()


async def test_a_missing_segment_is_misses(machine: Machine, tier: FilesTier) -> None:
    await machine.put(tier, (3, 3))
    await tier.aclose()
    machine.disk.unlink(machine.home / "seg-00001")
    other, _ = await machine.open()
    assert await machine.get(other, [*BLOCKS, (key(3), 3)]) == [True, True, True, False]
    assert machine.refused == {None: 1}, "nothing came"
    await other.aclose()


async def test_without_checks_flipped_bits_are_served(machine: Machine) -> None:
    """The negative control: it is the checksum that keeps them out."""
    tier, _ = await machine.open(verify=False)
    await machine.put(tier, (0, 0))
    machine.disk.flip(machine.home / SEGMENT, 4096)
    with pytest.raises(AssertionError, match="wrong bytes"):
        await machine.get(tier, BLOCKS[:1])
    await tier.aclose()


async def test_blocks_without_a_checksum_are_not_trusted_later(machine: Machine) -> None:
    tier, _ = await machine.open(verify=False)
    await machine.put(tier, (0, 0))
    assert await machine.get(tier, BLOCKS[:1]) == [True]
    checking, _ = await machine.open_again(tier)
    assert await machine.get(checking, BLOCKS[:1]) == [False]
    unchecked, _ = await machine.open_again(checking, verify=False)
    assert await machine.get(unchecked, BLOCKS[:1]) == [True]
    await unchecked.aclose()


async def test_expired_blocks_are_recovered_so_that_the_level_removes_them(
    machine: Machine,
) -> None:
    tier, _ = await machine.open()
    wall_s = tier.context.clock.wall()
    first, second = machine.some([(0, 0), (1, 1)])
    await tier.put(machine.writes([first.of(expires_wall_s=wall_s - 1), second]))
    tier, recovered = await machine.open_again(tier)
    assert [item.key for item in recovered] == [key(0), key(1)]
    await tier.aclose()


async def test_a_key_at_two_places_is_recovered_once(machine: Machine) -> None:
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0), (1, 1))
    await machine.put(tier, (0, 5))
    tier, recovered = await machine.open_again(tier)
    assert [(kept.key, kept.place) for kept in recovered] == [(key(0), 0), (key(1), 1)]
    assert await machine.get(tier, [(key(0), 5)]) == [False], "what nobody knows of is erased"
    await tier.aclose()


# ---- on real files, with a device that misbehaves


class BadDisk(Disk):
    """Sectors that cannot be used, and calls that do less than they could."""

    def __init__(self) -> None:
        self.bad: set[int] = set()
        """Blocks with headers or payloads that give EIO."""
        self.buffers_max = 1 << 10
        """Buffers that one call reads or writes."""
        self.stride = 0

    def _check(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        end = offset + sum(map(len, buffers))
        if self.stride and self.bad & set(range(offset // self.stride, -(-end // self.stride))):
            raise OSError(errno.EIO, "bad sector")

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(buffers, offset)
        return super().preadv(fd, buffers[: self.buffers_max], offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if len(buffers) > 1:
            self._check(buffers, offset)
        return super().pwritev(fd, buffers[: self.buffers_max], offset)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(CAPACITY, LAYOUT.slot_bytes)
    yield arena
    arena.close()


@pytest.fixture
def blocks(arena: Arena) -> Iterator[SampleBlocks]:
    blocks = SampleBlocks(arena, LAYOUT, CAPACITY, LAYOUT.namespace())
    yield blocks
    blocks.close()


@pytest.fixture
async def bad(arena: Arena, tmp_path: Path) -> AsyncIterator[tuple[FilesTier, BadDisk]]:
    """A tier on a bad disk; all eight places are in one run."""
    disk = BadDisk()
    options = FilesOptions(path=str(tmp_path), threads=1)
    tier = FilesTier(options, disk=disk, pool=InlinePool(), segments_min=1)
    clock = SimClock(asyncio.get_running_loop())
    space = LAYOUT.namespace()
    await tier.open(TierContext(arena, LAYOUT, space, CAPACITY, clock, inline_blocking))
    disk.stride = STRIDE
    yield tier, disk
    disk.stride = 0
    await tier.aclose()


async def test_an_unreadable_block_does_not_take_its_neighbours_with_it(
    bad: tuple[FilesTier, BadDisk], blocks: SampleBlocks
) -> None:
    tier, disk = bad
    items = await blocks.put(tier, *range(CAPACITY))
    disk.bad = {0, 3}
    assert await blocks.get(tier, items) == [n not in disk.bad for n in range(CAPACITY)]
    disk.bad = set(range(CAPACITY))
    with pytest.raises(TierError, match="bad sector") as caught:
        await tier.get(blocks.reads(items))
    assert caught.value.temporary


class OneThread(Machine):
    """A machine whose tiers write all of a batch in one call, if it may."""

    def wrap(self, tier: FilesTier) -> FilesTier:
        tier.options = msgspec.structs.replace(tier.options, threads=1)
        return tier


async def test_a_batch_over_several_segments_stays_within_each(disk: FakeDisk) -> None:
    machine = OneThread(disk)
    tier, _ = await machine.open()
    await machine.put(tier, *((n, n) for n in range(1, CAPACITY)))
    files = machine.disk.files().items()
    sizes = [size for path, size in files if path.startswith(f"{machine.home}/seg-")]
    assert sorted(sizes) == [2 * STRIDE, 3 * STRIDE, 3 * STRIDE]
    for number in range(1, CAPACITY):  # alone, so that no run goes over an end
        assert await machine.get(tier, [(key(number), number)]) == [True]
    await tier.aclose()
    machine.close()


async def test_a_whole_block_takes_the_place_of_a_shorter_one(
    bad: tuple[FilesTier, BadDisk], blocks: SampleBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SKIP_BYTES", 4096)
    tier, _ = bad
    items = blocks.some(0, 1, 2)
    for these in ([coded(one, 10) for one in items], items):
        await blocks.store(tier, these)
        assert await blocks.get(tier, these) == [True] * 3
        assert all(map(blocks.right, these))


async def test_a_failed_write_is_not_reported_as_stored(
    bad: tuple[FilesTier, BadDisk], blocks: SampleBlocks
) -> None:
    tier, disk = bad
    disk.bad = {5}
    items = blocks.some(*range(3), 5)
    blocks.fill(items)
    assert list(await tier.put(blocks.writes(items))) == [True, True, True, False]
    assert await blocks.get(tier, items) == [True, True, True, False]
    with pytest.raises(TierError, match="bad sector"):
        await tier.put(blocks.writes(items[3:]))


@pytest.mark.parametrize("buffers", [2, 3, 4, 5])
async def test_short_calls_are_completed(
    bad: tuple[FilesTier, BadDisk], blocks: SampleBlocks, buffers: int
) -> None:
    tier, disk = bad
    disk.buffers_max = buffers
    items = await blocks.put(tier, *range(CAPACITY))
    assert await blocks.get(tier, items) == [True] * CAPACITY


async def test_half_a_block_at_a_time_is_a_failure_not_a_loop(
    bad: tuple[FilesTier, BadDisk], blocks: SampleBlocks
) -> None:
    tier, disk = bad
    items = await blocks.put(tier, 0, 1)
    disk.buffers_max = 1
    assert await blocks.get(tier, items) == [False, False]
    with pytest.raises(TierError, match="only part of a block was written"):
        await tier.put(blocks.writes(items))
