"""The index log: records which block lies at which place, so that a restart reads no blocks."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvladder.keys import KEY_BYTES, BlockKey, Namespace
from kvladder.tiers.files.disk import Disk, sync_directory, write_all
from kvladder.tiers.files.meta import LOG_NAME, require_known
from kvladder.tiers.label import NO_FACTS, Facts, RecoveredBlock, Ref, Write

RECORD_BYTES = 64
"""Size of a record: a power of two, so no record crosses a sector and no write tears one."""
LOW_BITS = 17
"""Number of bits below the sequence, for the facts; they do not change the order of numbers."""
NEVER_S = (1 << 32) - 1
"""Expiry of a block that never expires; other values are whole seconds since the epoch."""
MAGIC = b"kvindex\0"
VERSION = 2
READ_RECORDS = 1024
"""Records per read; the GIL is released between two reads, also while compacting."""

# check; number: sequence, terms (3 bits), floor (7), priority (7); expiry; place, or its complement
# for a removal; salt; key
_RECORD = Struct(f"<QQIi8s{KEY_BYTES}s")
_FIELDS = np.dtype(
    [
        ("check", "<u8"),
        ("number", "<u8"),
        ("end_s", "<u4"),
        ("place", "<i4"),
        ("salt", "V8"),
        ("tag", "<u4"),
        ("key", "V28"),
    ]
)
_BODY = Struct(f"<8x{RECORD_BYTES - 8}s")
_CHECK = Struct("<Q")
_TAG = Struct("<I28x")
_KEY = Struct(f"<32x{KEY_BYTES}s")
_HEADER = Struct("<8sHH4x32s8xQ")

assert _RECORD.size == _FIELDS.itemsize == _HEADER.size == RECORD_BYTES

Records: TypeAlias = npt.NDArray[np.void]
"""Undamaged records, with the fields ``_FIELDS``."""


def tag_of(key: BlockKey) -> int:
    """Return four bytes of a key, never 0: enough to tell which of two blocks is at a place."""
    tag: int = _TAG.unpack(key)[0]
    return tag or 1


def held(records: Records, tags: array[int]) -> npt.NDArray[np.bool_]:
    """Return which of these blocks are still at their places, according to the tags."""
    stored = np.frombuffer(tags, np.uint32)[records["place"]]
    found: npt.NDArray[np.bool_] = stored == np.maximum(records["tag"], 1)
    return found


def kept_of(records: Records) -> list[RecoveredBlock]:
    """Return the blocks that these records of puts describe."""
    low = records["number"] & np.uint64((1 << LOW_BITS) - 1)
    facts = map(_facts, low.tolist(), records["end_s"].tolist(), records["salt"].tolist())
    keys = map(itemgetter(0), _KEY.iter_unpack(records.tobytes()))
    return list(map(RecoveredBlock._make, zip(keys, records["place"].tolist(), facts, strict=True)))


@lru_cache(1024)  # many blocks have equal facts and share one object
def _facts(low: int, end_s: int, salt: bytes) -> Facts:
    return Facts(
        low & 127,
        low >> 7 & 127,
        None if end_s == NEVER_S else end_s,
        salt if any(salt) else b"",
        low >> 14,
    )


class LogContents(NamedTuple):
    """The blocks that a log says are stored."""

    records: Records
    """Put records of the stored blocks, oldest first."""
    tags: array[int]
    """For each place: the tag of the key that is stored there, or 0."""
    lost: bool = False
    """True if there is no usable log and none was begun: then ``write`` must begin one."""


class _Scan(NamedTuple):
    """The result of reading a log from its start."""

    live: npt.NDArray[np.bool_]
    """For each record, valid or not: True if it put the block that is at its place now."""
    tags: npt.NDArray[np.uint32]
    """For each place: the tag of its key, or 0."""
    good: int
    """Number of records that count."""
    sequence: int
    """Highest ``number`` of a record: the sequence number, with the low bits."""
    end: int
    """Offset in the file where the last undamaged record ends."""
    beyond: bool
    """True if there are records of places that the tier no longer has."""


class IndexLog:
    """Append-only records of puts and removals, each with its own check and a sequence number.

    A record counts if it is undamaged and has a higher number than all records before it. Other
    records were torn by a crash, are left over from before a compaction, or lie behind a write that
    the disk did at a wrong place. No put of them counts. But each undamaged one proves that older
    puts at its place are void, so that removed blocks do not come back. Call ``load`` first and
    ``close`` last. Any thread may call ``put``, ``remove`` and ``reserve``; only
    one thread at a time may call ``compact``. All methods block and raise OSError.

    Parameters
    ----------
    home:
        The directory of the namespace.
    places_max:
        Number of places; records of places beyond it are ignored.
    slack_records:
        Number of dead records that are not worth compacting.
    """

    def __init__(
        self, disk: Disk, home: Path, space: Namespace, *, places_max: int, slack_records: int
    ) -> None:
        self._disk = disk
        self.path = home / LOG_NAME
        self._aside = home / f"{LOG_NAME}.tmp"
        fields = (MAGIC, VERSION, RECORD_BYTES, space)
        check = xxh3_64_intdigest(_HEADER.pack(*fields, 0)[:-8])
        self._header = _HEADER.pack(*fields, check)
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

    def resize(self, places_max: int) -> None:
        """Take part in another capacity, from the next ``load`` on."""
        self._places_max = places_max

    # ---- start

    def load(self, *, anew: bool = True) -> LogContents:
        """Open the log and return its contents.

        Without a usable log, begin an empty one if ``anew``; else report the log as lost.

        Raises
        ------
        ConfigError
            A newer version of kvladder wrote the log.
        """
        scan = None
        with suppress(FileNotFoundError):
            self._fd = self._disk.open(self.path, os.O_RDWR)
            scan = self._usable(self._fd)
        if self._fd is None or scan is None:
            self.close()
            if anew:
                self._fd = self._begin(self.path)
            nothing = np.empty(0, _FIELDS)
            return LogContents(nothing, array("I", [0]) * self._places_max, lost=not anew)
        self._sequence = scan.sequence >> LOW_BITS
        self._end = self._reserved = scan.end
        self._disk.truncate(self._fd, self._end)  # records after a torn one must not come back
        live = np.frombuffer(b"".join(self._live(self._fd, scan)), _FIELDS)
        if scan.beyond:  # these records must not count if the capacity grows again
            with suppress(OSError):
                self.compact(lambda: False)
        return LogContents(live, array("I", scan.tags.tobytes()))

    def _begin(self, path: Path) -> int:
        """Create an empty log and return its descriptor."""
        fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._disk, fd, self._header, 0)
        except OSError:
            self._disk.close(fd)
            raise
        return fd

    def _usable(self, fd: int) -> _Scan | None:
        """Read a log; return None if it is of another kind or namespace, or wholly damaged.

        Records have checks of their own, so a damaged header is repaired if any record is valid.
        """
        header = self._read(fd, 0, RECORD_BYTES).ljust(RECORD_BYTES, b"\0")
        if header == self._header:
            return self._scan(fd)
        magic, version, *_, check = _HEADER.unpack(header)
        if check == xxh3_64_intdigest(header[:-8]):
            if magic == MAGIC:
                require_known(self.path, version, VERSION)
            return None
        scan = self._scan(fd)
        if not scan.good:
            return None
        write_all(self._disk, fd, self._header, 0)
        return scan

    def write(self, kept: Sequence[RecoveredBlock], sequence: int) -> None:
        """Write a new log in place of the lost one, with these blocks, oldest first.

        Writes all or nothing. New sequence numbers begin above ``sequence``.
        """
        self._fd, self._sequence = self._begin(self._aside), sequence
        try:
            self.put(kept)
            self._disk.fsync(self._fd)
            self._disk.rename(self._aside, self.path)
        except OSError:
            self.close()
            raise

    # ---- reading

    def _read(self, fd: int, offset: int, length: int) -> bytes:
        """Read whole records; fewer at the end of the file."""
        buffer = memoryview(bytearray(length))
        got = self._disk.preadv(fd, [buffer], offset)
        return bytes(buffer[: got - got % RECORD_BYTES])

    def _scan(self, fd: int, end: int | None = None) -> _Scan:
        """Read all records up to ``end``, or up to the first read of zeros: the reserved space."""
        nothing = np.empty(0, _FIELDS)
        no, numbers = nothing["check"] == 0, nothing["number"]
        parts = [(no, no, numbers, nothing["place"], nothing["tag"])]
        sequence, offset, step = 0, RECORD_BYTES, READ_RECORDS * RECORD_BYTES
        while end is None or offset < end:
            slab = self._read(fd, offset, step if end is None else min(step, end - offset))
            if slab.count(0) == len(slab):
                break
            records = np.frombuffer(slab, _FIELDS)
            whole, good, sequence = self._good(slab, records, sequence)
            said = records["number"].copy(), records["place"].copy(), np.maximum(records["tag"], 1)
            parts.append((whole, good, *said))
            offset += len(slab)
        whole, good, number, place, tag = map(np.concatenate, zip(*parts, strict=True))
        at = np.where(place < 0, ~place, place)
        known = at < self._places_max
        # the last put at a place counts, unless a later removal names the same key, or the place
        # was given to a block whose put is skipped
        put = np.flatnonzero(good & known & (place >= 0))
        gone = np.flatnonzero(whole & known & ((place < 0) | ~good))
        last = np.full(self._places_max, -1)
        last[at[put]] = put
        newest, is_put = last[at[gone]], place[gone] >= 0
        is_later = (newest >= 0) & (number[newest] < number[gone])
        undone = is_later & (is_put | (tag[newest] == tag[gone]))
        last[at[gone[undone]]] = -1
        taken = np.flatnonzero(last >= 0)
        live, tags = np.zeros(len(good), np.bool_), np.zeros(self._places_max, np.uint32)
        live[last[taken]] = True
        tags[taken] = tag[last[taken]]
        undamaged = np.flatnonzero(whole)
        last_end = RECORD_BYTES * (int(undamaged[-1]) + 2 if len(undamaged) else 1)
        is_beyond = bool((good & ~known).any())
        return _Scan(live, tags, int(good.sum()), sequence, last_end, is_beyond)

    def _good(
        self, slab: bytes, records: Records, before: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], int]:
        """Return which records are undamaged, and which of these in order after ``before``.

        Also returns the highest number so far.
        """
        bodies = map(itemgetter(0), _BODY.iter_unpack(slab))
        digests = map(xxh3_64_intdigest, bodies, repeat(self._seed))
        whole = np.fromiter(digests, np.uint64, len(records)) == records["check"]
        numbers = np.empty(len(records) + 1, np.uint64)
        numbers[0] = before
        numbers[1:] = np.where(whole, records["number"], 0)
        highest = np.maximum.accumulate(numbers)
        return whole, numbers[1:] > highest[:-1], int(highest[-1])

    def _live(self, fd: int, scan: _Scan) -> Iterator[bytes]:
        """Yield the records of the stored blocks, oldest first."""
        for start in range(0, len(scan.live), READ_RECORDS):
            live = scan.live[start : start + READ_RECORDS]
            if live.any():
                slab = self._read(fd, RECORD_BYTES * (1 + start), RECORD_BYTES * len(live))
                records = np.frombuffer(slab, _FIELDS)
                yield slab if live.all() else records[live[: len(records)]].tobytes()

    # ---- writing

    def number(self, count: int) -> int:
        """Reserve ``count`` new sequence numbers and return the first; never wait for the disk."""
        with self._numbers:
            first = self._sequence + 1
            self._sequence += count
            return first

    def put(self, blocks: Sequence[Write | RecoveredBlock]) -> None:
        """Record that these blocks are stored; after an error, the next append overwrites this."""
        self._append([(one.key, one.place, one.facts) for one in blocks])

    def remove(self, blocks: Sequence[Ref | RecoveredBlock]) -> None:
        """Record that these blocks are removed; after an error, the next append overwrites this."""
        self._append([(one.key, ~one.place, NO_FACTS) for one in blocks])

    def _append(self, blocks: Sequence[tuple[BlockKey, int, Facts]]) -> None:
        with self._lock:
            assert self._fd is not None
            records = bytearray()
            for number, (key, place, facts) in enumerate(blocks, self.number(len(blocks))):
                end_s = NEVER_S
                if facts.expires_wall_s is not None:  # rounded down: early is allowed, late is not
                    end_s = max(0, min(int(facts.expires_wall_s), NEVER_S - 1))
                low = facts.terms << 14 | facts.floor << 7 | facts.priority
                record = _RECORD.pack(0, number << LOW_BITS | low, end_s, place, facts.salt, key)
                records += _CHECK.pack(xxh3_64_intdigest(record[8:], self._seed)) + record[8:]
            write_all(self._disk, self._fd, records, self._end)
            self._end += len(records)
            self._reserved = max(self._reserved, self._end)

    def reserve(self, places: int) -> None:
        """Preallocate space for this many places, so that a full disk does not stop the log."""
        records = 1 + 2 * places + self._slack + READ_RECORDS  # the most before a compaction
        with self._lock:
            self._extend(RECORD_BYTES * records)

    def _extend(self, end: int) -> None:
        assert self._fd is not None
        if end > self._reserved:
            self._disk.fallocate(self._fd, self._reserved, end - self._reserved)
            self._reserved = end

    def is_long(self, blocks: int) -> bool:
        """Return whether a log of ``blocks`` places has enough dead records to be compacted."""
        records = self._end // RECORD_BYTES - 1
        return records > max(2 * blocks + self._slack, self._compact_above)

    def compact(self, stopped: Callable[[], bool]) -> None:
        """Replace the log by its live records, written aside; appends continue meanwhile.

        If that fails, e.g. on a full disk, write the live records over the log's start instead. A
        crash during that makes the tier forget blocks, but does no other harm.
        """
        with self._lock:
            assert self._fd is not None
            old, end = self._fd, self._end
        try:
            self._compact_aside(old, end, stopped)
        except OSError:
            with suppress(OSError):
                self._disk.unlink(self._aside)
            self._compact_in_place()
        finally:
            self._compact_above = self._end // RECORD_BYTES + self._slack

    def _compact_aside(self, old: int, old_end: int, stopped: Callable[[], bool]) -> None:
        fd, end = self._begin(self._aside), RECORD_BYTES
        try:
            for records in self._live(old, self._scan(old, old_end)):
                if stopped():
                    self._disk.unlink(self._aside)
                    return
                write_all(self._disk, fd, records, end)
                end += len(records)
            self._disk.fsync(fd)
            with self._lock:
                end = self._follow(old, fd, old_end, end)
                self._disk.rename(self._aside, self.path)
                reserved = self._reserved
                self._fd, self._end, self._reserved, fd = fd, end, end, old
                with suppress(OSError):  # if the disk is full, a later append reports it
                    self._extend(reserved)
        finally:
            self._disk.close(fd)

    def _follow(self, old: int, fd: int, start: int, end: int) -> int:
        """Copy the records appended to ``old`` since ``start``; return the new log's end."""
        records = self._read(old, start, self._end - start)
        if len(records) < self._end - start:
            raise OSError("the end of the log cannot be read")
        write_all(self._disk, fd, records, end)
        if records:  # a removal already synced to the old log must not be lost with it
            self._disk.fsync(fd)
        return end + len(records)

    def _compact_in_place(self) -> None:
        with self._lock:
            assert self._fd is not None
            live = b"".join(self._live(self._fd, self._scan(self._fd, self._end)))
            write_all(self._disk, self._fd, live, RECORD_BYTES)
            self._end = RECORD_BYTES + len(live)

    # ---- end

    def sync(self) -> None:
        """Make the appended records and the log's name survive a power cut."""
        self.flush()
        sync_directory(self._disk, self.path.parent)

    def flush(self) -> None:
        """Make the appended records survive a power cut."""
        with self._lock:
            if self._fd is not None:
                self._disk.fsync(self._fd)

    def close(self) -> None:
        """Close the file. No call may be running."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._disk.close(fd)
