"""Runs purges over all levels: the receipt first, then the removal, then what levels owe."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

from kvladder.errors import ConfigError, Unavailable
from kvladder.forgetting.check import Check, check_levels
from kvladder.forgetting.debts import PurgeDebts
from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.owed import OpenPurge
from kvladder.forgetting.receipt import Receipt, receipt_id, timestamp
from kvladder.forgetting.resolver import BY_LINEAGE, STEPS, ScopeResolver
from kvladder.forgetting.resolver import WrongScope as WrongScope
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.tiers.context import Blocking
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.stack import TierStack

POLL_S: Final = 0.02
"""Seconds between two looks at the levels while a caller waits; tiers send no event."""
BEYOND: Final = (
    "the engine's own memory, such as its prefix cache on the device",
    "levels of other engines in their own memory and files: each has its own receipt",
)
BEYOND_PREFIX: Final = "blocks in shared levels that this deployment neither saved nor found there"
UNLISTED: Final = (
    "level {} owes the blocks that this engine does not know by name, as its tier cannot list them:"
    " repeat the purge at each of its servers and peers"
)


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
        self._deployment = deployment or socket.gethostname()
        self._version = version
        self._clock = stack.shared.clock
        self._turn = asyncio.Lock()
        self._resolver = ScopeResolver(manager, stack, run_blocking)
        self._debts = PurgeDebts(
            stack,
            self._resolver,
            ledger,
            run_blocking,
            types=types,
            block_bytes=manager.layout.block_bytes,
        )
        stack.debts = self._debts

    @property
    def owed(self) -> int:
        """Number of purges that a level still owes."""
        return self._debts.owed

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
                    await self._debts.look()
                    if not one.is_over.is_set():
                        await asyncio.sleep(POLL_S)
        self._debts.keep()
        return one.receipt

    async def _begin(self, scope: PurgeScope) -> OpenPurge:
        """Write the receipt, then remove the blocks from host and the indexes of all levels."""
        stack, asked_s = self._stack, self._clock.wall()
        named, told = await self._resolver.named(scope), scope.told()
        keys, digest = named.keys, named.salt_digest
        if named.ends is not None:
            told["ends"] = named.ends
        receipt = Receipt(
            id=receipt_id(asked_s),
            deployment=self._deployment,
            namespace=self._manager.namespace.hex(),
            version=self._version,
            asked_at=timestamp(asked_s),
            mark=self._resolver.lineage.mark,
            scope=told,
            salt_digest=digest.hex(),
            levels=self._debts.results(),
            beyond=[*BEYOND],
        )
        with ExitStack() as pausing:
            if scope.kind in BY_LINEAGE:
                receipt.beyond += [BEYOND_PREFIX, *self._unlisted()]
                judge = await self._run(partial(self._resolver.judge, receipt))
                # From here to the removal: a block stored meanwhile would not be looked at.
                pausing.enter_context(stack.storing_nothing())
                self._resolver.filter(receipt, stack.levels)
                keys, receipt.unknown = await self._resolver.known(judge, keys, digest)
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

    def _unlisted(self) -> list[str]:
        """Return a sentence for each shared level whose tier cannot list its blocks."""
        levels = [level for level in self._stack.levels if level.tier.shared]
        return [UNLISTED.format(level.name) for level in levels if not level.tier.surveys]

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
        kind, digest = receipt.scope["kind"], bytes.fromhex(receipt.salt_digest)
        with self._debts.removing(one):
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
            for result in receipt.levels:  # those of an earlier process may have come back
                result.blocks = max(result.blocks, gone.get(result.name, 0))
                result.bytes = result.blocks * self._manager.layout.block_bytes
        return one

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
                    self._resolver.filter(receipt, levels)
                await self._remove(receipt, keys, levels)
        self._debts.keep()

    async def check(self, receipt: Receipt) -> Check:
        """Check a receipt: its signature, and whether a level has what it says is gone."""
        found = Check(id=receipt.id, wrong=self.ledger.signer.wrong(receipt))
        own = self._manager.namespace.hex()
        if not found.wrong and receipt.namespace != own:
            found.wrong = f"it is of namespace {receipt.namespace}: this cache has {own}"
        if found.wrong:
            return found
        if self._debts.owes(receipt):  # what the receipt says may have become out of date
            await self._debts.look()
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
        await self._debts.aclose()
        if self._stack.lineage is not None:
            self._stack.lineage.close()
        self.ledger.close()
