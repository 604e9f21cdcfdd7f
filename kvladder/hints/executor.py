"""Acts on hints: five verbs over the cache manager, each with an outcome."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from kvladder.hints.fetches import PREFETCHES_MAX, WAITING_MAX, HintFetches
from kvladder.hints.late import LateActions
from kvladder.hints.moves import Move, move, require
from kvladder.hints.outcomes import UNKNOWN, end_span, outcome, rejected, verb_of
from kvladder.hints.protocol import (
    ACTIONS_MAX,
    VERSIONS,
    Action,
    ActionResult,
    Envelope,
    Order,
    Outcome,
    PinHint,
    PrefetchHint,
    RefusedHint,
    RetainHint,
    content_of,
    order_of,
    read,
)
from kvladder.hints.rankings import RANKS, RankingBatch, clipped
from kvladder.hints.scopes import NO_REQUEST, NameBlocks, OwnRequest, Scoped, Scopes
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.tiers.spans import HintsSpan, TraceHeaders
from kvladder.units import counted

MESSAGES_MAX = 4096
"""Number of messages whose results are kept, so that a repeated one is not done again."""
POLL_S = 0.02
"""Time between two looks at fetches in flight."""
POSTED = "\0posted"
"""The caller of hints that come without a request. All that send such hints share message ids."""


class _Applied(NamedTuple):
    """A message that was applied."""

    content: int
    """Hash of its actions."""
    results: list[ActionResult]


class HintExecutor:
    """Acts on the hints of one engine. It changes where blocks lie and how long, never a token.

    No call waits for a tier. While fetches that hints began are in flight, the cache's loop looks
    at them, ends those that are done, and begins those that had to wait. Calls may come from any
    thread. A cache has one executor: see ``of``.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._commands = manager.commands
        self._lock = Lock()
        self._results: OrderedDict[tuple[str, str], _Applied] = OrderedDict()
        self._scopes = Scopes(manager)
        self._fetches = HintFetches(manager)
        self._late = LateActions(manager)
        self._counts: Counter[tuple[str, Outcome]] = Counter()
        self._is_polled = False
        """True while the loop looks at what is in flight."""
        self._is_closed = False
        manager.report("hints", self.counts)

    @property
    def name_blocks(self) -> NameBlocks | None:
        """Names the blocks of tokens as the engine does; set by its connector, for purges, too.

        None if the engine's names are not known outside it: then hints name sessions or keys.
        """
        return self._manager.name_blocks

    @name_blocks.setter
    def name_blocks(self, names: NameBlocks | None) -> None:
        self._manager.name_blocks = names

    @classmethod
    def of(cls, manager: CacheManager) -> HintExecutor:
        """Return the executor of a cache, made when first asked for; closed before the cache."""
        return manager.guests.only(cls)

    def counts(self) -> dict[str, Any]:
        """Return how many actions had which outcome, by verb; plain data."""
        with self._lock:
            counts: dict[str, Any] = {}
            for (verb, outcome), count in sorted(self._counts.items()):
                counts.setdefault(verb, {})[outcome] = count
        return counts | {"in_flight": self._fetches.in_flight}

    def apply(
        self,
        hints: object,
        *,
        request: OwnRequest | None = None,
        caller: str = "",
        trace: TraceHeaders | None = None,
    ) -> list[ActionResult]:
        """Do what an envelope asks, as far as it may be done; return an outcome for each action.

        Never raises for what an envelope contains. A message of the same ``caller`` that was
        applied before is not applied again: its results are returned. ``caller`` is the tenant that
        sends it; ids of different callers never meet. ``trace`` has the headers of its trace.
        """
        try:
            return self.obey(hints, request=request, caller=caller, trace=trace)
        except RefusedHint as error:
            return [ActionResult("", "rejected", str(error))]

    def obey(
        self,
        hints: object,
        *,
        request: OwnRequest | None = None,
        caller: str = "",
        trace: TraceHeaders | None = None,
    ) -> list[ActionResult]:
        """Do as ``apply``, but raise ``RefusedHint`` for what is not an envelope at all."""
        span = self.span(trace)
        try:
            envelope = read(hints)
            results = self.act(envelope, request=request, caller=caller)
        except RefusedHint as error:
            self.refused(error)
            if span is not None:
                span.ended([UNKNOWN], ["rejected"], 0)
            raise
        if span is not None:
            end_span(span, envelope.actions, results)
        return results

    def span(self, trace: TraceHeaders | None) -> HintsSpan | None:
        """Begin a span for an envelope; None if the cache is not traced, or the trace not sampled.

        ``trace`` are the headers that it continues; without any it begins a trace.
        """
        return tracer.hints(trace) if (tracer := self._manager.tracer) is not None else None

    def refused(self, error: RefusedHint) -> ActionResult:
        """Count an envelope that is refused as a whole; return the outcome."""
        result = ActionResult("", "rejected", str(error))
        with self._lock:
            self._counts[UNKNOWN, result.outcome] += 1
        return result

    def act(
        self, envelope: Envelope, *, request: OwnRequest | None, caller: str
    ) -> list[ActionResult]:
        """Do as ``obey`` for an envelope that was read, without a span."""
        content = content_of(envelope.actions)
        message = (caller, envelope.message_id)
        with self._lock:
            known = self._results.get(message)
        if known is not None:
            if known.content == content:
                return known.results
            return self._all_rejected(envelope, _REUSED)
        if envelope.protocol_version not in VERSIONS:
            version = envelope.protocol_version[:32]
            return self._all_rejected(envelope, f"unknown protocol {version!r}: expected 0.1 or 1")
        actions = envelope.actions
        results = self._do_all(message, actions[:ACTIONS_MAX], request)
        results += [rejected(action, _TOO_MANY) for action in actions[ACTIONS_MAX:]]
        with self._lock:
            self._count(actions, results)
            self._results[message] = _Applied(content, results)
            while len(self._results) > MESSAGES_MAX:
                self._results.popitem(last=False)
        return results

    def later(self, order: Order, keys: Sequence[BlockKey], salt: str) -> None:
        """Rank, demote or share blocks of a finished request, each as soon as it is saved."""
        self._late.add(order, keys, self._scopes.digest(salt))
        self._watch()

    def clipped(self, priority: int, ttl_s: float | None) -> tuple[tuple[int, float | None], str]:
        """Return a priority and its duration within the operator's limits, and how they differ.

        The text is empty if they are as asked for.
        """
        return clipped(self._manager.limits, priority, ttl_s)

    def require(self, order: Move) -> None:
        """Raise ``RefusedHint`` if an order names a level that cannot take blocks for it."""
        require(self._manager, order)

    def count(self, action: Action, result: ActionResult) -> ActionResult:
        """Count the outcome of an action done elsewhere; return it with the id of the action."""
        found = ActionResult(action.action_id, *result[1:])
        with self._lock:
            self._count([action], [found])
        return found

    def poll(self) -> None:
        """End the fetches that are done, and begin those that waited for others.

        The loop calls it while anything is in flight; others need not.
        """
        self._late.poll()
        self._fetches.poll()

    def close(self) -> None:
        """Give up all fetches; may be called again."""
        with self._lock:
            self._is_closed = True
        self._late.clear()
        self._fetches.close()

    # ---- one action

    def _do_all(
        self, message: tuple[str, str], actions: Sequence[Action], request: OwnRequest | None
    ) -> list[ActionResult]:
        """Do actions in order; those that only rank blocks and follow each other are done at once.

        Returns the outcome of each.
        """
        own, now_s = request or NO_REQUEST, self._manager.ladder.clock.now()
        found: list[ActionResult] = [_UNNAMED] * len(actions)
        batch = RankingBatch(
            self._commands,
            self._manager.limits,
            (own.keys, self._scopes.digest(own.salt)),
            partial(self._named, request),
            now_s,
        )
        for number, action in enumerate(actions):
            try:
                order = order_of(action)
                if isinstance(order, RANKS):
                    if batch.add(number, order):
                        continue
                    result = _UNNAMED
                else:
                    batch.done(actions, found)
                    result = self._done(message, order, request)
            except RefusedHint as error:
                found[number] = rejected(action, str(error))
            else:
                found[number] = ActionResult(action.action_id, *result[1:])
        batch.done(actions, found)
        return found

    def _done(
        self, message: tuple[str, str], order: Move | PrefetchHint, request: OwnRequest | None
    ) -> ActionResult:
        if isinstance(order, PrefetchHint) and order.cancels is not None:
            return self._cancel((message[0], order.cancels))
        scope = self._scopes.of(order, request)
        if not any(scope.runs):
            return _UNNAMED
        if isinstance(order, PrefetchHint):
            result = self._prefetch(message, scope, order)
        else:
            result = self._move(message, scope, order)
        self._watch()
        return result

    def _named(
        self, request: OwnRequest | None, order: PinHint | RetainHint
    ) -> tuple[Sequence[BlockKey], bytes, bool]:
        """Return the blocks that a ranking names; see ``RankingBatch``."""
        scope = self._scopes.of(order, request)
        return scope.keys, self._scopes.digest(scope.salt), scope.is_prefix

    def _prefetch(
        self, message: tuple[str, str], scope: Scoped, order: PrefetchHint
    ) -> ActionResult:
        """Begin to bring the prefixes up, at most as many blocks as the budget allows."""
        budget = order.budget_blocks or sum(map(len, scope.runs))
        runs: list[Sequence[BlockKey]] = []
        reached = unknown = 0
        for run in scope.runs:
            length = self._manager.reach(run)
            if not scope.is_prefix:  # the keys may be another's: only recorded owners count
                length = min(length, self._commands.own(run, self._scopes.digest(scope.salt)))
            reached += length
            runs.append(run[: min(length, budget - sum(map(len, runs)))])
            unknown += len(runs[-1]) - self._manager.lookup(runs[-1]).total
        wanted = sum(map(len, runs))
        if not wanted:
            return ActionResult("", "missing", "no level holds these blocks")
        begin, deadline_s = self._fetches.begin, order.deadline_s
        waits = [begin(message, run, scope, deadline_s=deadline_s) for run in runs if run]
        if None in waits:
            return ActionResult("", "rejected", _FULL)
        if any(waits):
            why = f"{counted(PREFETCHES_MAX, 'fetch')} are in flight"
            return ActionResult("", "deferred", why, wanted)
        if unknown:
            why = f"a shared level has to be asked about {counted(unknown, 'block')}"
            return ActionResult("", "deferred", why, wanted - unknown)
        if wanted < reached:
            return ActionResult("", "clipped", f"to {counted(wanted, 'block')}", wanted)
        return ActionResult("", "accepted", blocks=wanted)

    def _cancel(self, message: tuple[str, str]) -> ActionResult:
        blocks = self._fetches.cancel(message)
        if blocks is None:
            return ActionResult("", "missing", "no prefetch of this message is in flight")
        return ActionResult("", "accepted", blocks=blocks)

    def _move(self, message: tuple[str, str], scope: Scoped, order: Move) -> ActionResult:
        """Move or copy the blocks; those that are not in host memory are brought up first."""
        require(self._manager, order)
        keys, salt = scope.keys, self._scopes.digest(scope.salt)
        moved = move(self._manager, order, keys, salt)
        if not moved.away:
            return outcome(moved)
        again = partial(move, self._manager, order, moved.away, salt)
        if self._fetches.begin(message, moved.away, scope, again) is None:
            return ActionResult("", "rejected", _FULL, moved.done)
        why = f"{counted(len(moved.away), 'block')} must come to host memory first"
        return ActionResult("", "deferred", why, moved.done)

    # ---- what is in flight

    @property
    def is_busy(self) -> bool:
        """True if a fetch or an action about a finished request is in flight, or waits."""
        return self._fetches.is_busy or self._late.is_busy

    def _watch(self) -> None:
        """Have the loop look at what is in flight, until nothing is."""
        with self._lock:
            if self._is_polled or self._is_closed or not self.is_busy:
                return
            self._is_polled = True
        self._manager.post(self._look)

    def _look(self) -> None:
        try:
            self.poll()
        finally:
            with self._lock:
                self._is_polled = not self._is_closed and self.is_busy
                again = self._is_polled
            if again:
                asyncio.get_running_loop().call_later(POLL_S, self._look)

    # ---- outcomes

    def _all_rejected(self, envelope: Envelope, why: str) -> list[ActionResult]:
        results = [rejected(action, why) for action in envelope.actions]
        with self._lock:
            self._count(envelope.actions, results)
        return results

    def _count(self, actions: Sequence[Action], results: Sequence[ActionResult]) -> None:
        """Count the outcomes of actions; with the lock held."""
        pairs = zip(actions, results, strict=True)
        found: Counter[tuple[str, Outcome]] = Counter(
            [(action.action_type, result.outcome) for action, result in pairs]
        )
        for (kind, fate), count in found.items():
            self._counts[verb_of(kind), fate] += count


_UNNAMED = ActionResult("", "missing", "no whole block is named")
_REUSED = "the message id was used for other actions: expected a new one"
_TOO_MANY = f"an envelope has at most {ACTIONS_MAX} actions"
_FULL = f"{WAITING_MAX} actions wait for their blocks: expected fewer at once"


def apply_posted(
    manager: CacheManager, body: bytes, headers: Mapping[str, str]
) -> list[ActionResult]:
    """Do what an envelope asks that came without a request; return an outcome for each action.

    Raises
    ------
    RefusedHint
        The body is no envelope; says which field is wrong.
    """
    trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return HintExecutor.of(manager).obey(body, caller=POSTED, trace=trace)
