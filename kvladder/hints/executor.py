"""Acts on hints: five verbs over the cache manager, each with an outcome."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

from kvladder.hints.outcomes import (
    UNKNOWN,
    end_s,
    end_span,
    outcome,
    rejected,
    verb_of,
)
from kvladder.hints.pending import RETRY_MAX_S, Fetching, Later, Scoped
from kvladder.hints.protocol import (
    ACTIONS_MAX,
    VERSIONS,
    Action,
    ActionResult,
    DemoteHint,
    Envelope,
    Order,
    Outcome,
    PinHint,
    PrefetchHint,
    RefusedHint,
    RetainHint,
    Scope,
    ShareHint,
    content_of,
    order_of,
    read,
)
from kvladder.hints.rankings import RANKS, RankingBatch, clipped
from kvladder.keys import BlockKey, salt_digest
from kvladder.manager import CacheManager, Fetch
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.fetch_cost import ANYTHING
from kvladder.tiers.ladder.upkeep.commands import Moved, Ranking
from kvladder.tiers.spans import HintsSpan, TraceHeaders
from kvladder.units import counted

MESSAGES_MAX = 4096
"""Number of messages whose results are kept, so that a repeated one is not done again."""
PREFETCHES_MAX = 16
"""Number of fetches for hints in flight at once."""
WAITING_MAX = 256
"""Number of actions that may wait until such a fetch may begin."""
SAVED_S = 30.0
"""Time during which an action about a finished request waits for the saves of its blocks."""
OUT = "out"
"""Name of no level: where demoted blocks are forgotten."""
POLL_S = 0.02
"""Time between two looks at fetches in flight."""
Move: TypeAlias = DemoteHint | ShareHint
NameBlocks: TypeAlias = Callable[[Sequence[int], str], Sequence[Sequence[BlockKey]]]
"""Returns the keys of the whole blocks of tokens under a salt, by group of layers.

