"""The index log: which block lies at which place, so that a restart need not read the blocks."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import compress, repeat
from operator import lt
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvladder.errors import ConfigError
from kvladder.keys import KEY_BYTES, SALT_BYTES, BlockKey, Namespace
from kvladder.tiers.base import NO_SLOT, Item
from kvladder.tiers.files.disk import Disk, sync_directory, write_all
from kvladder.tiers.files.meta import LOG_NAME

RECORD_BYTES = 64
"""A power of two, so that no record straddles a sector: a torn write tears none."""
LOW_BITS = 17
"""Below the sequence: numbers are in the order of their sequences, whatever stands there."""
PUT = 1
REMOVE = 2
NEVER_S = (1 << 32) - 1
"""When a block expires that does not; else whole seconds since the epoch."""

# check; number: sequence, terms (3 bits), floor (7), priority (7); expires; place, of a removal its
# complement; salt; key
_RECORD = Struct(f"<QQIi8s{KEY_BYTES}s")
_TAG = Struct("<I28x")
_NO_SALT = bytes(SALT_BYTES)

assert _RECORD.size == RECORD_BYTES


def tag_of(key: BlockKey) -> int:
    """Four bytes of a key, never 0: enough to tell which of two blocks is at a place."""
    tag: int = _TAG.unpack(key)[0]
    return tag or 1


def items_of(records: memoryview) -> list[Item]:
    """The blocks that PUT records tell of."""
    return [
        Item(
            BlockKey(key),
            place,
            NO_SLOT,
            number & 127,
            number >> 7 & 127,
            None if end_s == NEVER_S else end_s,
            b"" if salt == _NO_SALT else salt,
            number >> 14 & 7,
        )
        for _, number, end_s, place, salt, key in _RECORD.iter_unpack(records)
    ]


def record(kind: int, sequence: int, item: Item) -> bytes:
    """What tells that ``item`` was put or removed, without the 8 bytes of its check."""
    end_s = NEVER_S
    if item.expires_wall_s is not None:  # rounded down: a block may go early, not late
        end_s = max(0, min(int(item.expires_wall_s), NEVER_S - 1))
    low = item.terms << 14 | item.floor << 7 | item.priority
    place = item.place if kind == PUT else ~item.place
    packed = _RECORD.pack(0, sequence << LOW_BITS | low, end_s, place, item.salt, item.key)
    return packed[8:]


MAGIC = b"kvindex\0"
VERSION = 2
READ_RECORDS = 1024
"""Records per read: the GIL is given up between two of them, also while compacting."""

_HEADER = Struct("<8sHH4x32s8xQ")
_BODY = Struct(f"<8x{RECORD_BYTES - 8}s")
_ORDER = Struct("<QQ48x")
_WHERE = Struct("<20xi8xI28x")  # place, first 4 bytes of the key
_WHOLE = Struct(f"{RECORD_BYTES}s")

assert _HEADER.size == RECORD_BYTES


class Found(NamedTuple):
    """What a log tells of."""

    records: bytes
    """The PUT records of what is stored, oldest first."""
    tags: array[int]
    """By place: the tag of the key that is stored there, 0 if none is."""
    lost: bool = False
    """Whether there is no log that can be used, nor was one begun: ``write`` has to do that."""


class _Scan(NamedTuple):
    """What reading a log from its start came to."""

    last: array[int]
    """By place: which of the good records put what is there now, or -1."""
    tags: array[int]
    """By place: the tag of its key, or 0."""
    slabs: list[tuple[int, int, bool]]
    """Where good records are: offset, length, and whether all of them there are good."""
    records: int
    sequence: int
    """The highest sequence number, with what stands below it."""
    end: int
    """Where the last good record ends."""
    beyond: bool
    """Whether there are records of places that the tier does not have any more."""


class IndexLog:
    """Append-only records of puts and removals, each with its own check and a sequence number.

    A record counts if it is whole and has a higher number than those before it; others, torn by a
    crash or left over from before a compaction, are passed over. ``load`` comes first and
    ``close`` last; ``append`` and ``reserve`` may be called from any thread, ``compact`` from one
    at a time. All block and raise OSError.

    Parameters
    ----------
    home:
        The directory of the namespace.
    places_max:
        Records of places beyond it are ignored.
    slack_records:
        Dead records that are not worth compacting.
    """

    def __init__(
        self, disk: Disk, home: Path, space: Namespace, *, places_max: int, slack_records: int
    ) -> None:
        self._disk = disk
        self._path = home / LOG_NAME
        self._space = space
        self._seed = int.from_bytes(space[:8], "little")
        self._places_max = places_max
        self._slack = slack_records
        self._lock = threading.Lock()
        self._numbers = threading.Lock()
        self._fd: int | None = None
        self._end = RECORD_BYTES
        self._reserved = 0
        self._sequence = 0
        self._compact_above = 0

    # ---- start

    def load(self, *, anew: bool = True) -> Found:
        """Open the log and return what is stored.

        Without a log that can be used one is begun if ``anew`` says so; else it is lost.

        Raises
        ------
        ConfigError
            A newer version wrote it.
        """
        with suppress(FileNotFoundError):
            self._fd = self._disk.open(self._path, os.O_RDWR)
        scan = None if self._fd is None else self._usable(self._fd)
        if self._fd is None or scan is None:
            self.close()
            if anew:
                self._fd = self._begin(self._path)
            return Found(b"", array("I", [0]) * self._places_max, lost=not anew)
        self._sequence = scan.sequence >> LOW_BITS
        self._end = self._reserved = scan.end
        self._disk.truncate(self._fd, self._end)  # what follows a torn record must not come back
        live = b"".join(self._live(self._fd, scan))
        if scan.beyond:  # they must not be believed if there are such places again
            with suppress(OSError):
                self.compact(lambda: False)
        return Found(live, scan.tags)

    def _begin(self, path: Path) -> int:
        """Make an empty log."""
        fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._disk, fd, self._header(), 0)
        except OSError:
            self._disk.close(fd)
            raise
        return fd

    def _header(self) -> bytes:
        fields = (MAGIC, VERSION, RECORD_BYTES, self._space)
        check = xxh3_64_intdigest(_HEADER.pack(*fields, 0)[:-8])
        return _HEADER.pack(*fields, check)

    def _usable(self, fd: int) -> _Scan | None:
        """What is in a log; None if it is of another kind or namespace, or damaged all over.

        Records have checks of their own: a damaged header is mended if any of them is whole.
        """
        header = bytearray(RECORD_BYTES)
        self._disk.preadv(fd, [memoryview(header)], 0)
        magic, version, *_, check = _HEADER.unpack(header)
        is_whole = check == xxh3_64_intdigest(header[:-8])
        if is_whole and magic == MAGIC and version > VERSION:
            self.close()
            raise ConfigError(
                f"{self._path} is of format {version}, which is newer than {VERSION}",
                path="path",
                hint="use the version of kvladder that wrote it, or another path",
            )
        wanted = self._header()
        if bytes(header) == wanted:
            return self._scan(fd)
        scan = None if is_whole else self._scan(fd)
        if scan is None or not scan.records:
            return None
        write_all(self._disk, fd, wanted, 0)
        return scan

    def write(self, items: Sequence[Item], sequence: int) -> None:
        """Begin the log that is lost, with these blocks in it, oldest first: all or nothing.

        Sequence numbers go on above ``sequence``.
        """
        aside = self._path.with_name(LOG_NAME + ".tmp")
        fd = self._begin(aside)
        try:
            self._sequence = sequence
            end = RECORD_BYTES
            for start in range(0, len(items), READ_RECORDS):
                records = self._packed(PUT, items[start : start + READ_RECORDS])
                write_all(self._disk, fd, records, end)
                end += len(records)
            self._disk.fsync(fd)
            self._disk.rename(aside, self._path)
        except OSError:
            self._disk.close(fd)
            raise
        self._fd, self._end, self._reserved = fd, end, end

    # ---- reading

    def _read(self, fd: int, offset: int, length: int) -> bytes:
        """Whole records; fewer at the end of the file."""
        buffer = bytearray(length)
        got = self._disk.preadv(fd, [memoryview(buffer)], offset)
        return bytes(memoryview(buffer)[: got - got % RECORD_BYTES])

    def _good(self, slab: bytes, before: int) -> tuple[bytes, int, int]:
        """The records that are whole and in order, the last one's number, and where it ends."""
        bodies = [body for (body,) in _BODY.iter_unpack(slab)]
        digests = list(map(xxh3_64_intdigest, bodies, repeat(self._seed)))
        orders = list(_ORDER.iter_unpack(slab))
        checks = [check for check, _ in orders]
        numbers = [number for _, number in orders]
        if digests == checks and before < numbers[0] and all(map(lt, numbers, numbers[1:])):
            return slab, numbers[-1], len(slab)
        good, end = bytearray(), 0
        for start, digest, (check, number) in zip(
            range(0, len(slab), RECORD_BYTES), digests, orders, strict=True
        ):
            if digest == check and number > before:
                before, end = number, start + RECORD_BYTES
                good += slab[start:end]
        return bytes(good), before, end

    def _scan(self, fd: int, end: int | None = None) -> _Scan:
        """Read all records up to ``end``. Zeros all over are the space in reserve, behind it."""
        last = array("q", [-1]) * self._places_max
        tags = array("I", [0]) * self._places_max
        slabs: list[tuple[int, int, bool]] = []
        number, sequence, last_end, beyond = 0, 0, RECORD_BYTES, False
        offset, step = RECORD_BYTES, READ_RECORDS * RECORD_BYTES
        places_max = self._places_max
        while end is None or offset < end:
            slab = self._read(fd, offset, step if end is None else min(step, end - offset))
            if slab.count(0) == len(slab):
                break
            records, sequence, good_end = self._good(slab, sequence)
            if records:
                slabs.append((offset, len(slab), len(records) == len(slab)))
                last_end = offset + good_end
            for place, tag in _WHERE.iter_unpack(records):
                if place < 0:
                    if ~place >= places_max:
                        beyond = True
                    elif tags[place := ~place] == (tag or 1):
                        last[place] = -1
                        tags[place] = 0
                elif place < places_max:
                    last[place] = number
                    tags[place] = tag or 1
                else:
                    beyond = True
                number += 1
            offset += len(slab)
        return _Scan(last, tags, slabs, number, sequence, last_end, beyond)

    def _live(self, fd: int, scan: _Scan) -> Iterator[bytes]:
        """The records of what is stored, oldest first."""
        last, places_max = scan.last, self._places_max
        all_live = scan.records == len(last) - last.count(-1)
        number = sequence = 0
        for offset, length, whole in scan.slabs:
            records = self._read(fd, offset, length)
            if not whole:
                records, sequence, _ = self._good(records, sequence)
            sequence = _ORDER.unpack_from(records, len(records) - RECORD_BYTES)[1]
            if all_live:
                yield records
                continue
            wanted: list[bool] = [
                0 <= place < places_max and last[place] == index
                for index, (place, _) in enumerate(_WHERE.iter_unpack(records), number)
            ]
            number += len(wanted)
            yield b"".join(compress((r for (r,) in _WHOLE.iter_unpack(records)), wanted))

    # ---- writing

    def number(self, count: int) -> int:
        """The first of ``count`` new sequence numbers, none of which is given out again.

        Never waits for the disk.
        """
        with self._numbers:
            first = self._sequence + 1
            self._sequence += count
            return first

    def append(self, kind: int, items: Sequence[Item]) -> None:
        """Write one record per item: all of them count from then on, or none."""
        with self._lock:
            assert self._fd is not None
            records = self._packed(kind, items)
            write_all(self._disk, self._fd, records, self._end)
            self._end += len(records)
            self._reserved = max(self._reserved, self._end)

    def _packed(self, kind: int, items: Sequence[Item]) -> bytes:
        records = bytearray()
        for number, item in enumerate(items, self.number(len(items))):
            body = record(kind, number, item)
            records += xxh3_64_intdigest(body, self._seed).to_bytes(8, "little") + body
        return bytes(records)

    def _room(self, places: int) -> int:
        """Bytes that the log of so many places may reach before it is compacted."""
        return RECORD_BYTES * (1 + 2 * places + self._slack + READ_RECORDS)

    def reserve(self, places: int) -> None:
        """Preallocate for so many places: a disk that fills up later does not stop the log."""
        with self._lock:
            assert self._fd is not None
            missing = self._room(places) - self._reserved
            if missing > 0:
                self._disk.fallocate(self._fd, self._reserved, missing)
                self._reserved += missing

    def is_long(self, blocks: int) -> bool:
        """Whether the log of so many stored blocks has so many dead records as to be compacted."""
        records = self._end // RECORD_BYTES - 1
        return records > max(2 * blocks + self._slack, self._compact_above)

    def compact(self, stopped: Callable[[], bool]) -> None:
        """Write the live records aside and put them in the log's place; appends go on meanwhile.

        Where that fails, e.g. on a full disk, they are written over the log's start instead: a
        crash before the end of that makes the tier forget, no more.
        """
        with self._lock:
            assert self._fd is not None
            old, end = self._fd, self._end
        aside = self._path.with_name(LOG_NAME + ".tmp")
        try:
            self._compact_aside(aside, old, end, stopped)
        except OSError:
            with suppress(OSError):
                self._disk.unlink(aside)
            self._compact_in_place()
        finally:
            self._compact_above = self._end // RECORD_BYTES + self._slack

    def _compact_aside(
        self, aside: Path, old: int, old_end: int, stopped: Callable[[], bool]
    ) -> None:
        fd = self._begin(aside)
        try:
            end = RECORD_BYTES
            for records in self._live(old, self._scan(old, old_end)):
                if stopped():
                    break
                write_all(self._disk, fd, records, end)
                end += len(records)
            else:
                self._disk.fsync(fd)
                with self._lock:
                    end = self._follow(old, fd, old_end, end)
                    self._disk.rename(aside, self._path)
                    room = self._reserved - end
                    self._fd, self._end, self._reserved = fd, end, end
                    fd = old
                    if room > 0:
                        with suppress(OSError):  # then the next append says that the disk is full
                            self._disk.fallocate(self._fd, end, room)
                            self._reserved = end + room
                return
            self._disk.unlink(aside)
        finally:
            self._disk.close(fd)

    def _follow(self, old: int, fd: int, start: int, end: int) -> int:
        """Copy what was appended to ``old`` since, as it is; returns the new end."""
        buffer = memoryview(bytearray(self._end - start))
        got = self._disk.preadv(old, [buffer], start)
        if got < len(buffer):
            raise OSError("the end of the log cannot be read")
        write_all(self._disk, fd, buffer, end)
        if got:  # a removal that was synced before must not be lost with the old log
            self._disk.fsync(fd)
        return end + got

    def _compact_in_place(self) -> None:
        with self._lock:
            assert self._fd is not None
            live = b"".join(self._live(self._fd, self._scan(self._fd, self._end)))
            write_all(self._disk, self._fd, live, RECORD_BYTES)
            self._end = RECORD_BYTES + len(live)

    # ---- end

    def sync(self) -> None:
        """Make what was appended, and the name of the log, survive a power cut."""
        self.flush()
        sync_directory(self._disk, self._path.parent)

    def flush(self) -> None:
        """Make the log survive a power cut."""
        with self._lock:
            if self._fd is not None:
                self._disk.fsync(self._fd)

    def close(self) -> None:
        """Close the file; nothing is under way."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._disk.close(fd)
