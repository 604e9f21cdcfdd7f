"""The edge of a level: what its codecs do to blocks on their way to the tier and back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvladder.arena import Slot
from kvladder.errors import ConfigError, TierFull
from kvladder.layout import Layout, align
from kvladder.schema import within
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Subject
from kvladder.tiers.codecs.chain import Chain, Find
from kvladder.tiers.context import Blocking, TierContext
from kvladder.tiers.label import Labels, LevelRead, Outcome, Ref, SlotAccess, Write, all_plain
from kvladder.tiers.ladder.breaker import checked

S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F")
logger = logging.getLogger("kvladder")

SCRATCH_BYTES = 64 << 20
SCRATCH_BLOCKS_MAX = 32
JOBS = 4
"""Threads that a batch is spread over."""


def scratch_blocks(codecs: Sequence[Codec], slot_bytes: int) -> int:
    """How many slots a level needs to encode into; none if its codecs leave bytes as they are."""
    if all(isinstance(codec, ChecksumCodec) for codec in codecs):
        return 0
    return max(2, min(SCRATCH_BLOCKS_MAX, SCRATCH_BYTES // slot_bytes))


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What is done to blocks at the edge of a level."""

    codecs: tuple[Codec, ...] = ()
    """Applied in this order to blocks that are stored; not opened yet, of this level alone."""
    find: Find = lambda _: None
    """Finds the codecs of blocks that were stored with others, opened."""


def _narrow(codec: Codec, kinds: Sequence[str]) -> None:
    """Have a codec ask for the kind of a block only where it may not encode all of a layout's.

    Raises
    ------
    ConfigError
        It may encode none.
    """
    if codec.allowed is None:
        return
    if codec.allowed.isdisjoint(kinds):
        what = f"{codec.name} may not change layers of this model: {', '.join(sorted(set(kinds)))}"
        hint = f"find out by kvladder eval what that costs, then list them: [{kinds[0]}]"
        raise ConfigError(what, path="allow_lossy", hint=hint)
    if codec.allowed.issuperset(kinds):
        codec.allowed = None


def told_apart(layout: Layout, codecs: Iterable[Codec]) -> Sequence[str]:
    """The kinds by which opened codecs ask for blocks; none where each may encode all of them."""
    return layout.kinds if any(codec.allowed for codec in codecs) else ()


