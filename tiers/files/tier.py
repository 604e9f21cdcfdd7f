"""The files tier: blocks on a local NVMe drive, found again after a restart or a crash."""

from __future__ import annotations

import asyncio
import errno
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from kvladder.errors import ClosedError, TierError, TierFull
from kvladder.keys import BlockKey
from kvladder.schema import Settings
from kvladder.tiers.base import Item, Outcome, Tier, TierContext
from kvladder.tiers.files.directory import is_full, look
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.header import HEADER_BYTES
from kvladder.tiers.files.log import RECORD_BYTES, REMOVE, items_of, tag_of
from kvladder.tiers.files.store import SEGMENTS_MIN, FileStore, PutBatch, config_error
from kvladder.tiers.files.threads import BufferedPool, IoPool, Pool
from kvladder.units import Size

T = TypeVar("T")

BATCH_BYTES = 128 << 20
"""What a batch should hold for the time in which it starts and ends not to matter."""
BATCH_BLOCKS_MAX = 256
LOG_SLACK_RECORDS = 4096
RECOVER_BLOCKS = 4096
RESTORE_S = 20.0
"""How long the start may take longer to find blocks whose index log is lost."""
HEADERS = 256
"""Headers that one call reads then."""
ERASE_PLACES = 1024
"""Places whose headers are read at a time to find what is to be erased; a batch, if blocks are."""
CLOSE_TIMEOUT_S = 2.0

_KEY = itemgetter(0)
_TEMPORARY = {errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR}


class FilesOptions(Settings, frozen=True, kw_only=True):
    """What a configuration says about a files tier."""

    path: str
    """Its directory; made if only the last part is missing. Each process has its own below it."""
    direct: bool | None = None
    """Whether to go around the page cache with O_DIRECT; by default where the disk allows it."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64, description="a number from 1 to 64")] = 8
    """How many calls the disk is given at once."""
    segment: Size = Size(256 << 20)
    """How much is preallocated at a time, at most a sixteenth of the capacity; more where that
    would make too many files."""
    engines: Annotated[int, msgspec.Meta(ge=1, le=64, description="a number from 1 to 64")] = 1
    """How many engines are to use the path at once: each may take this part of the capacity."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("the path is empty: expected a directory")
        if "\0" in self.path:
            raise ValueError("the path has a null character: expected a directory")


