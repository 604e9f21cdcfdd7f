"""The index log alone: valid records, skipped records, and compaction."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvladder.errors import ConfigError
from kvladder.keys import BlockKey, Namespace
from kvladder.tiers.files.log import READ_RECORDS, RECORD_BYTES, IndexLog, kept_of, tag_of
from kvladder.tiers.label import NO_FACTS, Facts, RecoveredBlock
from tests.kit.disk import FakeDisk

HOME = Path("/home")
PATH = HOME / "index.log"
SPACE = Namespace(hashlib.sha256(b"space").digest())
PLACES = 64


def item(number: int, place: int | None = None, facts: Facts = NO_FACTS) -> RecoveredBlock:
    key = BlockKey(hashlib.sha256(b"%d" % number).digest())
    return RecoveredBlock(key, number % PLACES if place is None else place, facts)


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk(HOME)


def new(disk: FakeDisk, *, space: Namespace = SPACE, places: int = PLACES) -> IndexLog:
    return IndexLog(disk, HOME, space, places_max=places, slack_records=8)


def opened(disk: FakeDisk, *, places: int = PLACES) -> tuple[IndexLog, list[RecoveredBlock]]:
    log = new(disk, places=places)
    found = log.load()
    items = kept_of(found.records)
    expected = {item.place: tag_of(item.key) for item in items}
    assert {place: tag for place, tag in enumerate(found.tags) if tag} == expected
    return log, items


def found(disk: FakeDisk, *, places: int = PLACES) -> list[RecoveredBlock]:
    log, items = opened(disk, places=places)
    log.close()
    return items


def set_version(disk: FakeDisk, version: int) -> None:
    """Set the version in the header, and keep it valid."""
    data = bytearray(disk.content(PATH))
    data[8:10] = version.to_bytes(2, "little")
    data[56:64] = xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    disk.put(PATH, bytes(data))


def never() -> bool:
    return False


def test_a_log_returns_stored_blocks_oldest_first_without_removed_ones(disk: FakeDisk) -> None:
    log, items = opened(disk)
    assert items == []
    log.put([item(3), item(1), item(2)])
    log.remove([item(1)])
    log.put([item(0)])
    log.close()
    assert found(disk) == [item(3), item(2), item(0)]


def test_a_record_keeps_all_facts_of_a_block(disk: FakeDisk) -> None:
    items = [
        item(0, facts=Facts(100, 0, 9.75e8, b"8 bytes.", 7)),
        item(1, facts=Facts(0, 100, terms=1)),
        item(2, facts=Facts(expires_wall_s=1e12)),
        item(3, facts=Facts(expires_wall_s=-1.5)),
    ]
    log, _ = opened(disk)
    log.put(items)
    log.close()
    ends = [975_000_000, None, 2**32 - 2, 0]
    assert found(disk) == [
        one._replace(facts=one.facts._replace(expires_wall_s=end))
        for one, end in zip(items, ends, strict=True)
    ]


def test_a_log_of_an_older_version_is_restarted(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.put([item(1)])
    log.close()
    set_version(disk, 1)
    assert found(disk) == []
    assert len(disk.content(PATH)) == RECORD_BYTES


def test_a_place_that_is_put_again_has_the_newer_block(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.put([item(1, 5), item(2, 6)])
    log.put([item(3, 5)])
    log.remove([item(1, 5)])  # late, and for a block that no longer exists
    log.close()
    assert found(disk) == [item(2, 6), item(3, 5)]


def test_places_above_the_capacity_are_ignored(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.put([item(1, 5), item(2, 50)])
    log.close()
    assert found(disk, places=50) == [item(1, 5)]


def test_many_records_are_read_in_several_reads(disk: FakeDisk) -> None:
    log, _ = opened(disk, places=5000)
    puts = [item(n, n) for n in range(3000)]
    for start in range(0, 3000, 100):
        log.put(puts[start : start + 100])
    log.remove(puts[1000:1500])
    log.reserve(5000)
    log.close()
    assert found(disk, places=5000) == puts[:1000] + puts[1500:]


def test_a_record_with_any_byte_flipped_is_skipped() -> None:
    for byte in range(RECORD_BYTES):
        disk = FakeDisk(HOME)
        log, _ = opened(disk)
        log.put([item(1), item(2), item(3)])
        log.close()
        disk.flip(PATH, RECORD_BYTES * 2 + byte)
        assert found(disk) == [item(1), item(3)], byte


def test_a_torn_tail_is_cut_and_stays_away() -> None:
    for torn in range(1, RECORD_BYTES * 2):
        disk = FakeDisk(HOME)
        log, _ = opened(disk)
        log.put([item(1), item(2), item(3)])
        log.close()
        data = disk.content(PATH)[: RECORD_BYTES * 4]
        disk.put(PATH, data[:-torn] + bytes(torn))
        log, items = opened(disk)
        assert items == [item(1), item(2)][: 2 - (torn - 1) // RECORD_BYTES], torn
        log.put([item(9)])
        log.close()
        assert found(disk) == [*items, item(9)], torn


def test_leftovers_of_a_failed_append_do_not_come_back(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.put([item(1), item(2), item(3)])
    stale = disk.content(PATH)[RECORD_BYTES * 2 :]
    log.close()
    log, _ = opened(disk)
    log.remove([item(2), item(3)])
    log.put([item(4), item(20, 2)])
    log.close()
    disk.put(PATH, disk.content(PATH) + stale)  # older numbers: they hide no newer block either
    assert found(disk) == [item(1), item(4), item(20, 2)]


def test_no_write_to_a_wrong_place_hides_the_records_behind_it(disk: FakeDisk) -> None:
    """They have lower numbers then. Removals count all the same, also at later starts, and so does
    that a place was given to another block.
    """
    log, _ = opened(disk)
    log.put([item(n) for n in range(1, 8)])
    log.remove([item(3), item(4), item(5)])
    log.put([item(20, 4), item(21, 5)])
    log.remove([item(2), item(1)])
    log.put([item(1)])
    log.sync()
    log.put([item(1), item(8)])
    log.close()
    header, *records = (
        disk.content(PATH)[at : at + RECORD_BYTES] for at in range(0, 18 * RECORD_BYTES, 64)
    )
    # the last write lies on the removals of 3 and 4
    whole = [header, *records[:7], *records[15:], *records[9:15]]
    disk.put(PATH, b"".join(whole))
    left = [item(3), item(6), item(7), item(1), item(8)]  # the removal of 3 is not there any more
    log, items = opened(disk)
    assert items == left
    log.put([item(9)])
    log.close()
    assert found(disk) == [*left, item(9)]
    log, _ = opened(disk)
    log.compact(never)
    log.close()
    assert found(disk) == [*left, item(9)]


def test_records_behind_reserved_space_do_not_come_back(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.put([item(1)])
    log.number(4 * READ_RECORDS)
    log.put([item(5)])
    log.close()
    data, hole = disk.content(PATH), bytes(2 * READ_RECORDS * RECORD_BYTES)
    disk.put(PATH, data[: 2 * RECORD_BYTES] + hole + data[2 * RECORD_BYTES :])
    log, items = opened(disk)
    assert items == [item(1)]
    log.put([item(2)] * 2 * READ_RECORDS)  # as many as there was room for
    log.close()
    assert found(disk) == [item(1), item(2)]


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"something else" * 99])
def test_a_log_without_a_header_is_restarted(disk: FakeDisk, damage: bytes) -> None:
    disk.put(PATH, damage)
    log, items = opened(disk)
    assert items == []
    log.put([item(1)])
    log.close()
    assert found(disk) == [item(1)]


def test_a_header_with_any_byte_flipped_is_repaired() -> None:
    for byte in range(RECORD_BYTES):
        disk = FakeDisk(HOME)
        log, _ = opened(disk)
        whole = disk.content(PATH)[:RECORD_BYTES]
        log.put([item(1)])
        log.close()
        disk.flip(PATH, byte)
        assert found(disk) == [item(1)], byte
        assert disk.content(PATH)[:RECORD_BYTES] == whole, byte


def test_a_lost_log_is_rewritten_whole_or_not_at_all(disk: FakeDisk) -> None:
    log = new(disk)
    assert log.load(anew=False).lost
    assert not disk.files()
    log.write([item(1), item(2)], 1000)
    log.put([item(3)])
    log.close()
    log, items = opened(disk)
    assert items == [item(1), item(2), item(3)]
    assert log.number(1) > 1000
    log.close()


def test_a_log_of_another_namespace_is_restarted(disk: FakeDisk) -> None:
    log = new(disk, space=Namespace(hashlib.sha256(b"another").digest()))
    log.load()
    log.put([item(1)])
    log.close()
    assert found(disk) == []


def test_a_newer_version_is_refused_and_kept(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.put([item(1)])
    log.close()
    set_version(disk, 3)
    before = disk.content(PATH)
    log = new(disk)
    with pytest.raises(ConfigError, match=r"index\.log has format 3: expected 2 or older"):
        log.load()
    log.close()
    assert disk.content(PATH) == before
    assert disk.open_fds == 0


# ---- compaction


def fill(log: IndexLog, rounds: int) -> list[RecoveredBlock]:
    """Put and remove repeatedly; return the remaining items."""
    log.put([item(1), item(2)])
    for number in range(3, 3 + rounds):
        log.put([item(number, 7)])
        log.remove([item(number, 7)])
    log.put([item(99, 7)])
    return [item(1), item(2), item(99, 7)]


def test_dead_records_make_it_long(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    fill(log, 5)
    assert not log.is_long(3)
    fill(log, 5)
    assert log.is_long(3)
    log.compact(never)
    assert not log.is_long(3)
    log.close()


def test_compaction_keeps_the_live_records_and_their_order(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    log.reserve(PLACES)
    size = len(disk.content(PATH))
    live = fill(log, 20)
    log.compact(never)
    assert len(disk.content(PATH)) == size
    log.remove([item(1)])
    log.put([item(5)])
    log.close()
    assert found(disk) == [*live[1:], item(5)]
    assert disk.files().keys() == {str(PATH)}


def test_records_appended_during_a_compaction_are_kept(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    live = fill(log, 20)
    asked: list[int] = []

    def append_meanwhile() -> bool:
        asked.append(1)
        log.put([item(30)])
        log.remove([item(2)])
        return False

    log.compact(append_meanwhile)
    assert len(asked) == 1
    log.put([item(31)])
    log.close()
    assert found(disk) == [live[0], live[2], item(30), item(31)]


def test_a_removal_that_was_synced_during_a_compaction_survives_a_power_loss(
    disk: FakeDisk,
) -> None:
    log, _ = opened(disk)
    log.put([item(1), item(2), item(3)])
    log.sync()

    def stopped() -> bool:
        log.remove([item(2)])
        log.sync()
        return False

    log.compact(stopped)
    disk.crash("zero")
    assert found(disk) == [item(1), item(3)]


def test_a_compaction_stops_on_request(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    live = fill(log, 20)
    log.compact(lambda: True)
    assert disk.files().keys() == {str(PATH)}
    log.close()
    assert found(disk) == live


@pytest.mark.parametrize("call", ["open", "fsync", "rename", "pwritev"])
def test_compaction_on_a_full_disk_works_in_place(disk: FakeDisk, call: str) -> None:
    log, _ = opened(disk)
    live = fill(log, 20)
    disk.refuse = lambda name, path: errno.ENOSPC if name == call and path.endswith(".tmp") else 0
    log.compact(never)
    assert not log.is_long(3)
    log.put([item(40)])
    log.remove([item(2)])
    log.close()
    disk.refuse = lambda _name, _path: 0
    assert found(disk) == [live[0], live[2], item(40)]
    assert disk.files().keys() == {str(PATH)}


def test_a_compaction_that_fails_is_not_tried_again_at_once(disk: FakeDisk) -> None:
    log, _ = opened(disk)
    fill(log, 20)
    disk.refuse = lambda name, _path: errno.EIO if name == "preadv" else 0
    with pytest.raises(OSError, match="rror"):
        log.compact(never)
    assert not log.is_long(3)
    fill(log, 10)
    assert log.is_long(3)
    log.close()


def test_a_tag_is_never_zero() -> None:
    assert tag_of(BlockKey(bytes(32))) == 1
    assert tag_of(BlockKey(b"\1\2\3\4" + bytes(28))) == 0x04030201
