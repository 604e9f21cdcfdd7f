"""Actions of an envelope that only rank blocks: those that follow each other are done at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvladder.hints.outcomes import end_s, ranked
from kvladder.hints.protocol import Action, ActionResult, PinHint, RetainHint
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.tenants import NO_LIMITS, Limits
from kvladder.tiers.ladder.upkeep.commands import Ranking, StackCommands

RANKS: Final = PinHint, RetainHint
"""Orders that only rank blocks."""


def clipped(
    limits: Limits, priority: int, ttl_s: float | None
) -> tuple[tuple[int, float | None], str]:
    """Return a priority and its duration within the operator's limits, and how they differ.

    The text is empty if they are as asked for.
    """
    if limits == NO_LIMITS:
        return (priority, ttl_s), ""
    (lower,), (within_s,), count = limits.clipped([priority], [ttl_s])
    lasting = "" if within_s is None else f" for {within_s:g} s"
    why = f"priority {lower}{lasting}" if count else ""
    return (lower, None if within_s is None else float(within_s)), why


class RankingBatch:
    """The rankings of one envelope that wait to be done at once.

    Parameters
    ----------
    own:
        Keys and digested salt of the request's own blocks, which an action without a scope is
        about; no keys without a request.
    scope_of:
        Returns the keys of another action, its digested salt, and whether they are whole prefixes.
    now_s:
        Loop time at which the durations begin.
    """

    def __init__(
        self,
        commands: StackCommands,
        limits: Limits,
        own: tuple[Sequence[BlockKey], bytes],
        scope_of: Callable[[PinHint | RetainHint], tuple[Sequence[BlockKey], bytes, bool]],
        now_s: float,
    ) -> None:
        self._commands = commands
        self._limits = limits
        self._is_limited = limits != NO_LIMITS
        self._own = own
        self._scope_of = scope_of
        self._now_s = now_s
        self._numbers: list[int] = []
        self._rankings: list[Ranking] = []
        self._clipped: list[str] = []

    def add(self, number: int, order: PinHint | RetainHint) -> bool:
        """Have an action wait; return False if it names no whole block.

        Raises
        ------
        RefusedHint
            Its scope cannot be named.
        """
        is_own = order.tokens is None and order.keys is None and order.session is None
        if is_own and order.salt is None:
            keys, salt = self._own
            is_prefix = True
        else:
            keys, salt, is_prefix = self._scope_of(order)
        if not keys:
            return False
        priority = order.priority if type(order) is RetainHint else PRIORITY_MAX
        within_s, why = order.ttl_s, ""
        if self._is_limited:
            (priority, within_s), why = clipped(self._limits, priority, within_s)
        until_s = end_s(priority, within_s, self._now_s)
        self._numbers.append(number)
        self._rankings.append(Ranking(keys, salt, priority, until_s, is_prefix))
        self._clipped.append(why)
        return True

    def done(self, actions: Sequence[Action], found: list[ActionResult]) -> None:
        """Rank the blocks of those that wait, and set their outcomes in ``found``."""
        if not self._numbers:
            return
        moves = self._commands.rank(self._rankings)
        for number, moved, why in zip(self._numbers, moves, self._clipped, strict=True):
            found[number] = ranked(actions[number].action_id, moved, why)
        self._numbers, self._rankings, self._clipped = [], [], []