class FilesTier(Tier):
    """Blocks in preallocated segment files, addressed by their places.

    The tier keeps five bytes a block in memory. What it reads is compared with the header that
    was written with it: a torn, flipped, truncated or misplaced block is a miss. If the context
    says not to verify, blocks have no checksum and flipped bits reach the caller.

    Parameters
    ----------
    options:
        The settings.
    disk:
        Another file system, for tests.
    pool:
        Another way to run blocking calls, for tests.
    log_slack_records:
        How many dead records the index log may have before it is compacted.
    segments_min:
        How many segments a capacity has at least, as far as it has so many blocks.
    """

    Options: ClassVar[type[FilesOptions]] = FilesOptions
    durable = True
    recovers_checked = True
    erases = True
    notes = True
    overhead_bytes = HEADER_BYTES

    def __init__(
        self,
        options: FilesOptions,
        *,
        disk: Disk | None = None,
        pool: Pool | None = None,
        log_slack_records: int = LOG_SLACK_RECORDS,
        segments_min: int = SEGMENTS_MIN,
    ) -> None:
        self.options = options
        self._disk = disk or Disk()
        self._given_pool = pool
        self._slack = log_slack_records
        self._segments_min = segments_min
        self._pool: Pool | None = None
        self._store: FileStore | None = None
        self._compacting: asyncio.Task[Any] | None = None
        self._tags = array("I")
        """By place: some bytes of the key that is stored there, 0 if none is."""
        self._sure = bytearray()
        """By place: whether what lies there is what its header says, since this process knows."""
        self._blocks = 0
        self._unchanged = True
        """Whether all is as it was found by ``open``."""
        self._corrupt = 0
        self._stale = 0
        self._closing = False

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        path = Path(self.options.path)
        facts = self._disk.examine(path, capacity_bytes, self.options.direct, warn)
        return {**facts, **look(self._disk, path)}

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_BLOCKS_MAX, fitting, context.capacity_blocks))
        starter = self._given_pool or IoPool(1)
        try:
            await starter.run([self._open])
        finally:
            if self._given_pool is None:
                await starter.aclose(lambda: None, timeout_s=CLOSE_TIMEOUT_S)
        assert self._store is not None
        kind = IoPool if self._store.segments.direct else BufferedPool
        self._pool = self._given_pool or kind(self.options.threads)
        await self._restore()

    async def _restore(self) -> None:
        """Where the index log is lost, find the blocks by their headers, as far as time allows."""
        store, _ = self._opened()
        if store.lost:
            clock = self.context.clock
            began_s = clock.now()

            def late() -> bool:
                return clock.now() - began_s > RESTORE_S

            read, end = store.segments.headers, store.segments.end
            parts = [range(at, min(at + HEADERS, end)) for at in range(0, end, HEADERS)]
            found = await self._run([partial(read, part, late) for part in parts])
            told = [one for part in found if isinstance(part, list) for one in part]
            (failure,) = await self._run([lambda: store.restore(told)])
            if failure is not None:
                raise config_error(Path(self.options.path), failure) from failure
            missed = sum(len(part) for part, one in zip(parts, found, strict=True) if one is None)
            unread = f"; {missed} places were not read in time" if missed else ""
            self.context.say(
                f"the index log of {store.directory.home} was lost: {len(told)} blocks were found"
                f" by their headers in {clock.now() - began_s:.1f} s{unread}"
            )
        if store.directory.earlier is not None:
            self.context.say(
                f"{store.directory.home} was written by an earlier version of kvladder, in format"
                f" {store.directory.earlier}, which is not read any more: it begins empty"
            )
        self._tags = store.tags
        self._sure = bytearray(len(store.tags))
        self._blocks = len(store.recovered) // RECORD_BYTES
        self._unchanged = not store.forgot
        if not store.segments.count:
            self.context.say(
                f"other processes have all of the capacity of {self.options.path}: nothing is"
                " stored before they leave some; set engines, so that each has its part"
            )

    def _open(self) -> None:
        slack, least = self._slack, self._segments_min
        self._store = FileStore.open(
            self._disk, self.options, self.context, slack_records=slack, segments_min=least
        )

    def _opened(self) -> tuple[FileStore, Pool]:
        if self._store is None or self._pool is None or self._closing:
            raise TierError("the files tier is closed", temporary=False)
        return self._store, self._pool

    async def _run(
        self, jobs: Sequence[Callable[[], T]], *, urgent: bool = False
    ) -> list[T | OSError]:
        """Run jobs in the threads; an OSError is a result, so that one does not hide the rest."""

        def attempt(job: Callable[[], T]) -> T | OSError:
            try:
                return job()
            except OSError as error:
                return error

        _, pool = self._opened()
        try:
            return await pool.run([partial(attempt, job) for job in jobs], urgent=urgent)
        except ClosedError as error:
            raise TierError("the files tier is closed", temporary=False) from error

    async def get(self, items: Sequence[Item]) -> Sequence[bool]:
        store, _ = self._opened()
        found = [False] * len(items)
        wanted = [index for index, item in enumerate(items) if self._holds(item)]
        runs = list(store.segments.runs(items, wanted, self.options.threads))
        reads = [partial(store.segments.read, [items[i] for i in run]) for run in runs]
        outcomes: list[Outcome] = []
        failure: OSError | None = None
        for run, result in zip(runs, await self._run(reads, urgent=True), strict=True):
            assert not isinstance(result, OSError)
            outcomes += result[0]
            failure = result[1] or failure
            for index, outcome in zip(run, result[0], strict=True):
                # asked again: it may have been removed, and erased, meanwhile
                held = self._holds(items[index])
                found[index] = outcome is Outcome.GOOD and held
                if found[index] and self.context.verify:
                    self._sure[items[index].place] = True
                self._corrupt += outcome is Outcome.CORRUPT and held
        self._stale += outcomes.count(Outcome.STALE)
        if failure is not None and outcomes.count(Outcome.FAILED) == len(outcomes):
            raise _tier_error(failure) from failure
        return found

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        store, _ = self._opened()
        for item in items:
            self._set_tag(item.place, 0)
            self._sure[item.place] = False
        missing = store.segments.missing(items)
        if missing:
            _raise_if_failed(await self._run([lambda: store.allocate(missing)]), put=True)
        batch = PutBatch(store, items, self.options.threads)
        await self._run(batch.jobs)
        if not any(batch.kept):
            _raise_if_failed(batch.failures, put=True)
        for item, kept in zip(items, batch.kept, strict=True):
            if kept:
                self._set_tag(item.place, tag_of(item.key))
                self._sure[item.place] = True
        self._compact_if_due()
        return batch.kept

    async def remove(self, items: Sequence[Item]) -> None:
        store, _ = self._opened()
        for item in items:
            if self._holds(item):
                self._set_tag(item.place, 0)
        # also what is not there: it may have been left in the log by a write that failed
        _raise_if_failed(await self._run([lambda: store.log.append(REMOVE, items)]))
        self._compact_if_due()

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        self._opened()
        return [self._holds(item) for item in items]

    async def recover(self) -> AsyncIterator[Sequence[Item]]:
        store, _ = self._opened()
        records, store.recovered = memoryview(store.recovered), b""
        seen: set[BlockKey] = set()
        for start in range(0, len(records), RECOVER_BLOCKS * RECORD_BYTES):
            yield self._untold(
                items_of(records[start : start + RECOVER_BLOCKS * RECORD_BYTES]), seen
            )

    def _untold(self, items: list[Item], seen: set[BlockKey]) -> list[Item]:
        """Those that are still here and not in ``seen``, which grows."""
        keys = set(map(_KEY, items))
        if self._unchanged and len(keys) == len(items) and keys.isdisjoint(seen):
            seen |= keys
            return items
        left: list[Item] = []
        for item in items:
            if item.key in seen:
                self._set_tag(item.place, 0)  # nobody will ask for it here, so it is to be erased
            elif self._holds(item):
                seen.add(item.key)
                left.append(item)
        return left

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        store, _ = self._opened()
        if start == 0:
            _raise_if_failed(await self._run([store.log.sync]))
        last = store.segments.end
        unsure = [n for n in range(start, min(start + ERASE_PLACES, last)) if not self._sure[n]]
        end = min([start + ERASE_PLACES, last, *unsure[self.batch_max :]])
        step = max(1, -(-(end - start) // self.options.threads))
        parts = [range(at, min(at + step, end)) for at in range(start, end, step)]
        find = store.eraser.find
        found = await self._run(
            [partial(find, part, salt, self._tags, self._sure) for part in parts]
        )
        _raise_if_failed(found)
        left = [one for part in found if not isinstance(part, OSError) for one in part]
        now = left[: self.batch_max]
        whole = [one.place for one in now if one.start == 0]
        for place in whole:  # what is damaged is not stored any more
            self._set_tag(place, 0)
        _raise_if_failed(await self._run([partial(store.eraser.wipe, one) for one in now]))
        _raise_if_failed(await self._run([partial(store.eraser.finish, now)]))
        if len(now) < len(left):
            end = left[len(now)].place
        self._sure[start:end] = b"\1" * (end - start)
        return len(whole), None if end >= last else end

    def _holds(self, item: Item) -> bool:
        return self._tags[item.place] == tag_of(item.key)

    def _set_tag(self, place: int, tag: int) -> None:
        self._unchanged = False
        self._blocks += bool(tag) - bool(self._tags[place])
        self._tags[place] = tag

    # ---- compaction

    def _compact_if_due(self) -> None:
        """Have the index log compacted in the background if most of it is dead."""
        store, _ = self._opened()
        if self._compacting is None and store.log.is_long(self._blocks):
            # a failure is not worth an error: the log stays as it is, and is tried again later
            compact = self._run([lambda: store.log.compact(lambda: self._closing)])
            self._compacting = asyncio.create_task(compact, name="kvladder-compact")
            self._compacting.add_done_callback(self._compacted)

    def _compacted(self, task: asyncio.Task[Any]) -> None:
        self._compacting = None
        if not task.cancelled():
            task.exception()

    # ---- the rest

    def corrupt_blocks(self) -> int:
        return self._corrupt

    def stale_blocks(self) -> int:
        """How often another block, or none, was found where one was asked for, since ``open``."""
        return self._stale

    def describe(self) -> dict[str, str]:
        settings = {
            "path": self.options.path,
            "threads": str(self.options.threads),
        }
        if self._store is not None:
            segments = self._store.segments
            settings["io"] = "O_DIRECT" if segments.direct else "buffered, through aiofiles"
            geometry = segments.geometry
            settings["checksum"] = "xxh3-128" if self.context.verify else "none"
            settings["segment"] = f"{geometry.places(0)} blocks, {Size(geometry.size(0)).about()}"
            settings["directory"] = self._store.directory.home.name
            settings["batch"] = f"{self.batch_max} blocks"
        return settings

    async def aclose(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._compacting is not None:
            await asyncio.wait({self._compacting}, timeout=CLOSE_TIMEOUT_S)
        if self._store is not None:
            # files under a call that hangs stay open, and so stays the lock: it may still write
            pool = self._pool or IoPool(1)
            await pool.aclose(self._store.close, timeout_s=CLOSE_TIMEOUT_S)


def _raise_if_failed(results: Sequence[object], *, put: bool = False) -> None:
    """Raise TierError if there is an OSError among ``results``, TierFull if a ``put`` has no room.

    Whatever else has no room is tried again after a while, as after any other failure.
    """
    failures = [result for result in results if isinstance(result, OSError)]
    if failures:
        failure = next(filter(is_full, failures), failures[0])
        full = put and is_full(failure)
        raise (TierFull(str(failure)) if full else _tier_error(failure)) from failure


def _tier_error(error: OSError) -> TierError:
    return TierError(str(error), temporary=is_full(error) or error.errno in _TEMPORARY)
