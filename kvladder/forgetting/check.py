"""Checks of receipts: the signature, and a fresh look whether a level has the blocks again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvladder.errors import PermissionDenied
from kvladder.forgetting.receipt import Receipt
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.lineage import KEEP, MATCH, Lineage
from kvladder.tiers.ladder.stack import TierStack

Finding = Literal["clean", "left", "unsure", "owed"]
SEEN_MAX: Final = 1 << 20
"""Largest number of blocks that one check of a level judges; there may be more."""


class LevelCheck(msgspec.Struct, kw_only=True):
    """What a fresh look at one level found."""

    name: str
    finding: Finding = "clean"
    """``left``: blocks that the purge should have removed are there. ``unsure``: blocks of the
    scope are there, but this deployment does not know when they were stored, or cannot look."""
    left: int = 0
    """Blocks that were saved before the purge."""
    newer: int = 0
    """Blocks that were saved after it; they may stay."""
    unknown: int = 0
    """Blocks of the scope that this deployment did not save, such as those of other engines."""
    why: str = ""


class Check(msgspec.Struct, kw_only=True):
    """The result for a whole receipt."""

    id: str
    wrong: str = ""
    """Reason why the receipt is not valid; empty if it is."""
    levels: list[LevelCheck] = []

    @property
    def is_good(self) -> bool:
        """True if the receipt is valid, and no level has anything of it."""
        return not self.wrong and all(level.finding == "clean" for level in self.levels)


class Looker:
    """Judges the blocks that are found at a level, for one receipt.

    Parameters
    ----------
    receipt, keys:
        The receipt, and the blocks that it names one by one.
    lineage:
        What tells when blocks were saved; None if nothing does.
    """

    def __init__(self, receipt: Receipt, keys: Sequence[BlockKey], lineage: Lineage | None) -> None:
        digest = bytes.fromhex(receipt.salt_digest)
        self.by_salt = receipt.scope["kind"] in {"salt", "all"}
        self.salt = digest if receipt.scope["kind"] == "salt" else None
        """The salt to ask levels for; None for any."""
        self.keys = keys
        self._wanted = frozenset(keys)
        self._judge = None if lineage is None else lineage.until(receipt.mark)
        self._seen = set[BlockKey]()

    def take(self, found: Sequence[BlockKey]) -> None:
        """Note blocks of the scope's salt that are at a level."""
        if len(self._seen) < SEEN_MAX:
            self._seen.update(
                found if self.by_salt else (key for key in found if key in self._wanted)
            )

    def judged(self, name: str, why: str, *, owed: bool) -> LevelCheck:
        """Return the finding for one level from what was taken since the last call.

        ``why`` is the reason why the look is not complete.
        """
        seen, self._seen = [*self._seen], set[BlockKey]()
        left = newer = 0
        if seen and self._judge is not None:
            verdicts = self._judge(seen)
            left, newer = int((verdicts == MATCH).sum()), int((verdicts == KEEP).sum())
        unknown = len(seen) - left - newer
        finding: Finding = "left" if left else "unsure" if why or unknown else "clean"
        if owed:
            finding, why = "owed", why or "the purge is not over there"
        return LevelCheck(
            name=name, finding=finding, left=left, newer=newer, unknown=unknown, why=why
        )


async def check_levels(
    receipt: Receipt, keys: Sequence[BlockKey], stack: TierStack
) -> list[LevelCheck]:
    """Look at each level of a running cache for what a receipt says is gone.

    Levels below host are asked for what lies on the medium, as far as their tiers can tell.
    """
    looker = Looker(receipt, keys, stack.lineage)
    states = {level.name: level.state for level in receipt.levels}
    checks: list[LevelCheck] = []
    levels: list[HostLevel | Level] = [stack.host, *stack.levels]
    for level in levels:
        start, why = 0, ""
        while start < level.index.places:
            with stack.lock:
                held, start = level.index.salted(looker.salt, start)
            looker.take(held)
            await asyncio.sleep(0)
        if isinstance(level, Level):
            why = await _look(level, looker)
        owed = states.get(level.name, "done") == "owed"
        checks.append(looker.judged(level.name, why, owed=owed))
    return checks


async def _look(level: Level, looker: Looker) -> str:
    """Look at a level's medium; return why that does not tell all."""
    client, tier = level.client, level.tier
    if looker.by_salt or not tier.shared:
        if tier.surveys:
            try:
                return await client.survey(looker.salt, looker.take)
            except PermissionDenied as error:
                return str(error)
        return "its tier cannot tell what others put there" if tier.shared else ""
    step = min(STEP, tier.probe_max or tier.batch_max)
    for start in range(0, len(looker.keys), step):
        part = looker.keys[start : start + step]
        answer = await client.contains(part)
        if answer.results is None:
            return f"left out: {client.why}" if client.absent else "the tier does not answer"
        looker.take([key for key, is_there in zip(part, answer.results, strict=True) if is_there])
    return ""


def as_lines(check: Check, asked_at: str) -> list[str]:
    """Return a check as lines for people."""
    if check.wrong:
        return [f"receipt {check.id}: not valid: {check.wrong}"]
    return [
        f"receipt {check.id} of {asked_at}: signature valid",
        *(f"{level.name}: {_told(level)}" for level in check.levels),
    ]


def _told(level: LevelCheck) -> str:
    parts: list[str] = [level.finding]
    if level.left:
        parts.append(f"{level.left} blocks from before the purge")
    if level.unknown:
        parts.append(f"{level.unknown} blocks that this deployment did not save")
    if level.newer:
        parts.append(f"{level.newer} blocks saved since")
    if level.why:
        parts.append(level.why)
    return ", ".join(parts)