class CodecPipeline:
    """Stands between a level and its tier. Coroutines run on the loop thread.

    Blocks are encoded from their slots into scratch slots, in threads, and the tier is given
    those; if there are fewer of them than blocks, a batch is stored in parts, and if there are
    none, it waits for another batch to end. What is read is checked, unless the tier has done so,
    and decoded in the slot it was read into.

    Parameters
    ----------
    verify:
        Whether stored bytes get a checksum, and are compared with it.
    scratch:
        Slots of the arena that are the edge's own.
    """

    def __init__(
        self,
        tier: Tier,
        settings: PipelineSettings,
        scratch: Sequence[Slot] = (),
        *,
        verify: bool = True,
    ) -> None:
        self._tier = tier
        self._settings = settings
        self._verify = verify
        self._scratch = list(scratch)
        self._queue = asyncio.Lock()
        self._given = asyncio.Event()
        self.refused = Counter[Outcome]()
        """What the tier delivered and was of no use, by the reason."""
        self.encoded_bytes = 0
        """What the blocks came to that codecs made smaller, or could not."""

    def open(self, context: TierContext, run: Blocking) -> None:
        """Open the codecs, which run in the threads of ``run``; the tier comes after it.

        Raises
        ------
        ConfigError
            One of them cannot work as configured.
        """
        self._run, self._say = run, context.say
        self._size = context.layout.block_bytes
        wall = context.clock.wall if self._tier.shared else None
        labels = Labels(context.namespace, self._size, verify=self._verify, wall=wall)
        self.side = SlotAccess(labels, context.arena.view)
        codecs = [one for one in self._settings.codecs if not isinstance(one, ChecksumCodec)]
        layout = context.layout
        for codec in codecs:
            try:
                _narrow(codec, context.layout.kinds)
                layout = codec.open(layout, context.namespace)
            except ConfigError as error:
                raise within("codecs", error) from error
        self._chain = Chain(codecs, layout=context.layout, find=self._settings.find)

    # ---- down

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        """As ``Tier.put``."""
        if not self._chain.codecs:
            return await self._tier.put(writes)
        kept: list[bool] = []
        while len(kept) < len(writes):
            slots = await self._take(len(writes) - len(kept))
            try:
                pairs = list(zip(writes[len(kept) :], slots, strict=False))
                coded = await self._each(self._encode, pairs, None)
                given = [write for write in coded if write is not None]
                answer = checked("put", await self._tier.put(given), len(given)) if given else ()
                stored = iter(answer)
                kept += [write is not None and bool(next(stored)) for write in coded]
                self.encoded_bytes += sum(write.length for write in given)
            except TierFull:
                if not kept:
                    raise
                kept += [False] * (len(writes) - len(kept))  # what is stored is not taken back
            finally:
                self._give(slots)
        return kept

    def _encode(self, pair: tuple[Write, Slot]) -> Write:
        """What the tier is to store, which lies in the scratch slot if it is not the block."""
        plain, scratch = pair
        data = plain.view[: self._size]
        slot, view, target = plain.slot, plain.view, self.side.view(scratch)
        subject = Subject(plain.key, plain.facts.salt, kind=plain.kind)
        stored, coding = self._chain.encode(subject, data, target[: self._size])
        length = len(stored)
        if stored is not data:  # a tier may store whole pages, and before this came another block
            target[length : align(length)] = bytes(align(length) - length)
            slot, view = scratch, target
        ref, facts = Ref(plain.key, plain.place), plain.facts
        labels, replace = self.side.labels, plain.replace
        write = Write(labels, ref, slot, view, facts, coding=coding, replace=replace)
        write.label()  # while the bytes are in a cache
        return write

    async def _take(self, wanted: int) -> list[Slot]:
        """Between one and ``wanted`` scratch slots; first come, first served."""
        async with self._queue:
            while not self._scratch:
                self._given.clear()
                await self._given.wait()
            return [self._scratch.pop() for _ in range(min(wanted, len(self._scratch)))]

    def _give(self, slots: Sequence[Slot]) -> None:
        self._scratch.extend(slots)
        self._given.set()

    # ---- up

    async def get(self, reads: Sequence[LevelRead]) -> Sequence[bool | None]:
        """As ``Tier.get``: True only for what is right, and decoded."""
        found = list(checked("get", await self._tier.get(reads), len(reads)))
        if all(found) and not self._chain.secret and all_plain(reads, self.side.labels):
            return found  # as nearly always, of a tier that checks
        left: list[LevelRead] = []
        for read, ok in zip(reads, found, strict=True):
            if ok and not self._verify:  # a moment's work
                read.check()
            outcome, coding = read.verdict
            if ok and (coding is None or coding.steps or self._chain.secret):
                left.append(read)
            elif outcome is not None and outcome is not Outcome.GOOD:
                self.refused[outcome] += 1
        finished = await self._each(self._finish, left, Outcome.UNREADABLE)
        outcomes = dict(zip(left, finished, strict=True))
        for index, read in enumerate(reads):
            outcome = outcomes.get(read, Outcome.GOOD)
            if outcome is not Outcome.GOOD:
                found[index] = False
                self.refused[outcome] += 1
        return found

    def _finish(self, read: LevelRead) -> Outcome:
        """Check a block that came, if the tier has not, and decode it."""
        read.check()
        outcome, coding = read.verdict
        if coding is None:
            return outcome or Outcome.CORRUPT
        return self._chain.decode(read.key, coding, read.view)

    async def _each(self, function: Callable[[S], T], items: Sequence[S], failed: F) -> list[T | F]:
        """``function`` of each item, in threads; ends when no call runs any more.

        ``failed`` stands for those of which a codec made an exception: it costs no other block.
        """
        if not items:
            return []
        raised: list[Exception] = []

        def one(item: S) -> T | F:
            try:
                return function(item)
            except Exception as error:
                logger.debug("a codec raised", exc_info=error)
                raised.append(error)
                return failed

        def part(start: int) -> list[T | F]:
            return [one(item) for item in items[start::JOBS]]

        jobs = [asyncio.ensure_future(self._run(part, n)) for n in range(min(JOBS, len(items)))]
        try:
            await asyncio.wait(jobs)
        finally:  # cancelled: they still touch the slots
            while not all(job.done() for job in jobs):
                with suppress(asyncio.CancelledError):
                    await asyncio.wait(jobs)
        failures = [failure for job in jobs if (failure := job.exception()) is not None]
        if failures:
            raise failures[0]
        for name in sorted({type(error).__name__ for error in raised}):
            self._say(f"a codec raised {name}, and its block is given up")
        done = [iter(job.result()) for job in jobs]
        return [next(done[index % JOBS]) for index in range(len(items))]
