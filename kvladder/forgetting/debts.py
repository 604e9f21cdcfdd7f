"""What levels owe of purges: followed until each is done, also across detaching and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from kvladder.errors import PermissionDenied
from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.owed import OpenPurge, why_owed
from kvladder.forgetting.receipt import LevelResult, Receipt, timestamp
from kvladder.forgetting.resolver import BY_LINEAGE, ScopeResolver
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.tiers.context import Blocking
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.lineage import KEEP, MATCH, UNKNOWN
from kvladder.tiers.ladder.stack import TierStack

KEEP_S: Final = 1.0
"""Seconds between two looks while no caller waits."""
DETACHED: Final = "it is detached: attach it again, or purge its medium at rest"
ABSENT: Final = "the deployment has no level of this name now"


class PurgeDebts:
    """Follows purges that have begun until no level owes them; ``tiers.ladder.stack.Debts``.

    A level owes a purge until its tier has removed the blocks for good. One that is detached takes
    its debts along, by the identity of its medium, and pays when it is attached. The ledger has the
    same debts for the next process. Everything runs on the cache's loop.

    Parameters
    ----------
    stack, resolver, ledger, run_blocking, types, block_bytes:
        As a ``Purger`` has them, and the size of a block in the engine.
    """

    def __init__(
        self,
        stack: TierStack,
        resolver: ScopeResolver,
        ledger: PurgeLedger,
        run_blocking: Blocking,
        *,
        types: Mapping[str, str],
        block_bytes: int,
    ) -> None:
        self._stack = stack
        self._resolver = resolver
        self._ledger = ledger
        self._run = run_blocking
        self._types = types
        self._block_bytes = block_bytes
        self._clock = stack.shared.clock
        self._looking = asyncio.Lock()
        self._open: dict[str, OpenPurge] = {}
        self._begun: list[OpenPurge] = []
        """Purges whose blocks are being removed."""
        self._detached: dict[str, LevelResult] = {}
        """Detached levels whose media keep their blocks, by the identity of the medium."""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def owed(self) -> int:
        """Number of purges that a level still owes."""
        return len(self._open)

    def owes(self, receipt: Receipt) -> bool:
        """Return whether a level still owes the purge of a receipt."""
        return receipt.id in self._open

    # ---- the beginning of a purge

    def results(self) -> list[LevelResult]:
        """Return a result for each level, and for each detached one whose medium keeps blocks."""
        levels = [self._result(level) for level in self._stack.levels]
        away = [(name, self._detached[medium]) for name, medium in self._away()]
        gone = [LevelResult(name=name, type=one.type, shared=one.shared) for name, one in away]
        return [self._result(self._stack.host), *levels, *gone]

    def _result(self, level: HostLevel | Level) -> LevelResult:
        shared = isinstance(level, Level) and level.tier.shared
        return LevelResult(name=level.name, type=self._types.get(level.name, ""), shared=shared)

    def _away(self) -> list[tuple[str, str]]:
        """Return names for receipts of detached levels, and their media."""
        names = {self._stack.host.name, *(level.name for level in self._stack.levels)}
        found: list[tuple[str, str]] = []
        for medium, one in self._detached.items():
            name = one.name
            while name in names:  # another level has the name by now
                name += " (detached)"
            names.add(name)
            found.append((name, medium))
        return found

    @contextmanager
    def removing(self, one: OpenPurge) -> Generator[None]:
        """Note a purge while its blocks are removed, and that it is owed once they are."""
        names = one.levels
        one.media = {name: medium for name, medium in self._away() if name not in names}
        self._begun.append(one)
        self._doubt(one, names)
        try:
            yield
        finally:
            self._begun.remove(one)
        self._open[one.receipt.id] = one

    def _doubt(self, one: OpenPurge, levels: Mapping[str, Level]) -> None:
        """Have shared levels not asked for blocks of others until they were looked through."""
        if one.receipt.scope["kind"] not in BY_LINEAGE:
            return
        with self._stack.lock:
            for name, level in levels.items():
                if level.tier.shared and level.tier.surveys:
                    level.purges.doubts += 1
                    one.doubts[name] = level

    # ---- until all levels are done

    def keep(self) -> None:
        """Look at the levels from time to time, as long as one owes something."""
        if self._open and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._keep_on(), name="kvladder-purges")

    async def _keep_on(self) -> None:
        while self._open:
            await self.look()
            await asyncio.sleep(KEEP_S)

    async def look(self) -> None:
        """Ask shared levels that were not asked yet, note which levels are done, and keep that."""
        async with self._looking:
            for one in [*self._open.values()]:
                for name in [*one.doubts]:
                    await self._survey(one, name)
                await self._settle(one)

    async def _survey(self, one: OpenPurge, name: str) -> None:
        """Remove the blocks of a scope that a shared level has, as its tier tells them.

        Blocks that this deployment did not save stay if it does not know whether they belong to it.
        """
        level = one.doubts.get(name)
        if level is None or not level.client.open("contains"):
            return
        receipt = one.receipt
        judge = await self._run(partial(self._resolver.judge, receipt))
        is_prefix = receipt.scope["kind"] == "prefix"
        old = await self._run(partial(self._resolver.lineage.until, receipt.mark))
        found, unknown = dict[BlockKey, None](), 0

        def take(keys: Sequence[BlockKey]) -> None:
            nonlocal unknown
            if not keys:
                return
            verdicts = zip(keys, judge(keys).tolist(), old(keys).tolist(), strict=True)
            for key, verdict, age in verdicts:
                if age == KEEP:  # saved again since
                    continue
                if verdict == MATCH or (verdict == UNKNOWN and age == MATCH and is_prefix):
                    found[key] = None
                else:
                    unknown += verdict == UNKNOWN

        salt = bytes.fromhex(receipt.salt_digest) if is_prefix else None
        try:
            if await level.client.survey(salt, take):
                return
        except PermissionDenied as error:  # what it has stays there
            with self._stack.lock:
                level.stats.denied += 1
            level.client.deny(error)
        keys = list(found)
        for start in range(0, len(keys), STEP):
            with self._stack.lock:
                level.remove(keys[start : start + STEP])
            await asyncio.sleep(0)
        if one.doubts.get(name) is not level:  # it was detached meanwhile
            return
        with self._stack.lock:
            level.purges.doubts -= 1
        del one.doubts[name]
        for result in receipt.levels:
            if result.name == name:
                result.unknown = unknown
                result.blocks = max(result.blocks, len(keys))
                result.bytes = result.blocks * self._block_bytes
        self._stack.wake()

    async def _settle(self, one: OpenPurge) -> None:
        """Note which levels are done with a purge, and keep that in the ledger."""
        one.is_new = self._note(one) or one.is_new
        if not one.is_new:
            return
        try:
            await self._run(partial(self._ledger.write, one.receipt))
        except OSError as error:  # tried again with the next look
            what = f"the receipt of purge {one.receipt.id} cannot be written: {error}"
            self._stack.shared.notices.say("receipt", what)
            return
        one.is_new = False
        if not one.receipt.owed:
            self._open.pop(one.receipt.id, None)
        if one.given_up.issuperset(level.name for level in one.receipt.owed):
            one.is_over.set()

    def _note(self, one: OpenPurge) -> bool:
        """Update the receipt of a purge; return whether it changed."""
        size, now, changed = self._block_bytes, "", False
        for result in one.receipt.owed:
            level, erased = one.levels.get(result.name), 0
            if result.name == self._stack.host.name or result.name in one.paid:
                why = ""
            elif level is None:
                why = DETACHED if result.name in one.media else ABSENT
            else:
                with self._stack.lock:
                    why, is_final = why_owed(level, one.denied[result.name])
                    erased = level.stats.purged
                if is_final:
                    one.given_up.add(result.name)
            if why:
                changed, result.why = changed or why != result.why, why
                continue
            now = now or timestamp(self._clock.wall())
            purged = erased - one.erased.get(result.name, 0)
            if result.shared:
                result.blocks = max(result.blocks, purged)
                result.bytes = result.blocks * size
            else:
                result.erased = max(result.erased, purged)
            result.state, result.why, result.done_at, changed = "done", "", now, True
        return changed

    # ---- levels that are detached and attached

    def departed(self, level: Level, medium: str) -> None:
        """Note what a level still owes that has left the stack; its tier closes afterwards."""
        if level.outlives:
            self._detached[medium] = self._result(level)
        for one in (*self._open.values(), *self._begun):
            for name in [name for name, own in one.levels.items() if own is level]:
                with self._stack.lock:
                    is_done = not why_owed(level, one.denied[name])[0]
                del one.levels[name]
                one.doubts.pop(name, None)
                if not level.outlives or (is_done and one not in self._begun):
                    one.paid.add(name)
                else:
                    one.media[name] = medium

    async def arriving(self, level: Level, medium: str) -> None:
        """Have a level forget what its medium, or the level of its name, owes; it opens afterwards.

        Raises
        ------
        ConfigError
            The blocks of a receipt cannot be read.
        """
        self._detached.pop(medium, None)
        for one in (*self._open.values(), *self._begun):
            for result in one.receipt.owed:
                own = level.name if result.name not in one.levels else None
                if one.media.get(result.name, medium if result.name == own else None) == medium:
                    await self._claim(one, result.name, level)

    async def _claim(self, one: OpenPurge, name: str, level: Level) -> None:
        """Repeat a purge in a level that is not open yet."""
        receipt = one.receipt
        keys = await self._run(partial(self._ledger.keys, receipt))
        if receipt.scope["kind"] in BY_LINEAGE:
            self._resolver.filter(receipt, [level])
        self._doubt(one, {name: level})
        digest = None if receipt.scope["kind"] == "all" else bytes.fromhex(receipt.salt_digest)
        is_whole = receipt.scope["kind"] in {"salt", "all"}
        for start in range(0, len(keys), STEP):
            with self._stack.lock:
                level.remove(keys[start : start + STEP])
        with self._stack.lock:
            if is_whole:
                level.purges.condemn(digest)
            if level.tier.erases or (is_whole and level.tier.shared):
                level.purge(digest if is_whole else None)
            one.erased[name], one.denied[name] = level.stats.purged, level.stats.denied
        one.levels[name] = level
        one.given_up.discard(name)
        one.media.pop(name, None)

    async def aclose(self) -> None:
        """Stop looking; what is owed stays in the ledger. May be called again."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
        for one in [*self._open.values()]:
            await self._settle(one)
