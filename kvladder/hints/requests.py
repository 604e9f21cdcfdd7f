"""Hints that come with a request: done at its start as far as they can be, the rest at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvladder.hints.executor import HintExecutor
from kvladder.hints.outcomes import end_span
from kvladder.hints.protocol import (
    ACTIONS_MAX,
    VERSIONS,
    Action,
    ActionResult,
    DemoteHint,
    Envelope,
    Order,
    PartialEnvelope,
    PinHint,
    PrefetchHint,
    RefusedHint,
    RetainHint,
    ShareHint,
    order_of,
    read,
)
from kvladder.hints.scopes import OwnRequest
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.spans import TraceHeaders


@dataclass(slots=True)
class RequestHints:
    """The hints of one request.

    An action without tokens, keys or a session is about the request's own blocks. ``pin`` and
    ``retain`` then decide how its blocks are saved. ``demote`` and ``share`` wait for its end.
    """

    results: list[ActionResult] = field(default_factory=list[ActionResult])
    ranked: tuple[int, float | None] | None = None
    """Priority of its blocks and its duration in seconds, None for good; None if not ranked."""
    waiting: list[Order] = field(default_factory=list[Order])
    """Orders about its own blocks, for when it has finished."""

    def finish(self, executor: HintExecutor, runs: Sequence[Sequence[BlockKey]], salt: str) -> None:
        """Do the orders that waited; ``runs`` are the keys of its blocks, by group of layers.

        Blocks whose saves are still in flight follow when these have ended.
        """
        keys = [key for run in runs for key in run]
        for order in self.waiting:
            executor.later(order, keys, salt)
        self.waiting = []


def begin(
    executor: HintExecutor,
    hints: object,
    *,
    salt: str,
    ranks_saves: bool = True,
    names_others: bool = True,
    trace: TraceHeaders | None = None,
) -> RequestHints:
    """Do what the hints of a request ask at its start; never raises for what they contain.

    ``ranks_saves`` is False if the engine cannot save its blocks with a time limit for their
    priority, or does not save blocks again that are held: they are then ranked at its end, too.
    ``names_others`` is False if the engine does not tell the salts of requests: actions about other
    blocks than the request's own are then rejected, as they might be another's. ``trace`` has the
    headers of the request's trace.
    """
    try:
        envelope = read(hints)
    except RefusedHint:
        return RequestHints(executor.apply(hints, caller=salt, trace=trace))  # counts it
    span = executor.span(trace)
    found = RequestHints()
    try:
        _begin(executor, envelope, found, salt, ranks_saves=ranks_saves, names_others=names_others)
    except RefusedHint as error:
        found.results = [executor.refused(error)]
    if span is not None:
        end_span(span, envelope.actions, found.results)
    return found


def _begin(
    executor: HintExecutor,
    envelope: Envelope,
    found: RequestHints,
    salt: str,
    *,
    ranks_saves: bool,
    names_others: bool,
) -> None:
    """Do what an envelope asks as far as it can be done now.

    Raises
    ------
    RefusedHint
        A payload has values that JSON cannot have; nothing was done.
    """
    orders = [_own_order(action, salt) for action in envelope.actions[:ACTIONS_MAX]]
    orders += [None] * (len(envelope.actions) - len(orders))
    if envelope.protocol_version not in VERSIONS or (names_others and not any(orders)):
        found.results = executor.act(envelope, request=OwnRequest((), salt), caller=salt)
        return
    both = [*zip(envelope.actions, orders, strict=True)]
    rest = [action for action, order in both if order is None]
    others = PartialEnvelope(envelope.protocol_version, envelope.message_id, rest)
    done: list[ActionResult] = []
    if not names_others:
        done = [executor.count(action, _refused(action)) for action in rest]
    elif rest:
        done = executor.act(others, request=OwnRequest((), salt), caller=salt)
    results = iter(done)
    for action, order in both:
        own = None if order is None else _own(executor, found, action, order)
        if order is not None and not ranks_saves and isinstance(order, PinHint | RetainHint):
            found.waiting.append(order)
        found.results.append(next(results) if own is None else own)


def _refused(action: Action) -> ActionResult:
    """Return the outcome of an action about blocks that may be another tenant's."""
    try:
        order_of(action)
    except RefusedHint as error:
        return ActionResult("", "rejected", str(error))
    return ActionResult("", "rejected", _ONLY_OWN)


def _own_order(action: Action, salt: str) -> Order | None:
    """Return the order of an action about the blocks of its own request; None of another one."""
    try:
        order = order_of(action)
    except RefusedHint:
        return None
    cancels = isinstance(order, PrefetchHint) and order.cancels is not None
    named = (order.tokens, order.keys, order.session)
    is_own = all(one is None for one in named) and order.salt in (None, salt) and not cancels
    return order if is_own else None


_ONLY_OWN = "this engine tells no salts: expected an action about the request's own blocks"


def _own(executor: HintExecutor, found: RequestHints, action: Action, order: Order) -> ActionResult:
    """Do an order about the request's own blocks, as far as it can be done at its start."""
    result = ActionResult("", "accepted")
    match order:
        case PinHint() | RetainHint():
            priority = PRIORITY_MAX if isinstance(order, PinHint) else order.priority
            found.ranked, clipped = executor.clipped(priority, order.ttl_s)
            if clipped:
                result = ActionResult("", "clipped", clipped)
        case DemoteHint() | ShareHint():
            try:
                executor.require(order)
            except RefusedHint as error:
                result = ActionResult("", "rejected", str(error))
            else:
                found.waiting.append(order)
                result = ActionResult("", "deferred", "until the request has finished")
        case PrefetchHint():
            result = ActionResult("", "accepted", "the request fetches its blocks itself")
    return executor.count(action, result)