Any thread may call it.
"""
POSTED = "\0posted"
"""The caller of hints that come without a request. All that send such hints share message ids."""


class OwnRequest(NamedTuple):
    """The request that brings hints, if one does: its blocks are the default scope."""

    keys: Sequence[BlockKey] = ()
    salt: str = ""


_NONE: Final = OwnRequest()


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
        self._fetching: list[Fetching] = []
        self._later: deque[Later] = deque(maxlen=WAITING_MAX)
        self._later_s = inf
        """Loop time at which the first of these is tried again."""
        self._counts: Counter[tuple[str, Outcome]] = Counter()
        self._digested = "", salt_digest(manager.namespace, "")
        """The last salt, with its digest."""
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
            return counts | {"in_flight": sum(one.fetch is not None for one in self._fetching)}

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
        """Rank, demote or share blocks of a finished request, each as soon as it is saved.

        Done once for each block. Those that are not saved within ``SAVED_S`` are given up, and the
        oldest such action if too many wait.
        """
        now_s = self._manager.ladder.clock.now()
        with self._lock:
            one = Later(order, keys, self._digest(salt), now_s + SAVED_S, now_s, now_s)
            self._later.append(one)
            self._later_s = now_s
        self._do_later()
        self._watch()

    def _do_later(self) -> None:
        now_s = self._manager.ladder.clock.now()
        if now_s < self._later_s:
            return
        with self._lock:
            waiting, self._later = self._later, deque(maxlen=WAITING_MAX)
            self._later_s = inf
        for one in waiting:
            if one.again_s <= now_s:
                one.keys = self._done_late(one).left
                one.again_s = now_s + one.wait_s
                one.wait_s = min(2 * one.wait_s, RETRY_MAX_S)
            if one.keys and now_s < one.until_s:
                with self._lock:
                    self._later.append(one)
                    self._later_s = min(self._later_s, one.again_s)

    def _done_late(self, one: Later) -> Moved:
        match one.order:
            case PinHint():
                return self._rank_late(one, PRIORITY_MAX, one.order.ttl_s)
            case RetainHint():
                return self._rank_late(one, one.order.priority, one.order.ttl_s)
            case DemoteHint() | ShareHint():
                return self._moves(one.order, one.keys, one.salt)
            case PrefetchHint():  # the request has fetched its blocks itself
                return Moved()

    def _rank_late(self, one: Later, priority: int, ttl_s: float | None) -> Moved:
        """Rank the blocks of a request that has finished; its time began then."""
        (lower, within_s), _ = self.clipped(priority, ttl_s)
        until_s = end_s(lower, within_s, one.since_s)
        (moved,) = self._commands.rank([Ranking(one.keys, one.salt, lower, until_s, True)])
        return moved

    def _moves(self, order: Move, keys: Sequence[BlockKey], salt: bytes) -> Moved:
        """Do what an order says with blocks that are in host memory.

        An order that has waited may name a level that is gone: its blocks are then refused.
        """
        try:
            self.require(order)
        except RefusedHint:
            return Moved(refused=len(keys))
        if isinstance(order, ShareHint):
            return self._commands.send(keys, salt, order.to or self._commands.shared_levels[0])
        if order.to == OUT:
            return self._commands.drop(keys, salt)
        return self._commands.demote(keys, salt, order.to)

    def clipped(self, priority: int, ttl_s: float | None) -> tuple[tuple[int, float | None], str]:
        """Return a priority and its duration within the operator's limits, and how they differ.

        The text is empty if they are as asked for.
        """
        return clipped(self._manager.limits, priority, ttl_s)

    def require(self, order: Move) -> None:
        """Raise ``RefusedHint`` if an order names a level that cannot take blocks for it."""
        if isinstance(order, DemoteHint):
            self._require_level(order.to)
            return
        shared = self._commands.shared_levels
        if not shared:
            raise RefusedHint("no level is shared: expected a Redis, NIXL, Mooncake or object tier")
        if order.to is not None and order.to not in shared:
            raise RefusedHint(f"level {order.to!r} is not shared: expected {' or '.join(shared)}")

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
        self._do_later()
        with self._lock:
            ended = [one for one in self._fetching if one.fetch is not None and one.fetch.done]
            self._fetching = [one for one in self._fetching if one not in ended]
        for one in ended:
            self._end(one)
        self._begin_waiting()

    def close(self) -> None:
        """Give up all fetches; may be called again."""
        with self._lock:
            fetching, self._fetching = self._fetching, []
            self._later.clear()
            self._is_closed = True
        for one in fetching:
            if one.fetch is not None:
                one.fetch.release()

    # ---- one action

    def _do_all(
        self, message: tuple[str, str], actions: Sequence[Action], request: OwnRequest | None
    ) -> list[ActionResult]:
        """Do actions in order; those that only rank blocks and follow each other are done at once.

        Returns the outcome of each.
        """
        own, now_s = request or _NONE, self._manager.ladder.clock.now()
        found: list[ActionResult] = [_UNNAMED] * len(actions)
        batch = RankingBatch(
            self._commands,
            self._manager.limits,
            (own.keys, self._digest(own.salt)),
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
        scope = self._scope(order, request)
        if not any(scope.runs):
            return _UNNAMED
        if isinstance(order, PrefetchHint):
            return self._prefetch(message, scope, order)
        return self._move(message, scope, order)

    def _scope(self, scope: Scope, request: OwnRequest | None) -> Scoped:
        """Return the blocks that an action names."""
        own = request or _NONE
        salt = own.salt if scope.salt is None else scope.salt
        if request is not None and salt != own.salt:
            raise RefusedHint("the salt is not that of the request: expected none, or the same")
        if scope.session is not None:
            try:
                runs, salt_of = self._manager.sessions.last(scope.session)
            except ValueError:
                return Scoped([], salt, is_prefix=False)
            return Scoped(runs if salt_of == salt else [], salt, is_prefix=True)
        if scope.keys is not None:
            keys = [BlockKey(bytes.fromhex(key)) for key in scope.keys]
            return Scoped([keys], salt, is_prefix=False)
        if scope.tokens is None:
            return Scoped([own.keys], salt, is_prefix=True)
        if self.name_blocks is None:
            raise RefusedHint("this engine names blocks itself: expected a session or keys")
        return Scoped(self.name_blocks(scope.tokens, salt), salt, is_prefix=True)

    def _named(
        self, request: OwnRequest | None, order: PinHint | RetainHint
    ) -> tuple[Sequence[BlockKey], bytes, bool]:
        """Return the blocks that a ranking names; see ``RankingBatch``."""
        scope = self._scope(order, request)
        return scope.keys, self._digest(scope.salt), scope.is_prefix

    def _prefetch(
        self, message: tuple[str, str], scope: Scoped, order: PrefetchHint
    ) -> ActionResult:
        """Begin to bring the prefixes up, at most as many blocks as the budget allows."""
        budget = order.budget_blocks or sum(map(len, scope.runs))
        runs: list[Sequence[BlockKey]] = []
        reached = 0
        for run in scope.runs:
            length = self._manager.reach(run)
            if not scope.is_prefix:  # the keys may be another's: only recorded owners count
                length = min(length, self._commands.own(run, self._digest(scope.salt)))
            reached += length
            runs.append(run[: min(length, budget - sum(map(len, runs)))])
        wanted = sum(map(len, runs))
        if not wanted:
            return ActionResult("", "missing", "no level holds these blocks")
        waits = [self._fetch(message, run, scope, None, order.deadline_s) for run in runs if run]
        if None in waits:
            return ActionResult("", "rejected", _FULL)
        if any(waits):
            why = f"{counted(PREFETCHES_MAX, 'fetch')} are in flight"
            return ActionResult("", "deferred", why, wanted)
        if wanted < reached:
            return ActionResult("", "clipped", f"to {counted(wanted, 'block')}", wanted)
        return ActionResult("", "accepted", blocks=wanted)

    def _cancel(self, message: tuple[str, str]) -> ActionResult:
        """Give up the fetches of a message."""
        with self._lock:
            own = [one for one in self._fetching if one.message == message]
            self._fetching = [one for one in self._fetching if one not in own]
        blocks = 0
        for one in own:
            if one.fetch is not None:
                blocks += len(one.fetch.keys)
                one.fetch.release()
        if not own:
            return ActionResult("", "missing", "no prefetch of this message is in flight")
        return ActionResult("", "accepted", blocks=blocks)

    def _move(self, message: tuple[str, str], scope: Scoped, order: Move) -> ActionResult:
        """Move or copy the blocks; those that are not in host memory are brought up first."""
        self.require(order)
        keys, salt = scope.keys, self._digest(scope.salt)
        moved = self._moves(order, keys, salt)
        if not moved.away:
            return outcome(moved)
        again = partial(self._moves, order, moved.away, salt)
        if self._fetch(message, moved.away, scope, again, None) is None:
            return ActionResult("", "rejected", _FULL, moved.done)
        why = f"{counted(len(moved.away), 'block')} must come to host memory first"
        return ActionResult("", "deferred", why, moved.done)

    def _require_level(self, name: str | None) -> None:
        names = list(self._manager.ladder.indexes)[1:]
        if name is not None and name not in (*names, OUT):
            expected = ", ".join([*names, OUT])
            raise RefusedHint(f"no level below host has the name {name!r}: expected {expected}")

    # ---- fetches

    def _fetch(
        self,
        message: tuple[str, str],
        keys: Sequence[BlockKey],
        scope: Scoped,
        then: Callable[[], object] | None,
        deadline_s: float | None,
    ) -> bool | None:
        """Bring blocks up now or later, then run ``then``.

        Returns whether it has to wait for others; None if too many wait.
        """

        def begin() -> Fetch:
            return self._manager.fetch(
                keys, salt=scope.salt, saves=ANYTHING, is_use=False, deadline_s=deadline_s
            )

        one = Fetching(message, begin, then)
        with self._lock:
            if self._is_closed or len(self._fetching) >= PREFETCHES_MAX + WAITING_MAX:
                return None
            self._fetching.append(one)
        self._begin_waiting()
        self._watch()
        return one.fetch is None

    def _begin_waiting(self) -> None:
        """Begin fetches, oldest first, while fewer than the limit are in flight."""
        while True:
            with self._lock:
                waiting = [one for one in self._fetching if not one.is_begun]
                if not waiting or len(self._fetching) - len(waiting) >= PREFETCHES_MAX:
                    return
                one = waiting[0]
                one.is_begun = True
            fetch = one.begin()
            with self._lock:
                one.fetch = fetch
                is_wanted = one in self._fetching
            if not is_wanted:  # cancelled, or closed, meanwhile
                fetch.release()

    def _watch(self) -> None:
        """Have the loop look at what is in flight, until nothing is."""
        with self._lock:
            if self._is_polled or self._is_closed or not (self._fetching or self._later):
                return
            self._is_polled = True
        self._manager.post(self._look)

    def _look(self) -> None:
        try:
            self.poll()
        finally:
            with self._lock:
                self._is_polled = not self._is_closed and bool(self._fetching or self._later)
                again = self._is_polled
            if again:
                asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _end(self, one: Fetching) -> None:
        if one.then is not None:
            one.then()
        if one.fetch is not None:
            one.fetch.release()

    # ---- outcomes

    def _digest(self, salt: str) -> bytes:
        known = self._digested
        if known[0] != salt:
            known = self._digested = salt, salt_digest(self._manager.namespace, salt)
        return known[1]

    def _all_rejected(self, envelope: Envelope, why: str) -> list[ActionResult]:
        results = [rejected(action, why) for action in envelope.actions]
        with self._lock:
            self._count(envelope.actions, results)
        return results

    def _count(self, actions: Sequence[Action], results: Sequence[ActionResult]) -> None:
        """Count the outcomes of actions; with the lock held."""
        pairs = zip(actions, results, strict=True)
        found = Counter([(action.action_type, result.outcome) for action, result in pairs])
        for (kind, outcome), count in found.items():
            self._counts[verb_of(kind), outcome] += count


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
