"""The codec pipeline of a level: encodes blocks for its tier, checks and decodes what it reads."""

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
from kvladder.tiers.answers import checked
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Subject
from kvladder.tiers.codecs.chain import Chain, Find
from kvladder.tiers.context import Blocking, TierContext
from kvladder.tiers.label import Labels, LevelRead, Outcome, SlotAccess, Write, all_plain
from kvladder.tiers.spans import ReadTiming

S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F")
logger = logging.getLogger("kvladder")

SCRATCH_BYTES = 64 << 20
SCRATCH_BLOCKS_MAX = 32
JOBS = 4
"""Number of threads over which a batch is spread."""


def scratch_blocks(codecs: Sequence[Codec], slot_bytes: int) -> int:
    """Return how many slots a level needs to encode into; 0 if its codecs change no bytes."""
    if all(isinstance(codec, ChecksumCodec) for codec in codecs):
        return 0
    return max(2, min(SCRATCH_BLOCKS_MAX, SCRATCH_BYTES // slot_bytes))


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """The codecs of a level."""

    codecs: tuple[Codec, ...] = ()
    """Codecs that encode stored blocks, in this order; this level's own, and not opened yet."""
    find: Find = lambda _: None
    """Finds an opened codec for blocks that were stored with other codecs."""


def _narrow(codec: Codec, kinds: Sequence[str]) -> None:
    """Clear ``codec.allowed`` if it names all kinds of a layout: then blocks need no kinds.

    Raises
    ------
    ConfigError
        The codec may encode none of these kinds.
    """
    if codec.allowed is None:
        return
    if codec.allowed.isdisjoint(kinds):
        found = ", ".join(sorted(set(kinds)))
        what = f"{codec.name} is allowed for no kind of layer in this model: {found}"
        hint = f"measure the loss with kvladder eval, then list kinds to allow: [{kinds[0]}]"
        raise ConfigError(what, path="allow_lossy", hint=hint)
    if codec.allowed.issuperset(kinds):
        codec.allowed = None


def told_apart(layout: Layout, codecs: Iterable[Codec]) -> Sequence[str]:
    """Return the layout's kinds if an opened codec may encode only some of them, else nothing."""
    return layout.kinds if any(codec.allowed for codec in codecs) else ()


class CodecPipeline:
    """Encodes and decodes blocks between a level and its tier. Coroutines run on the loop thread.

    Threads encode blocks from their slots into scratch slots, and the tier gets the scratch slots.
    With fewer scratch slots than blocks, a batch is stored in parts. With none free, it waits for
    another batch to end. Blocks that were read are checked, unless the tier did so, and decoded in
    the slots into which they were read.

    Parameters
    ----------
    verify:
        True if stored bytes get a checksum and reads compare it.
    scratch:
        Slots of the arena that belong to the pipeline.
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
        """Number of delivered blocks that were refused, by outcome."""
        self.encoded_bytes = 0
        """Bytes of all blocks given to the tier, as encoded by codecs."""

    def open(self, context: TierContext, run: Blocking) -> None:
        """Open the codecs, which run in the threads of ``run``. Call it before the tier's ``open``.

        Raises
        ------
        ConfigError
            A codec cannot work as configured.
        """
        self._run, self._say = run, context.say
        self._now = context.clock.now
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

    @property
    def is_coded(self) -> bool:
        """True if codecs change what is stored; then ``encoded_bytes`` counts it."""
        return not all(isinstance(one, ChecksumCodec) for one in self._settings.codecs)

    # ---- down

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        """Encode the blocks and store them, as ``Tier.put`` does."""
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
                kept += [False] * (len(writes) - len(kept))  # earlier parts are stored and stay
            finally:
                self._give(slots)
        return kept

    def _encode(self, pair: tuple[Write, Slot]) -> Write:
        """Encode a block; return what the tier stores, in the scratch slot if it was changed."""
        plain, scratch = pair
        data = plain.view[: self._size]
        slot, view, target = plain.slot, plain.view, self.side.view(scratch)
        subject = Subject(plain.key, plain.facts.salt, kind=plain.kind)
        stored, coding = self._chain.encode(subject, data, target[: self._size])
        length = len(stored)
        if stored is not data:  # a tier may store whole pages: no bytes of other blocks in them
            target[length : align(length)] = bytes(align(length) - length)
            slot, view = scratch, target
        labels, key, place = self.side.labels, plain.key, plain.place
        write = Write(labels, key, place, slot, view, plain.facts, coding, plain.replace)
        write.label()  # while the CPU's caches still have the bytes
        return write

    async def _take(self, wanted: int) -> list[Slot]:
        """Wait for scratch slots and take one to ``wanted`` of them; first come, first served."""
        async with self._queue:
            while not self._scratch:
                self._given.clear()
                await self._given.wait()
            return [self._scratch.pop() for _ in range(min(wanted, len(self._scratch)))]

    def _give(self, slots: Sequence[Slot]) -> None:
        self._scratch.extend(slots)
        self._given.set()

    # ---- up

    async def get(
        self, reads: Sequence[LevelRead], timing: ReadTiming | None = None
    ) -> Sequence[bool | None]:
        """Read blocks as ``Tier.get`` does; answer True only for blocks checked and decoded.

        ``timing`` is filled in if it is given.
        """
        found = list(checked("get", await self._tier.get(reads), len(reads)))
        came_s = 0.0 if timing is None else self._now()
        if all(found) and not self._chain.secret and all_plain(reads, self.side.labels):
            return found  # the usual case with a tier that checks
        left: list[LevelRead] = []
        for read, ok in zip(reads, found, strict=True):
            if ok and not self._verify:  # no checksum to compare, so it is quick
                read.check()
            outcome, coding = read.verdict
            if ok and (coding is None or coding.steps or self._chain.secret):
                left.append(read)
            elif outcome is not None and outcome is not Outcome.GOOD:
                self.refused[outcome] += 1
        if timing is not None:
            timing.deliver(came_s, len(left))
        finished = await self._each(self._finish, left, Outcome.UNREADABLE)
        outcomes = dict(zip(left, finished, strict=True))
        for index, read in enumerate(reads):
            outcome = outcomes.get(read, Outcome.GOOD)
            if outcome is not Outcome.GOOD:
                found[index] = False
                read.refuse(outcome)
                self.refused[outcome] += 1
        return found

    def _finish(self, read: LevelRead) -> Outcome:
        """Check a block that was read, unless the tier did so, and decode it."""
        read.check()
        outcome, coding = read.verdict
        if coding is None:
            return outcome or Outcome.CORRUPT
        return self._chain.decode(read.key, coding, read.view)

    async def _each(self, function: Callable[[S], T], items: Sequence[S], failed: F) -> list[T | F]:
        """Call ``function`` with each item, in threads; return when no call runs any more.

        Where a codec raises, the result is ``failed``, so that no other block is lost.
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
            self._say(f"a codec raised {name}: the block is skipped, the debug log says more")
        done = [iter(job.result()) for job in jobs]
        return [next(done[index % JOBS]) for index in range(len(items))]
