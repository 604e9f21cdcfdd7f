"""The index log: which block lies at which place, so that a restart need not read the blocks."""

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
from kvladder.tiers.files.directory import LOG_NAME, require_known
from kvladder.tiers.files.disk import Disk, sync_directory, write_all
from kvladder.tiers.label import NO_FACTS, Facts, RecoveredBlock, Ref, Write

RECORD_BYTES = 64
"""A power of two, so that no record straddles a sector: a torn write tears none."""
LOW_BITS = 17
"""Below the sequence: numbers are in the order of their sequences, whatever stands there."""
NEVER_S = (1 << 32) - 1
"""When a block expires that does not; else whole seconds since the epoch."""
MAGIC = b"kvindex\0"
VERSION = 2
READ_RECORDS = 1024
"""Records per read: the GIL is given up between two of them, also while compacting."""

# check; number: sequence, terms (3 bits), floor (7), priority (7); expires; place, of a removal its
# complement; salt; key
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
"""Whole ones, by ``_FIELDS``."""


def tag_of(key: BlockKey) -> int:
    """Four bytes of a key, never 0: enough to tell which of two blocks is at a place."""
    tag: int = _TAG.unpack(key)[0]
    return tag or 1


def held(records: Records, tags: array[int]) -> npt.NDArray[np.bool_]:
    """Which of these are of blocks that are at their places still, by the tags of those."""
    stored = np.frombuffer(tags, np.uint32)[records["place"]]
    found: npt.NDArray[np.bool_] = stored == np.maximum(records["tag"], 1)
    return found


def kept_of(records: Records) -> list[RecoveredBlock]:
    """The blocks that records of puts tell of."""
    low = records["number"] & np.uint64((1 << LOW_BITS) - 1)
    facts = map(_facts, low.tolist(), records["end_s"].tolist(), records["salt"].tolist())
    keys = map(itemgetter(0), _KEY.iter_unpack(records.tobytes()))
    return list(map(RecoveredBlock._make, zip(keys, records["place"].tolist(), facts, strict=True)))


@lru_cache(1024)  # blocks share them
def _facts(low: int, end_s: int, salt: bytes) -> Facts:
    return Facts(
        low & 127,
        low >> 7 & 127,
        None if end_s == NEVER_S else end_s,
        salt if any(salt) else b"",
        low >> 14,
    )


class LogContents(NamedTuple):
    """What a log tells of."""

    records: Records
    """Of the puts of what is stored, oldest first."""
    tags: array[int]
    """By place: the tag of the key that is stored there, 0 if none is."""
    lost: bool = False
    """Whether there is no log that can be used, nor was one begun: ``write`` has to do that."""


