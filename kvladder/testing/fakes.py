"""A tier with scripted faults that also checks how it is called.

``FakeTier`` keeps stored blocks intact and applies faults only to the calls. A test can therefore
always compare the tier's answers with what is really stored.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from random import Random
from typing import NamedTuple

from kvladder.errors import PermissionDenied, TierError, TierFull
from kvladder.keys import BlockKey, Namespace
from kvladder.testing.steps import SAID_AT_ONCE as SAID_AT_ONCE
from kvladder.testing.steps import Block as Block
from kvladder.testing.steps import Delay as Delay
from kvladder.testing.steps import Fail as Fail
from kvladder.testing.steps import Full as Full
from kvladder.testing.steps import Hang as Hang
from kvladder.testing.steps import Hold as Hold
from kvladder.testing.steps import Operation as Operation
from kvladder.testing.steps import Raise as Raise
from kvladder.testing.steps import ShortRead as ShortRead
from kvladder.testing.steps import Step as Step
from kvladder.testing.steps import Wrong as Wrong
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Facts, Read, RecoveredBlock, Ref, Write

RECOVER_BATCH = 3
_Use = tuple[Operation, int | BlockKey]
"""The operation of a call in flight, and a place or key that it uses."""
_Block = Read | Write | Ref


class Call(NamedTuple):
    """A call to the tier, with its keys and the time at which it began."""

    operation: Operation
    keys: tuple[BlockKey, ...]
    at_s: float


class Record(NamedTuple):
    """A stored block with its facts and its label."""

    key: BlockKey
    place: int
    facts: Facts
    label: bytes
    data: bytes


class FakeStore:
    """The medium of a FakeTier: outlives the tier, as a disk outlives a process.

    Holds one block per place under each namespace (per key for a shared tier), oldest first.
    """

    def __init__(self) -> None:
        self.spaces: dict[Namespace, dict[int | BlockKey, Record]] = {}

    def copy(self) -> FakeStore:
        """Return a copy of the current content, e.g. to continue from it after a crash."""
        copy = FakeStore()
        copy.spaces = {name: dict(records) for name, records in self.spaces.items()}
        return copy


class FakeTier(Tier):
    """Stores blocks by place, and follows a script of faults.

    A call that breaks one of the level's rules fails, and the rule is added to ``violations``.
    Examples: a slot without a claim, a batch that is too large, a place written while it is read.

    Parameters
    ----------
    script:
        Each call takes the first step for its operation. Steps may be appended to ``script`` at
        any time.
    store:
        Holds the blocks. Pass the same store to the next tier, and that tier finds them.
    durable:
        True if ``recover`` yields the blocks of the store.
    checks:
        True if the tier checks the blocks it has read; else the level does.
    random, latency_s, mean_s:
        Calls that move bytes take ``latency_s`` plus a random time of mean ``mean_s``.
    patience:
        The level's breaker: the number of failures in a row of one operation, and the seconds
        for which the level must then not call it. An earlier ``put`` or ``remove`` is a violation.
    """

    resizes = True

    def __init__(
        self,
        script: Sequence[Step] = (),
        *,
        store: FakeStore | None = None,
        durable: bool = False,
        checks: bool = True,
        batch_max: int = 8,
        random: Random | None = None,
        latency_s: float = 0.0,
        mean_s: float = 0.0,
        patience: tuple[int, float] | None = None,
    ) -> None:
        self.script = list(script)
        self.store = FakeStore() if store is None else store
        self.durable = durable
        self.checks = checks
        self.batch_max = batch_max
        self.latency_s = latency_s
        self.mean_s = mean_s
        self.calls: list[Call] = []
        self.violations: list[str] = []
        self._random = random or Random(0)
        self._forgotten: set[BlockKey] = set()
        self._damaged: set[BlockKey] = set()
        self._holds: list[Hold] = []
        self._uses: Counter[_Use] = Counter()
        self._closed = False
        self._patience = patience
        self._failed: Counter[Operation] = Counter()
        """Number of failures in a row, by operation."""
        self._failed_at_s: dict[Operation, float] = {}

    # ---- for the test

    def forget(self, *keys: BlockKey) -> None:
        """Lose these blocks, so that they are misses until they are put again."""
        self._forgotten.update(keys)

    def corrupt(self, *keys: BlockKey) -> None:
        """Damage the bytes that reads of these blocks return, until they are put again."""
        self._damaged.update(keys)

    def heal(self) -> None:
        """Clear the script and release held calls; lost and damaged blocks stay so."""
        self.script.clear()
        for hold in self._holds:
            hold.let_go()

    @property
    def held(self) -> bool:
        """True if the script holds a call."""
        return bool(self._holds)

    @property
    def records(self) -> dict[int | BlockKey, Record]:
        """All blocks really stored, by place (by key if the tier is shared), oldest first."""
        return self.store.spaces[self.context.namespace]

    def stored(self, key: BlockKey) -> bytes | None:
        """Return the bytes really stored under ``key``, whatever the faults; None if absent."""
        return next((r.data for r in self.records.values() if r.key == key), None)

    def batches(self, operation: Operation) -> list[int]:
        """Return the size of each batch that ``operation`` was given, in order."""
        return [len(call.keys) for call in self.calls if call.operation == operation]

    # ---- the tier

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.store.spaces.setdefault(context.namespace, {})
        async with self._call("open", ()):
            pass

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        half = self.context.layout.block_bytes // 2
        with self._in_flight("get", reads):
            async with self._call("get", reads) as step:
                self._read(reads, slice(0, half))
                await asyncio.sleep(self._latency_s())
                if not isinstance(step, ShortRead):
                    self._read(reads, slice(half, None))
                found = [self._sound(read) for read in reads]
        return step.of(found) if isinstance(step, Wrong) else found

    def _read(self, reads: Sequence[Read], part: slice) -> None:
        """Fill one part of each slot. Between two parts, the slots hold no complete block."""
        for read in reads:
            record = self._record(read)
            if record is not None:
                self._require(self.context.arena.claims(read.slot) > 0, "a slot without a claim")
                data = bytearray(record.data[: len(read.view)])
                if read.key in self._damaged:
                    data[-1] ^= 1
                read.view[: len(data)][part] = data[part]

    def _record(self, block: Read | Ref) -> Record | None:
        record = self.at(block.key, block.place)
        return None if block.key in self._forgotten else record

    def _where(self, key: BlockKey, place: int) -> int | BlockKey:
        """Return what the store files a block under: its place here, its key in shared tiers."""
        del key
        return place

    def at(self, key: BlockKey, place: int) -> Record | None:
        """Return the block's record in the store, whatever the faults; None if absent."""
        record = self.records.get(self._where(key, place))
        return None if record is None or record.key != key else record

    def _sound(self, read: Read) -> bool:
        """Return whether the block is there and, if the tier checks reads, whether it is intact."""
        record = self._record(read)
        if record is not None:
            read.came(record.label, len(record.data))
        return record is not None and (not self.checks or read.check())

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        half = len(writes) // 2
        with self._in_flight("put", writes):
            async with self._call("put", writes) as step:
                self._write(writes[:half])
                await asyncio.sleep(self._latency_s())
                self._write(writes[half:])
        stored = [True] * len(writes)
        return step.of(stored) if isinstance(step, Wrong) else stored

    def _write(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self._require(self.context.arena.claims(write.slot) > 0, "a slot without a claim")
            data = bytes(write.view[: write.length])
            record = Record(write.key, write.place, write.facts, write.label(), data)
            self._keep(record, replace=write.replace)

    def _keep(self, record: Record, *, replace: bool) -> None:
        """Store a block in place of the old one."""
        del replace
        key, place = record.key, record.place
        self.records.pop(self._where(key, place), None)  # else it would keep its old position
        self.records[self._where(key, place)] = record
        self._forgotten.discard(key)
        self._damaged.discard(key)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        with self._in_flight("remove", blocks):
            async with self._call("remove", blocks):
                for key, place in blocks:
                    if self.at(key, place) is not None:
                        del self.records[self._where(key, place)]

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        with self._in_flight("contains", blocks):
            async with self._call("contains", blocks) as step:
                found = [self._record(block) is not None for block in blocks]
        return step.of(found) if isinstance(step, Wrong) else found

    def spare(self, salt: bytes) -> float:
        self._say("spare")
        return super().spare(salt)

    def _say(self, operation: Operation) -> None:
        """Run the script's next step for a synchronous operation (``spare``, ``gauges``)."""
        step = self._next_step(operation)
        if isinstance(step, Raise):
            raise step.error("scripted")

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        async with self._call("recover", ()):
            places = range(self.context.capacity_blocks if self.durable else 0)
            found = [
                RecoveredBlock(record.key, record.place, record.facts)
                for record in self.records.values()
                if record.place in places and record.key not in self._forgotten
            ]
        for start in range(0, len(found), RECOVER_BATCH):
            yield found[start : start + RECOVER_BATCH]

    async def resize(self, capacity_blocks: int) -> None:
        async with self._call("resize", ()):
            beyond = [place for place in self.records if self._is_beyond(place, capacity_blocks)]
            self._require(not beyond, "a block is stored at a place that is given up")
            self.context = replace(self.context, capacity_blocks=capacity_blocks)

    def _is_beyond(self, place: int | BlockKey, capacity_blocks: int) -> bool:
        return isinstance(place, int) and place >= capacity_blocks

    def gauges(self) -> Mapping[str, int]:
        self._say("gauges")
        used = sum(len(record.data) for record in self.records.values())
        return {
            "server_used_bytes": used,
            "server_max_bytes": 0,
            "server_evicted": 0,
            "namespace_bytes": used,
            "disk_free_bytes": 0,
            "disk_size_bytes": used,
        }

    def describe(self) -> dict[str, str]:
        return {"durable": str(self.durable), "script": f"{len(self.script)} steps"}

    async def aclose(self) -> None:
        step = self._next_step("aclose") if not self._closed else None
        self._closed = True
        self.heal()
        if step is not None:
            await self._happen(step)

    # ---- the script

    @asynccontextmanager
    async def _call(
        self, operation: Operation, blocks: Sequence[_Block]
    ) -> AsyncGenerator[Step | None]:
        """Note a call and run its step of the script, before or after the call's effect."""
        self._require_open()
        keys = tuple(block.key for block in blocks)
        self.calls.append(Call(operation, keys, self.context.clock.now()))
        with self._patiently(operation):
            async with self._scripted(operation) as step:
                yield step

    @asynccontextmanager
    async def _scripted(self, operation: Operation) -> AsyncGenerator[Step | None]:
        step = self._next_step(operation)
        before, after = (None, step) if step is not None and step.after else (step, None)
        cancelled = await self._happen(before)
        self._require_open()
        yield step
        cancelled = await self._happen(after) or cancelled
        if cancelled is not None:
            raise cancelled

    def _next_step(self, operation: Operation) -> Step | None:
        fits = {operation} if operation in (*SAID_AT_ONCE, "aclose") else {None, operation}
        step = next((step for step in self.script if step.on in fits), None)
        if step is not None and step.times is not None:
            step.times -= 1
            if step.times == 0:
                self.script.remove(step)
        return step

    async def _happen(self, step: Step | None) -> CancelledError | None:
        if not isinstance(step, Hold):
            return None if step is None else await step.happen()
        self._holds.append(step)
        try:
            if isinstance(step, Block):
                await self.context.run_blocking(step.happen)
                return None
            return await step.happen()
        finally:
            self._holds.remove(step)

    def _latency_s(self) -> float:
        more_s = self._random.expovariate(1 / self.mean_s) if self.mean_s else 0.0
        return self.latency_s + more_s

    def _require_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", temporary=False)

    # ---- the level's rules

    @contextmanager
    def _patiently(self, operation: Operation) -> Generator[None]:
        """Check that a call does not come while the breaker is open, and count its failure.

        Covers only the calls of the level's one writer, as overlapping calls cannot fail in a row:
        ``put``, ``remove`` and ``purge``, which counts as a ``remove``. A cancelled call does not
        count, since it may be an abandoned one.
        """
        kind: Operation = "remove" if operation == "purge" else operation
        if self._patience is None or kind not in {"put", "remove"}:
            yield
            return
        now, (failures, seconds) = self.context.clock.now, self._patience
        soon = now() - self._failed_at_s.get(kind, 0.0) < seconds - 1e-6
        left_out = self._failed[kind] >= failures
        self._require(not (soon and left_out), f"a {operation} while the breaker is open")
        try:
            yield
        except (TierFull, PermissionDenied, CancelledError) as error:
            no_failure = TierFull if kind == "put" else PermissionDenied
            if isinstance(error, no_failure):
                self._failed[kind] = 0
            raise
        except BaseException:
            self._failed[kind] += 1
            self._failed_at_s[kind] = now()
            raise
        self._failed[kind] = 0

    def _require(self, kept: bool, rule: str) -> None:
        if not kept:
            self.violations.append(rule)
            raise AssertionError(rule)

    @contextmanager
    def _in_flight(self, operation: Operation, blocks: Sequence[_Block]) -> Generator[None]:
        """Check a batch, and that no conflicting call is in flight for its keys and places."""
        keys = [block.key for block in blocks]
        places = [] if self.shared else [block.place for block in blocks]
        limit = self.context.capacity_blocks
        self._require(len(blocks) <= self.batch_max, f"{len(blocks)} > batch_max in a {operation}")
        self._require(len(set(keys)) == len(keys), f"a key twice in a {operation}")
        self._require(len(set(places)) == len(places), f"a place twice in a {operation}")
        self._require(all(0 <= place < limit for place in places), "a place beyond the capacity")
        meets: list[_Use] = []
        if operation in {"put", "remove"}:
            other: Operation = "remove" if operation == "put" else "put"
            meets.extend((other, key) for key in keys)
        if operation in {"put", "get"}:
            meets.extend(("put", place) for place in places)
        if operation == "put":
            meets.extend(("get", place) for place in places)
        for meet in meets:
            self._require(not self._uses[meet], f"a {operation} overlaps with {meet}")
        uses: list[_Use] = []
        uses.extend((operation, key) for key in keys)
        uses.extend((operation, place) for place in places)
        self._uses.update(uses)
        try:
            yield
        finally:
            self._uses.subtract(uses)
