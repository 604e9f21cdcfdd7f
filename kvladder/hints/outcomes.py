"""Outcomes of actions: from what the levels did, for answers, counters and traces."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvladder.hints.protocol import VERBS, Action, ActionResult
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.tiers.ladder.upkeep.commands import Moved
from kvladder.tiers.spans import HintsSpan
from kvladder.units import counted

_SHARE = "beyond the part that limits.raised and limits.raised_tenant allow"
UNKNOWN = "unknown"
"""Name for the actions of all unknown types."""


def verb_of(action_type: str) -> str:
    """Return a verb of the protocol, or ``unknown``."""
    if action_type in VERBS:
        return action_type
    verb = action_type.lower()
    return verb if verb in VERBS else UNKNOWN


def end_span(span: HintsSpan, actions: Sequence[Action], results: Sequence[ActionResult]) -> None:
    """End the span of an envelope with these actions."""
    verbs = [verb_of(action.action_type) for action in actions]
    span.ended(verbs, [one.outcome for one in results], sum(one.blocks for one in results))


def end_s(priority: int, within_s: float | None, since_s: float) -> float:
    """Return the loop time until which a priority lasts."""
    return inf if within_s is None or priority == PRIORITY_DEFAULT else since_s + within_s


def ranked(action_id: str, moved: Moved, clipped: str) -> ActionResult:
    """Return the outcome of a ranking."""
    if not moved.done:
        return ActionResult(action_id, "missing", "no level holds these blocks")
    if moved.lowered:
        clipped = ": ".join(filter(None, (clipped, f"{counted(moved.lowered, 'block')} {_SHARE}")))
    if clipped:
        return ActionResult(action_id, "clipped", clipped, moved.done)
    if moved.missing:
        left = counted(len(moved.missing), "block")
        return ActionResult(action_id, "clipped", f"without {left}", moved.done)
    return ActionResult(action_id, "accepted", "", moved.done)


def rejected(action: Action, why: str) -> ActionResult:
    """Return the outcome of an action that is not done."""
    return ActionResult(action.action_id, "rejected", why)


def outcome(moved: Moved) -> ActionResult:
    """Return the outcome of a command."""
    if moved.waiting:
        return ActionResult("", "deferred", "the level's queue is full: send it again", moved.done)
    if moved.done:
        if moved.missing or moved.refused:
            left = counted(len(moved.missing) + moved.refused, "block")
            return ActionResult("", "clipped", f"without {left}", moved.done)
        return ActionResult("", "accepted", blocks=moved.done)
    if moved.refused:
        return ActionResult("", "rejected", "no level takes these blocks at their priority")
    return ActionResult("", "missing", "no level holds these blocks")