class _Scan(NamedTuple):
    """What reading a log from its start came to."""

    live: npt.NDArray[np.bool_]
    """By record, good or not: whether it put what is at its place now."""
    tags: npt.NDArray[np.uint32]
    """By place: the tag of its key, or 0."""
    good: int
    """How many records count."""
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
    ``close`` last; ``put``, ``remove`` and ``reserve`` may be called from any thread, ``compact``
    from one at a time. All block and raise OSError.

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

    # ---- start

    def load(self, *, anew: bool = True) -> LogContents:
        """Open the log and return what is stored.

        Without a log that can be used one is begun if ``anew`` says so; else it is lost.

        Raises
        ------
        ConfigError
            A newer version wrote it.
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
        self._disk.truncate(self._fd, self._end)  # what follows a torn record must not come back
        live = np.frombuffer(b"".join(self._live(self._fd, scan)), _FIELDS)
        if scan.beyond:  # they must not be believed if there are such places again
            with suppress(OSError):
                self.compact(lambda: False)
        return LogContents(live, array("I", scan.tags.tobytes()))

    def _begin(self, path: Path) -> int:
        """Make an empty log."""
        fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._disk, fd, self._header, 0)
        except OSError:
            self._disk.close(fd)
            raise
        return fd

    def _usable(self, fd: int) -> _Scan | None:
        """What is in a log; None if it is of another kind or namespace, or damaged all over.

        Records have checks of their own: a damaged header is mended if any of them is whole.
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
        """Begin the log that is lost, with these blocks in it, oldest first: all or nothing.

        Sequence numbers go on above ``sequence``.
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
        """Whole records; fewer at the end of the file."""
        buffer = memoryview(bytearray(length))
        got = self._disk.preadv(fd, [buffer], offset)
        return bytes(buffer[: got - got % RECORD_BYTES])

    def _scan(self, fd: int, end: int | None = None) -> _Scan:
        """Read all records up to ``end``. Zeros all over are the space in reserve, behind it."""
        nothing = np.empty(0, _FIELDS)
        parts = [(nothing["check"] == 0, nothing["place"], nothing["tag"])]
        sequence, offset, step = 0, RECORD_BYTES, READ_RECORDS * RECORD_BYTES
        while end is None or offset < end:
            slab = self._read(fd, offset, step if end is None else min(step, end - offset))
            if slab.count(0) == len(slab):
                break
            records = np.frombuffer(slab, _FIELDS)
            good, sequence = self._good(slab, records, sequence)
            parts.append((good, records["place"].copy(), np.maximum(records["tag"], 1)))
            offset += len(slab)
        good, place, tag = (np.concatenate(part) for part in zip(*parts, strict=True))
        at = np.where(place < 0, ~place, place)
        ours = good & (at < self._places_max)
        # what was put last at a place is there, unless it is that which was removed after it
        put, gone = np.flatnonzero(ours & (place >= 0)), np.flatnonzero(ours & (place < 0))
        last = np.full(self._places_max, -1)
        last[at[put]] = put
        newest = last[at[gone]]
        undone = (newest >= 0) & (newest < gone) & (tag[newest] == tag[gone])
        last[at[gone[undone]]] = -1
        taken = np.flatnonzero(last >= 0)
        live, tags = np.zeros(len(good), np.bool_), np.zeros(self._places_max, np.uint32)
        live[last[taken]] = True
        tags[taken] = tag[last[taken]]
        counted = np.flatnonzero(good)
        last_end = RECORD_BYTES * (int(counted[-1]) + 2 if len(counted) else 1)
        is_beyond = bool((good & ~ours).any())
        return _Scan(live, tags, len(counted), sequence, last_end, is_beyond)

    def _good(
        self, slab: bytes, records: Records, before: int
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Which records are whole and in order behind the number ``before``; the last such one."""
        bodies = map(itemgetter(0), _BODY.iter_unpack(slab))
        digests = map(xxh3_64_intdigest, bodies, repeat(self._seed))
        whole = np.fromiter(digests, np.uint64, len(records)) == records["check"]
        numbers = np.empty(len(records) + 1, np.uint64)
        numbers[0] = before
        numbers[1:] = np.where(whole, records["number"], 0)
        highest = np.maximum.accumulate(numbers)
        return numbers[1:] > highest[:-1], int(highest[-1])

    def _live(self, fd: int, scan: _Scan) -> Iterator[bytes]:
        """The records of what is stored, oldest first."""
        for start in range(0, len(scan.live), READ_RECORDS):
            live = scan.live[start : start + READ_RECORDS]
            if live.any():
                slab = self._read(fd, RECORD_BYTES * (1 + start), RECORD_BYTES * len(live))
                records = np.frombuffer(slab, _FIELDS)
                yield slab if live.all() else records[live[: len(records)]].tobytes()

    # ---- writing

    def number(self, count: int) -> int:
        """The first of ``count`` new sequence numbers, none of which is given out again.

        Never waits for the disk.
        """
        with self._numbers:
            first = self._sequence + 1
            self._sequence += count
            return first

    def put(self, blocks: Sequence[Write | RecoveredBlock]) -> None:
        """Tell that these are stored: all of it counts from then on, or nothing."""
        self._append([(one.key, one.place, one.facts) for one in blocks])

    def remove(self, blocks: Sequence[Ref | RecoveredBlock]) -> None:
        """Tell that these are not stored any more: all of it counts from then on, or nothing."""
        self._append([(one.key, ~one.place, NO_FACTS) for one in blocks])

    def _append(self, blocks: Sequence[tuple[BlockKey, int, Facts]]) -> None:
        with self._lock:
            assert self._fd is not None
            records = bytearray()
            for number, (key, place, facts) in enumerate(blocks, self.number(len(blocks))):
                end_s = NEVER_S
                if facts.expires_wall_s is not None:  # rounded down: it may go early, not late
                    end_s = max(0, min(int(facts.expires_wall_s), NEVER_S - 1))
                low = facts.terms << 14 | facts.floor << 7 | facts.priority
                record = _RECORD.pack(0, number << LOW_BITS | low, end_s, place, facts.salt, key)
                records += _CHECK.pack(xxh3_64_intdigest(record[8:], self._seed)) + record[8:]
            write_all(self._disk, self._fd, records, self._end)
            self._end += len(records)
            self._reserved = max(self._reserved, self._end)

    def reserve(self, places: int) -> None:
        """Preallocate for so many places: a disk that fills up later does not stop the log."""
        records = 1 + 2 * places + self._slack + READ_RECORDS  # before it is compacted
        with self._lock:
            self._extend(RECORD_BYTES * records)

    def _extend(self, end: int) -> None:
        assert self._fd is not None
        if end > self._reserved:
            self._disk.fallocate(self._fd, self._reserved, end - self._reserved)
            self._reserved = end

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
                with suppress(OSError):  # then the next append says that the disk is full
                    self._extend(reserved)
        finally:
            self._disk.close(fd)

    def _follow(self, old: int, fd: int, start: int, end: int) -> int:
        """Copy what was appended to ``old`` since, as it is; returns the new end."""
        records = self._read(old, start, self._end - start)
        if len(records) < self._end - start:
            raise OSError("the end of the log cannot be read")
        write_all(self._disk, fd, records, end)
        if records:  # a removal that was synced before must not be lost with the old log
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
        """Make what was appended, and the name of the log, survive a power cut."""
        self.flush()
        sync_directory(self._disk, self.path.parent)

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
