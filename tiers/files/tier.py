"""The files tier: blocks on a local NVMe drive, found again after a restart or a crash."""

from __future__ import annotations

import asyncio
import errno
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from kvladder.errors import ClosedError, TierError, TierFull
from kvladder.keys import BlockKey
from kvladder.policy.eviction import STATE_MAX
from kvladder.tiers.base import Tier
from kvladder.tiers.blocking import BlockingPool
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.disk import Disk, explained, is_full, read_file, replace_file
from kvladder.tiers.files.header import HEADER_BYTES
from kvladder.tiers.files.log import IndexLog, held, kept_of, tag_of
from kvladder.tiers.files.meta import STATE_NAMES
from kvladder.tiers.files.neighbours import Neighbours, compared, neighbours, told_of
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.purge import Eraser
from kvladder.tiers.files.rest import look
from kvladder.tiers.files.store import LOG_SLACK_RECORDS, SEGMENTS_MIN, FileStore, PutBatch
from kvladder.tiers.files.threads import BufferedPool
from kvladder.tiers.label import Read, RecoveredBlock, Ref, Write
from kvladder.units import Size

T = TypeVar("T")

BATCH_BYTES = 128 << 20
"""Bytes per batch, enough that the time to start and end a batch does not matter."""
BATCH_BLOCKS_MAX = 256
RECOVER_BLOCKS = 512
"""Blocks per batch of ``recover``: few, so that Python's garbage collector does not count them as
old objects and scan all of those."""
RESTORE_S = 20.0
"""Seconds that a start may spend on finding blocks by headers if the index log is lost."""
HEADERS = 256
"""Headers that one call reads during this search."""
ERASE_PLACES = 1024
"""Places that one step of ``erase`` looks at. At most ``batch_max`` blocks are read whole."""
CLOSE_TIMEOUT_S = 2.0

_TEMPORARY = {errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR}


