"""Finds the blocks of a purge's scope: those that it names, and those that only lineage tells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from kvladder.errors import KvladderError
from kvladder.forgetting.receipt import Receipt, seconds
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import BlockKey, salt_digest
from kvladder.manager import CacheManager
from kvladder.tiers.context import Blocking
from kvladder.tiers.label import RecoveredBlock
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.lineage import KEEP, MATCH, UNKNOWN, Judge, Lineage, Verdicts
from kvladder.tiers.ladder.stack import TierStack

STEPS: Final = 16
"""Steps of a purge between two turns of the loop."""
BY_LINEAGE: Final = {"prefix", "age"}
"""Kinds of scopes with blocks that only the table of parents and times can tell."""


class WrongScope(KvladderError, ValueError):
    """A purge names something that is not there, or that this engine cannot name."""


class Named(NamedTuple):
    """What a scope says by itself, before any level was looked at."""

    keys: list[BlockKey]
    """Blocks that it names one by one."""
    salt_digest: bytes
    """Digest of its salt; empty if it names none."""
    ends: list[str] | None = None
    """Last blocks of a prefix, by group of layers, as text; None for other scopes."""


class ScopeResolver:
    """Tells which blocks a purge is about, and removes none of them.

    A session and a prefix name blocks one by one; a salt names them for the levels. Only the
    lineage tells which blocks descend from a prefix, or are older than a time: see ``judge``. All
    calls come from the cache's loop.

    Parameters
    ----------
    manager, stack:
        The cache, and its levels.
    run_blocking:
        Runs calls that take a while.
    """

    def __init__(self, manager: CacheManager, stack: TierStack, run_blocking: Blocking) -> None:
        self._manager = manager
        self._stack = stack
        self._run = run_blocking

    @property
    def lineage(self) -> Lineage:
        """The table of parents and times."""
        lineage = self._stack.lineage
        assert lineage is not None, "a cache with a ledger has a lineage"
        return lineage

    async def named(self, scope: PurgeScope) -> Named:
        """Return what a scope names.

        Raises
        ------
        WrongScope
            The session is not known, the prefix has no whole block, or this engine cannot name
            tokens.
        """
        if scope.kind == "session":
            return self._session(str(scope.session))
        digest = b"" if scope.salt is None else self._digest(scope.salt)
        if scope.kind == "prefix":
            keys, ends = await self._prefix(scope)
            return Named(keys, digest, ends)
        return Named([], digest)

    def _session(self, name: str) -> Named:
        try:
            keys, salt = self._manager.sessions.blocks(name)
        except ValueError as error:
            raise WrongScope(str(error)) from error
        return Named(list(dict.fromkeys(keys)), self._digest(salt))

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

    def judge(self, receipt: Receipt) -> Judge:
        """Return what tells the blocks of a prefix or an age; it takes a while.

        Blocks that were saved after the purge was asked are outside.
        """
        scope, lineage = receipt.scope, self.lineage
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

    def filter(self, receipt: Receipt, levels: Sequence[Level]) -> None:
        """Have levels that are not open yet not hold the blocks of a scope when they are.

        A block of unknown age or descent may belong to it, unless it has another salt.
        """
        salt, any_salt = bytes.fromhex(receipt.salt_digest), receipt.scope["kind"] == "age"

        made: list[Judge] = []

        def keeps(blocks: Sequence[RecoveredBlock]) -> Sequence[bool]:
            if not made:  # only now, as a judge takes memory
                made.append(self.judge(receipt))
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

    async def known(
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
