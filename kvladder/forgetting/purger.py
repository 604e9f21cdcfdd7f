"""Runs purges over all levels, keeps their receipts, and pays what levels owe."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import numpy as np

from kvladder.errors import ConfigError, KvladderError, PermissionDenied, Unavailable
from kvladder.forgetting.check import Check, check_levels
from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.owed import OpenPurge, why_owed
from kvladder.forgetting.receipt import LevelResult, Receipt, receipt_id, seconds, timestamp
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import BlockKey, salt_digest
from kvladder.lock import STEP
from kvladder.manager import CacheManager
from kvladder.tiers.context import Blocking
from kvladder.tiers.label import RecoveredBlock
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.lineage import KEEP, MATCH, UNKNOWN, Judge, Lineage, Verdicts
from kvladder.tiers.ladder.stack import TierStack

POLL_S: Final = 0.02
"""Seconds between two looks at the levels while a caller waits; tiers send no event."""
KEEP_S: Final = 1.0
"""Seconds between two looks while no caller waits."""
STEPS: Final = 16
"""Steps of a purge between two turns of the loop."""
BY_LINEAGE: Final = {"prefix", "age"}
"""Kinds of scopes with blocks that only the table of parents and times can tell."""
BEYOND: Final = (
    "the engine's own memory, such as its prefix cache on the device",
    "levels of other engines in their own memory and files: each has its own receipt",
)
BEYOND_PREFIX: Final = "blocks in shared levels that this deployment neither saved nor found there"
UNLISTED: Final = (
    "level {} owes the blocks that this engine does not know by name, as its tier cannot list them:"
    " repeat the purge at each of its servers and peers"
)
DETACHED: Final = "it is detached: attach it again, or purge its medium at rest"
ABSENT: Final = "the deployment has no level of this name now"


class WrongScope(KvladderError, ValueError):
    """A purge names something that is not there, or that this engine cannot name."""


class Purger:
    """Purges one cache, one purge after the other. Everything runs on the cache's loop.

    The order: a block whose save began before the purge is gone. One whose save begins after
    ``purge`` has removed its blocks, long before it returns, is new and stays. While blocks are
    removed, none of the scope is stored; of a prefix or an age, no block at all. A level that owes
    a purge of a salt pays before it stores anything new if it is shared. If a process dies with a
    purge owed, the next one repeats the purge in the levels that owe it, before it serves. So does
    a level that is detached and attached again.

    Parameters
    ----------
    manager:
        The cache.
    stack:
        Its levels.
    ledger:
        The directory of receipts; the purger closes it.
    run_blocking:
        Runs calls that wait for the disk.
    types:
        Types of the levels' tiers, by name.
    deployment, version:
        The deployment's name, and kvladder's version, for receipts.
    """

    def __init__(
        self,
        manager: CacheManager,
        stack: TierStack,
        ledger: PurgeLedger,
        run_blocking: Blocking,
        *,
        types: Mapping[str, str],
        deployment: str = "",
        version: str = "",
    ) -> None:
        self.ledger = ledger
        self._manager = manager
        self._stack = stack
        self._run = run_blocking
        self._types = types
        self._deployment = deployment or socket.gethostname()
        self._version = version
        self._clock = stack.shared.clock
        self._turn = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._open: dict[str, OpenPurge] = {}
        self._begun: list[OpenPurge] = []
        """Purges whose blocks are being removed."""
        self._detached: dict[str, LevelResult] = {}
        """Detached levels whose media keep their blocks, by the identity of the medium."""
        stack.debts = self
        self._keeper: asyncio.Task[None] | None = None

    @property
    def owed(self) -> int:
        """Number of purges that a level still owes."""
        return len(self._open)

    async def purge(
        self,
        scope: PurgeScope,
        *,
        wait_s: float = 600.0,
        gone: Callable[[], bool] = lambda: False,
    ) -> Receipt:
        """Forget what a scope names; return the receipt when all levels are done, or after a time.

        Its blocks are no hits any more long before that. It is the same purge, and the same
        receipt, that continues when the time is up, or when ``gone`` returns True.

        Raises
        ------
        WrongScope
            The session is not known, the prefix has no whole block, or this engine cannot name
            tokens. Nothing was removed.
        Unavailable
            The receipt cannot be written. Nothing was removed.
        """
        async with self._turn:
            one = await self._begin(scope)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not one.is_over.is_set() and not gone():
                    await self._look()
                    if not one.is_over.is_set():
                        await asyncio.sleep(POLL_S)
        self._keep()
        return one.receipt

    async def _begin(self, scope: PurgeScope) -> OpenPurge:
        """Write the receipt, then remove the blocks from host and the indexes of all levels."""
        stack, asked_s = self._stack, self._clock.wall()
        digest = b"" if scope.salt is None else self._digest(scope.salt)
        keys, told = list[BlockKey](), scope.told()
        if scope.kind == "session":
            keys, digest = self._session(str(scope.session))
        elif scope.kind == "prefix":
            keys, told["ends"] = await self._prefix(scope)
        receipt = Receipt(
            id=receipt_id(asked_s),
            deployment=self._deployment,
            namespace=self._manager.namespace.hex(),
            version=self._version,
            asked_at=timestamp(asked_s),
            mark=self._lineage.mark,
            scope=told,
            salt_digest=digest.hex(),
            levels=[self._result(stack.host), *self._results(), *self._results_away()],
            beyond=[*BEYOND],
        )
        with ExitStack() as pausing:
            if scope.kind in BY_LINEAGE:
                receipt.beyond += [BEYOND_PREFIX, *self._unlisted()]
                judge = await self._run(partial(self._judge, receipt))
                pausing.enter_context(stack.storing_nothing())
                self._filter(receipt, stack.levels)
                keys, receipt.unknown = await self._among(judge, keys, digest)
            await self._promise(receipt, keys)
            if scope.session is not None:  # what its requests saved meanwhile
                await self._forget_session(scope.session, receipt, keys)
            return await self._remove(receipt, keys, stack.levels)

    async def _forget_session(self, name: str, receipt: Receipt, keys: list[BlockKey]) -> None:
        """Forget a session's blocks, and add to ``keys`` what its requests saved meanwhile."""
        with suppress(ValueError):  # it ended meanwhile
            later, _ = self._manager.sessions.purge(name)
            if more := [*dict.fromkeys(later).keys() - {*keys}]:
                keys += more
                await self._promise(receipt, keys)

    async def _promise(self, receipt: Receipt, keys: Sequence[BlockKey]) -> None:
        """Write the receipt and its blocks.

        Raises
        ------
        Unavailable
            The disk does not take them.
        """
        try:
            await self._run(partial(self.ledger.begin, receipt, keys))
        except OSError as error:
            what = f"nothing was purged: the receipt cannot be written: {error}"
            raise Unavailable(what, path="forget.path", hint="make room, or repair it") from error

    def _judge(self, receipt: Receipt) -> Judge:
        """Return what tells the blocks of a prefix or an age; it takes a while.

        Blocks that were saved after the purge was asked are outside.
        """
        scope, lineage = receipt.scope, self._lineage
        if scope["kind"] == "age":
            judges = [lineage.before(seconds(receipt.asked_at) - scope["older_than_s"])]
        else:
            ends = [BlockKey(bytes.fromhex(end)) for end in scope["ends"]]
            judges = [lineage.descends([end]) for end in ends]
        was_there = lineage.until(receipt.mark)

        def judge(some: Sequence[BlockKey]) -> Verdicts:
            each = np.stack([one(some) for one in judges])
            found = np.where((each == MATCH).any(0), MATCH, each.min(0)).astype(np.uint8)
            found[was_there(some) == KEEP] = KEEP
            return found

        return judge

    def _filter(self, receipt: Receipt, levels: Sequence[Level]) -> None:
        """Have levels that are not open yet not hold the blocks of a scope when they are.

        A block of unknown age or descent may belong to it, unless it has another salt.
        """
        salt, any_salt = bytes.fromhex(receipt.salt_digest), receipt.scope["kind"] == "age"

        made: list[Judge] = []

        def keeps(blocks: Sequence[RecoveredBlock]) -> Sequence[bool]:
            if not made:  # only now, as a judge takes memory
                made.append(self._judge(receipt))
            verdicts = made[0]([block.key for block in blocks]).tolist()
            both = zip(blocks, verdicts, strict=True)
            return [
                verdict == KEEP
                or (verdict == UNKNOWN and not any_salt and block.facts.salt != salt)
                for block, verdict in both
            ]

        with self._stack.lock:
            for level in levels:
                level.purges.filter(keeps)

    @property
    def _lineage(self) -> Lineage:
        lineage = self._stack.lineage
        assert lineage is not None, "a cache with a ledger has a lineage"
        return lineage

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

    def _results(self) -> list[LevelResult]:
        return [self._result(level) for level in self._stack.levels]

    def _results_away(self) -> list[LevelResult]:
        """Return a result for each detached level whose medium keeps its blocks."""
        away = [(name, self._detached[medium]) for name, medium in self._away()]
        return [LevelResult(name=name, type=one.type, shared=one.shared) for name, one in away]

    def _unlisted(self) -> list[str]:
        """Return a sentence for each shared level whose tier cannot list its blocks."""
        levels = [level for level in self._stack.levels if level.tier.shared]
        return [UNLISTED.format(level.name) for level in levels if not level.tier.surveys]

    def _session(self, name: str) -> tuple[list[BlockKey], bytes]:
        try:
            keys, salt = self._manager.sessions.blocks(name)
        except ValueError as error:
            raise WrongScope(str(error)) from error
        return list(dict.fromkeys(keys)), self._digest(salt)

    def _digest(self, salt: str) -> bytes:
        return salt_digest(self._manager.namespace, salt)

    async def _prefix(self, scope: PurgeScope) -> tuple[list[BlockKey], list[str]]:
        """Return the prefix's own blocks, and the last one of each group of layers as text."""
        runs: Sequence[Sequence[BlockKey]] = [scope.named_keys]
        if scope.tokens is not None:
            if self._manager.name_blocks is None:
                what = "this engine names blocks itself: expected keys, or a session"
                raise WrongScope(what)
            name = partial(self._manager.name_blocks, scope.tokens, scope.salt or "")
            runs = await self._run(name)
        runs = [run for run in runs if run]
        if not runs:
            raise WrongScope("the prefix is shorter than a block: expected more tokens")
        own = dict.fromkeys(key for run in runs for key in run)
        return list(own), [run[-1].hex() for run in runs]

    async def _among(
        self, judge: Judge, keys: Sequence[BlockKey], salt: bytes
    ) -> tuple[list[BlockKey], int]:
        """Return ``keys`` and the known blocks that belong to a scope, and how many may only do.

        A block of unknown age or descent may belong to it, unless it has another salt.
        """
        found = dict.fromkeys(keys)
        unknown = set[BlockKey]()
        for number, (some, salts) in enumerate(self._stack.every_block()):
            for key, own, verdict in zip(some, salts, judge(some).tolist(), strict=True):
                if verdict == UNKNOWN and key not in found:
                    if own is not None and own != salt and keys:
                        continue
                    unknown.add(key)
                if verdict != KEEP:
                    found[key] = None
            if number % STEPS == 0:
                await asyncio.sleep(0)
        return list(found), len(unknown)

    async def _remove(
        self,
        receipt: Receipt,
        keys: Sequence[BlockKey],
        levels: Sequence[Level],
    ) -> OpenPurge:
        """Remove the blocks of a receipt from host and ``levels``; the tiers follow.

        Shared levels are not asked for blocks that others put there until they were looked at.
        """
        by_name = {level.name: level for level in levels}
        with self._stack.lock:
            erased = {level.name: level.stats.purged for level in levels}
            denied = {level.name: level.stats.denied for level in levels}
        one, gone = OpenPurge(receipt, by_name, erased, denied), dict[str, int]()
        one.media = {name: medium for name, medium in self._away() if name not in by_name}
        self._begun.append(one)
        self._doubt(one, by_name)
        kind, digest = receipt.scope["kind"], bytes.fromhex(receipt.salt_digest)
        if kind in {"salt", "all"}:
            steps = self._stack.purge(digest if kind == "salt" else None, levels)
        else:
            steps = self._stack.purge_keys(keys, levels)
        try:
            for number, counts in enumerate(steps):
                gone = counts
                if number % STEPS == 0:
                    await asyncio.sleep(0)
        finally:
            steps.close()  # nothing is refused any more
            self._begun.remove(one)
        for result in receipt.levels:  # those of an earlier process may have come back
            result.blocks = max(result.blocks, gone.get(result.name, 0))
            result.bytes = result.blocks * self._manager.layout.block_bytes
        self._open[receipt.id] = one
        return one

    def _doubt(self, one: OpenPurge, levels: Mapping[str, Level]) -> None:
        """Have shared levels not asked for blocks of others until they were looked through."""
        if one.receipt.scope["kind"] not in BY_LINEAGE:
            return
        with self._stack.lock:
            for name, level in levels.items():
                if level.tier.shared and level.tier.surveys:
                    level.purges.doubts += 1
                    one.doubts[name] = level

    # ---- what levels owe

    async def resume(self) -> None:
        """Begin again what earlier processes owe, in the levels that owe it.

        Call it before the cache is used.

        Raises
        ------
        ConfigError
            A receipt cannot be read or trusted.
        """
        own = self._manager.namespace.hex()
        owed = await self._run(lambda: [*self.ledger.owed()])
        for receipt in owed:
            if receipt.namespace != own:
                continue
            keys = await self._run(partial(self.ledger.keys, receipt))
            names = {level.name for level in receipt.owed}
            levels = [level for level in self._stack.levels if level.name in names]
            async with self._turn:
                if receipt.scope["kind"] in BY_LINEAGE:
                    self._filter(receipt, levels)
                await self._remove(receipt, keys, levels)
        self._keep()

    def _keep(self) -> None:
        """Look at the levels from time to time, as long as one owes something."""
        if self._open and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._keep_on(), name="kvladder-purges")

    async def _keep_on(self) -> None:
        while self._open:
            await self._look()
            await asyncio.sleep(KEEP_S)

    async def _look(self) -> None:
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
        judge = await self._run(partial(self._judge, receipt))
        is_prefix = receipt.scope["kind"] == "prefix"
        old = await self._run(partial(self._lineage.until, receipt.mark))
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
                result.bytes = result.blocks * self._manager.layout.block_bytes
        self._stack.wake()

    async def _settle(self, one: OpenPurge) -> None:
        """Note which levels are done with a purge, and keep that in the ledger."""
        one.is_new = self._note(one) or one.is_new
        if not one.is_new:
            return
        try:
            await self._run(partial(self.ledger.write, one.receipt))
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
        size, now, changed = self._manager.layout.block_bytes, "", False
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
        keys = await self._run(partial(self.ledger.keys, receipt))
        if receipt.scope["kind"] in BY_LINEAGE:
            self._filter(receipt, [level])
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

    async def check(self, receipt: Receipt) -> Check:
        """Check a receipt: its signature, and whether a level has what it says is gone."""
        found = Check(id=receipt.id, wrong=self.ledger.signer.wrong(receipt))
        own = self._manager.namespace.hex()
        if not found.wrong and receipt.namespace != own:
            found.wrong = f"it is of namespace {receipt.namespace}: this cache has {own}"
        if found.wrong:
            return found
        open_one = self._open.get(receipt.id)
        if open_one is not None:  # what the receipt says may have become out of date
            await self._look()
        try:
            receipt = await self._run(partial(self.ledger.newest, receipt))
            keys = await self._run(partial(self.ledger.keys, receipt))
        except ConfigError as error:
            found.wrong = str(error)
            return found
        found.levels = await check_levels(receipt, keys, self._stack)
        return found

    async def aclose(self) -> None:
        """Stop looking; what is owed stays in the ledger. May be called again."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
        for one in [*self._open.values()]:
            await self._settle(one)
        if self._stack.lineage is not None:
            self._stack.lineage.close()
        self.ledger.close()