class FilesTier(Tier):
    """Stores blocks in preallocated segment files, addressed by their places.

    The tier keeps five bytes per block in memory. It compares each block that it reads with the
    label written beside it: a torn, altered, truncated or misplaced block is a miss.

    Parameters
    ----------
    options:
        The settings.
    disk:
        Another file system, for tests.
    pool:
        Another way to run blocking calls, for tests.
    log_slack_records:
        Number of dead records that the index log may always have; compaction begins above it.
    segments_min:
        Fewest segments for the capacity, unless it has fewer blocks.
    """

    Options: ClassVar[type[FilesOptions]] = FilesOptions
    durable = True
    resizes = True
    recovers_checked = True
    erases = True
    surveys = True
    overhead_bytes = HEADER_BYTES

    def __init__(
        self,
        options: FilesOptions,
        *,
        disk: Disk | None = None,
        pool: BlockingPool | None = None,
        log_slack_records: int = LOG_SLACK_RECORDS,
        segments_min: int = SEGMENTS_MIN,
    ) -> None:
        self.options = options
        self._disk = disk or Disk()
        self._slack = log_slack_records
        self._segments_min = segments_min
        self._pool = pool
        self._store: FileStore | None = None
        self._neighbours = Neighbours(0, 0, "", False)
        self._cold = False
        """True if no blocks were found at the start."""
        self._compacting: asyncio.Task[Any] | None = None
        self._tags = array("I")
        """For each place: the tag of the key that is stored there, or 0."""
        self._sure = bytearray()
        """For each place: 1 if this process knows that the bytes there match their header."""
        self._closing = False

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        path = Path(self.options.path)
        facts = self._disk.examine(path, capacity_bytes, self.options.direct, warn)
        held = look(self._disk, path)
        for name, text in compared(self._disk, path, warn).items() if held else ():
            held[name] += f", {text}"
        return {**facts, **held}

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_BLOCKS_MAX, fitting, context.capacity_blocks))
        await context.run_blocking(self._open)
        assert self._store is not None
        try:
            if self._pool is None:
                kind = BlockingPool if self._store.segments.direct else BufferedPool
                self._pool = kind(self.options.threads, "kvladder-files")
            await self._restore(self._store)
        except Exception:  # the level opens it again later, and its directory must be free then
            await context.run_blocking(self._store.close)
            self._store = None  # before, a cancelled close is repeated by aclose
            raise

    def _open(self) -> None:
        slack, least = self._slack, self._segments_min
        store = self._store = FileStore.open(
            self._disk, self.options, self.context, slack_records=slack, segments_min=least
        )
        context, home = self.context, store.directory.home
        with suppress(OSError):  # this is only a report
            self._neighbours = neighbours(self._disk, home, context.fields, context.say)

    async def _restore(self, store: FileStore) -> None:
        """Set up the tables of places; if the index log is lost, first find blocks by headers.

        The search ends after ``RESTORE_S``; blocks not found by then are lost.
        """
        home = store.directory.home
        if store.found.lost:
            clock = self.context.clock
            began_s = clock.now()

            def late() -> bool:
                return clock.now() - began_s > RESTORE_S

            read, end = store.segments.headers, store.segments.end
            parts = [range(at, min(at + HEADERS, end)) for at in range(0, end, HEADERS)]
            found = await self._run([partial(read, part, late) for part in parts])
            headers = [one for part in found if isinstance(part, list) for one in part]
            with explained(Path(self.options.path)):
                (failure,) = await self._run([partial(store.restore, headers)])
                if failure is not None:
                    raise failure
            missed = sum(len(part) for part, one in zip(parts, found, strict=True) if one is None)
            unread = f"; {missed} places were not read in time" if missed else ""
            self.context.say(
                f"the index log of {home} was lost: {len(headers)} blocks were found by their"
                f" headers in {clock.now() - began_s:.1f} s{unread}"
            )
        if store.directory.earlier is not None:
            self.context.say(
                f"{home} has format {store.directory.earlier} of an earlier version of kvladder,"
                " which this version does not read: the tier starts empty"
            )
        if not store.segments.count:
            self.context.say(
                f"other processes use the whole capacity of {self.options.path}: nothing is stored"
                " until they free some. Set engines, so that each engine gets an equal part"
            )
        self._cold = not len(store.found.records)
        self._eraser = Eraser(self._disk, store.segments, self.context.namespace)
        self._tags = store.found.tags
        self._sure = bytearray(len(store.found.tags))

    async def resize(self, capacity_blocks: int) -> None:
        store = self._opened()
        more = max(0, capacity_blocks - len(self._tags))
        self._tags.extend(array("I", [0]) * more)
        self._sure.extend(bytes(more))
        await self._must([partial(store.resize, capacity_blocks)])

    def _opened(self) -> FileStore:
        if self._store is None or self._closing:
            raise TierError("the files tier is closed", temporary=False)
        return self._store

    async def _run(
        self, jobs: Sequence[Callable[[], T]], *, urgent: bool = False
    ) -> list[T | OSError]:
        """Run jobs in the threads and return their results, in order.

        An OSError is a result, too, so that one failure does not hide the other results.
        """

        def attempt(job: Callable[[], T]) -> T | OSError:
            try:
                return job()
            except OSError as error:
                return error

        self._opened()
        assert self._pool is not None
        try:
            return await self._pool.run_all([partial(attempt, job) for job in jobs], urgent=urgent)
        except ClosedError as error:
            raise TierError("the files tier is closed", temporary=False) from error

    async def _must(self, jobs: Sequence[Callable[[], T]], *, put: bool = False) -> list[T]:
        """Run jobs in the threads and return their results, in order.

        Raises
        ------
        TierFull
            A job of a ``put`` found no room.
        TierError
            Any other failure, also a job without room that is not of a ``put``.
        """
        results = await self._run(jobs)
        _raise_if_failed(results, put=put)
        return cast("list[T]", results)

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        segments = self._opened().segments
        wanted = [read for read in reads if self._holds(read)]
        runs = list(segments.runs(wanted, self.options.threads))
        right: set[int] = set()
        failures: list[OSError] = []
        parts = await self._run([partial(segments.read, run) for run in runs], urgent=True)
        for run, results in zip(runs, parts, strict=True):
            assert not isinstance(results, OSError)
            for read, result in zip(run, results, strict=True):
                if isinstance(result, OSError):
                    failures.append(result)
                elif not self._holds(read):  # removed meanwhile, perhaps erased: not damaged
                    read.came(b"", 0)
                elif result:
                    right.add(read.place)
        if len(failures) == len(wanted):
            _raise_if_failed(failures)
        return [read.place in right for read in reads]

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        store = self._opened()
        for write in writes:
            self._tags[write.place] = 0
            self._sure[write.place] = False
        if missing := store.segments.missing(writes):
            await self._must([partial(store.allocate, missing)], put=True)
        batch = PutBatch(store, writes, self.options.threads)
        await self._run(batch.jobs)
        if not batch.kept:
            _raise_if_failed(batch.failures, put=True)
        for write in writes:
            if write.place in batch.kept:
                self._tags[write.place] = tag_of(write.key)
                self._sure[write.place] = True
        self._compact_if_due()
        return [write.place in batch.kept for write in writes]

    async def remove(self, blocks: Sequence[Ref]) -> None:
        store = self._opened()
        for ref in blocks:
            if self._holds(ref):
                self._tags[ref.place] = 0
        # also blocks that are not there: a failed write may have left them in the log
        await self._must([partial(store.log.remove, blocks)])
        self._compact_if_due()

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        self._opened()
        return [self._holds(ref) for ref in blocks]

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        store = self._opened()
        records = store.found.records
        store.found = store.found._replace(records=records[:0].copy())
        seen: set[BlockKey] = set()
        for start in range(0, len(records), RECOVER_BLOCKS):
            part = records[start : start + RECOVER_BLOCKS]
            is_here = held(part, self._tags)
            kept = kept_of(part if is_here.all() else part[is_here])
            keys = set(map(itemgetter(0), kept))
            if len(keys) < len(kept) or not keys.isdisjoint(seen):
                kept = self._once(kept, seen)
            seen |= keys
            yield kept

    def _once(self, kept: Sequence[RecoveredBlock], seen: set[BlockKey]) -> list[RecoveredBlock]:
        """Return these blocks without those that are in ``seen`` or come twice."""
        left: dict[BlockKey, RecoveredBlock] = {}
        for one in kept:
            if one.key in seen or one.key in left:
                self._tags[one.place] = 0  # the level will not know it, so ``erase`` may wipe it
            else:
                left[one.key] = one
        return list(left.values())

    async def remember(self, name: str, state: bytes) -> None:
        home = self._opened().directory.home
        await self._must([partial(replace_file, self._disk, home / STATE_NAMES[name], state)])

    async def recall(self, name: str) -> bytes | None:
        path = self._opened().directory.home / STATE_NAMES[name]
        (found,) = await self._run([partial(read_file, self._disk, path, STATE_MAX)])
        if isinstance(found, FileNotFoundError):
            return None
        _raise_if_failed([found])
        return cast("bytes", found)

    async def sync(self) -> None:
        await self._must([self._opened().log.sync])

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        store, eraser = self._opened(), self._eraser
        if start == 0:
            await self.sync()
        last = store.segments.end
        unsure = [n for n in range(start, min(start + ERASE_PLACES, last)) if not self._sure[n]]
        end = min([start + ERASE_PLACES, last, *unsure[self.batch_max :]])
        step = max(1, -(-(end - start) // self.options.threads))
        parts = [range(at, min(at + step, end)) for at in range(start, end, step)]
        find = partial(eraser.find, salt=salt, tags=self._tags, sure=self._sure)
        found = await self._must([partial(find, part) for part in parts])
        left = [one for part in found for one in part]
        now = left[: self.batch_max]
        whole = [one.place for one in now if one.start == 0]
        for place in whole:  # a damaged block no longer counts as stored
            self._tags[place] = 0
        await self._must([partial(eraser.wipe, one) for one in now])
        await self._must([partial(eraser.finish, now)])
        if len(now) < len(left):
            end = left[len(now)].place
        self._sure[start:end] = b"\1" * (end - start)
        return len(whole), None if end >= last else end

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        store, start = self._opened(), 0
        while start < store.segments.end:
            places = range(start, min(start + ERASE_PLACES, store.segments.end))
            (found,) = await self._must([partial(self._eraser.survey, places, salt)])
            yield found
            start = places.stop

    def _holds(self, block: Ref | Read) -> bool:
        return self._tags[block.place] == tag_of(block.key)

    def _compact_if_due(self) -> None:
        """Compact the index log in the background if it has too many dead records."""
        store, task = self._opened(), self._compacting
        if (task is None or task.done()) and store.log.is_long(store.segments.count):
            work = self._compact(store.log)
            self._compacting = asyncio.create_task(work, name="kvladder-compact")

    async def _compact(self, log: IndexLog) -> None:
        """Compact the log. After a failure the log stays as it is, and a later call tries again."""
        with suppress(TierError):
            await self._run([partial(log.compact, lambda: self._closing)])

    # ---- the rest

    def gauges(self) -> Mapping[str, int]:
        if self._store is None or self._store.room is None:
            return {}
        free, size = self._store.room
        return {"disk_free_bytes": free, "disk_size_bytes": size}

    def describe(self) -> dict[str, str]:
        settings = {"path": self.options.path, "threads": str(self.options.threads)}
        if self._store is not None:
            segments, meta = self._store.segments, self._store.segments.meta
            first_bytes = meta.size(0)
            settings |= {
                "io": "O_DIRECT" if segments.direct else "buffered, through aiofiles",
                "segment": f"{first_bytes // meta.stride} blocks, {Size(first_bytes).about()}",
                "directory": self._store.directory.home.name,
                "batch": f"{self.batch_max} blocks",
                **told_of(self._neighbours, cold=self._cold),
            }
        return settings

    async def aclose(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._compacting is not None:
            await asyncio.wait({self._compacting}, timeout=CLOSE_TIMEOUT_S)
        if self._store is not None or self._pool is not None:
            # if a call hangs, its files and the lock stay open, since it may still write
            pool = self._pool or BlockingPool(1, "kvladder-files")
            last = self._store.close if self._store else lambda: None
            await pool.aclose(last, timeout_s=CLOSE_TIMEOUT_S)


def _raise_if_failed(results: Sequence[object], *, put: bool = False) -> None:
    """Raise a TierError, or TierFull for ``put``, if there is an OSError among ``results``."""
    failures = [result for result in results if isinstance(result, OSError)]
    if failures:
        failure = next(filter(is_full, failures), failures[0])
        if put and is_full(failure):
            raise TierFull(str(failure)) from failure
        is_temporary = is_full(failure) or failure.errno in _TEMPORARY
        raise TierError(str(failure), temporary=is_temporary) from failure
