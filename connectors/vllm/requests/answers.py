"""Searches the cache for requests, and says what vLLM is told of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.connectors.vllm.identity.weights import Weights
from kvladder.connectors.vllm.requests.find import Find
from kvladder.connectors.vllm.requests.lookup import LookupState
from kvladder.connectors.vllm.requests.reporting import report_of
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.keys import BlockKey
from kvladder.manager import TraceHeaders
from kvladder.notices import Notices
from kvladder.schema import is_mapping

ADAPTER_STEPS = 10
"""Maximum number of steps that a request waits for all ranks to have its adapter; usually one."""
EARLY_SHARE = 0.5
"""Share of the arena's slots that may be pinned before new requests are not fetched early."""


class Answers:
    """Searches for the blocks of requests, and keeps the answers until vLLM uses them.

    Parameters
    ----------
    pool:
        vLLM's block pool; None if vLLM has handed none over.
    reads:
        False if no request is searched for: the engine only produces blocks.
    handed_over:
        True if a connector that may bring blocks itself stands beside this one.
    """

    def __init__(
        self,
        groups: VllmGroups,
        connector: StepConnector,
        weights: Weights,
        notices: Notices,
        *,
        pool: Any,
        reads: bool,
        handed_over: bool,
    ) -> None:
        self._groups = groups
        self._connector = connector
        self._weights = weights
        self._notices = notices
        self._pool = pool
        self._does_read = reads
        self._handed_over = handed_over
        self._filling: dict[str, frozenset[BlockKey]] = {}
        self.pins = 0
        """Number of blocks that all searches pin, as last counted."""

    # ---- what may be searched for

    def named(self, state: RequestState) -> bool:
        """Return whether a request's blocks have keys: not before its adapter is known."""
        if state.adapter is None and not state.apart:
            state.adapter = self._weights.adapter(state.number)
        return state.adapter is not None and not state.apart

    @property
    def usable(self) -> bool:
        """True if keys may be used now: the weights are known, and no reset is in progress."""
        return self._weights.known and not self._connector.manager.resetting

    def outdated(self, state: RequestState) -> bool:
        """Return whether vLLM's own prefix cache may have KV of other weights than a request's."""
        return self._weights.outdated(self.own_cache, state.lora, state.adapter)

    @property
    def own_cache(self) -> object:
        """The prefix cache of vLLM itself; a new object each time it has been emptied."""
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def _reads(self, request: Any) -> bool:
        """Return whether the cache is searched for its blocks: not by producers; see ``reads``."""
        return self._does_read and reads(request, handed_over=self._handed_over)

    def _loadable(self, request: Any) -> int:
        """Return how many of its tokens may be loaded; at least one is always computed."""
        return self._groups.aligned(request.num_tokens - 1)

    # ---- searches and answers

    def early(self, state: RequestState, *, behind: int) -> None:
        """Begin to fetch what a new request will ask for, unless too much is pinned already.

        ``behind`` is the number of tokens of other requests that are computed first.
        """
        request, slots = state.request, self._connector.manager.arena.slots
        if not self.named(state) or not self._reads(request) or not self.usable:
            return
        if self.pins >= EARLY_SHARE * slots:
            return
        held = held_by_vllm(self._pool, request, self._groups.main, self._loadable(request))
        self._hold(state, self._groups.aligned(held), behind=behind)
        if not state.lookup.pins:
            self.drop(state)

    def answer(self, state: RequestState, computed: int) -> int | None:
        """Return how many tokens after ``computed`` the cache has; None: ask again."""
        lookup = state.lookup
        state.own = state.told = computed
        if state.policy.report and state.asked_s is None:
            state.asked_s = self._connector.manager.ladder.clock.now()
        if waits_for_adapter(state, self._weights, self._notices):
            return None
        named = self.named(state)
        # vLLM's blocks of it were made by other weights: no key fits what follows them.
        if computed and self.outdated(state):
            state.apart = True
        if lookup.state is LookupState.COMPUTES or state.apart or not named:
            return 0
        if not self._reads(state.request) or computed % self._groups.step:
            return 0
        # No key is used before all ranks have looked at their weights.
        if not self._weights.known:
            self._weights.awake()
            return None if self._weights.patient else 0
        if self._connector.manager.resetting:
            return 0
        if lookup.state is LookupState.LOADING:
            return None
        # vLLM asks for the first time, or has a different number of its tokens by now.
        if lookup.answer is None or lookup.answer[0] != computed:
            early = lookup.find
            found = self._find(state, computed)
            if found is None:
                return None
            if state.asked is None:  # an early search also counts what vLLM has itself by now
                first = computed if lookup.find is None or early is None else early.own
                size = self._groups.main.tokens
                state.asked = first // size, self._loadable(state.request) // size
            lookup.tell(computed, found)
            self._explain(state, computed, found)
            self.waited(state)
        else:
            found = lookup.answer[1]
        return None if found and self._is_filled(state, computed) else found

    def waited(self, state: RequestState) -> None:
        """Note for its report that a request has waited until now."""
        if state.asked_s is not None:
            state.waited_s = self._connector.manager.ladder.clock.now() - state.asked_s

    def _explain(self, state: RequestState, computed: int, found: int) -> None:
        """Count the blocks that no level has, and note for the report why the prefix ended."""
        main, lookup = self._groups.main, state.lookup
        limit = self._loadable(state.request)
        missed = lookup.missed
        if lookup.unasked:
            first, end = (limit - lookup.unasked) // main.tokens, limit // main.tokens
            keys = state.keys(main, first, end)
            missed += self._connector.manager.missed(keys, levels=state.policy.tiers.load)
        if state.lookup_span is not None:
            prompt = state.request.num_prompt_tokens
            state.lookup_span.ended(prompt, computed, found, missed)
            state.lookup_span = None
        if state.policy.report and state.report is None:
            state.report = report_of(limit, computed, found, missed, block_tokens=main.tokens)

    def _is_filled(self, state: RequestState, computed: int) -> bool:
        """Return whether another request's load fills the first block after ``computed`` tokens.

        vLLM will have that block itself.
        """
        if not self._filling:
            return False
        main, first = self._groups.main, computed // self._groups.main.tokens
        needed = state.keys(main, first, first + 1)
        return not all(map(frozenset(needed).isdisjoint, self._filling.values()))

    def _find(self, state: RequestState, own: int) -> int | None:
        """Return how many tokens after the first ``own`` are in host; None while still fetching."""
        limit, lookup = self._loadable(state.request), state.lookup
        if lookup.find is not None and lookup.find.own > own:
            self.drop(state)
        for _ in range(2):  # an early search may end where vLLM's own blocks end by now
            find = self._hold(state, own) if lookup.find is None else lookup.find
            if not find.done:
                return None
            self._count(state)
            lookup.missed = find.missed
            if own < find.end <= limit:
                return find.end - own
            begun_here = find.own == own
            self.drop(state)
            if begun_here:
                break
        return 0

    def _hold(self, state: RequestState, own: int, *, behind: int = 0) -> Find:
        """Search for what follows the first ``own`` tokens, and pin it."""
        policy, manager = state.policy, self._connector.manager
        trace = self._trace(state)
        find = Find(
            self._groups,
            state.keys,
            match=lambda keys, saves: self._connector.match(
                keys,
                levels=policy.tiers.load,
                salt=state.salt,
                saves=saves,
                session=policy.session,
                trace=trace,
            ),
            lookup=lambda keys: manager.reach(keys, levels=policy.tiers.load),
            own=own,
            limit=self._loadable(state.request),
            behind=behind,
        )
        state.lookup.search(find)
        self._count(state)
        return find

    def _trace(self, state: RequestState) -> TraceHeaders | None:
        """Begin the span of a search, unless one is open; return the context of its fetches."""
        tracer = self._connector.manager.tracer
        if tracer is None:
            return None
        if state.lookup_span is None:
            state.lookup_span = span = tracer.lookup(state.trace)
            state.trace = state.trace or span.headers  # then its saves belong to this trace, too
        return state.lookup_span.headers

    def _count(self, state: RequestState) -> None:
        lookup = state.lookup
        pins = 0 if lookup.find is None else lookup.find.pins
        self.pins += pins - lookup.pins
        lookup.pins = pins

    def drop(self, state: RequestState) -> None:
        """Release what a request's search pins, and forget its answer."""
        state.lookup.drop()
        self._count(state)

    def take(self, state: RequestState) -> Find:
        """Return the search with the blocks that are loaded now."""
        find = state.lookup.take()
        self._count(state)
        return find

    # ---- blocks that vLLM will have itself

    def fills(self, request_id: str, keys: Iterable[BlockKey]) -> None:
        """Record that a load fills these blocks, which vLLM has in its prefix cache afterwards."""
        self._filling[request_id] = frozenset(keys)

    def filled(self, request_id: str) -> None:
        """Record that a request's load has ended."""
        self._filling.pop(request_id, None)

    def check(self, states: Iterable[RequestState]) -> None:
        """Assert that the pins are those of the requests' searches; for tests."""
        assert self.pins == sum(state.lookup.pins for state in states)


def held_by_vllm(pool: Any, request: Any, group: VllmGroup, end: int) -> int:
    """Estimate how many of a request's first ``end`` tokens vLLM's own prefix cache has now."""
    find = getattr(pool, "get_cached_block", None)
    if find is None or group.hashes > 1 or group.kind != "full":
        return 0
    count = 0
    for block_hash in request.block_hashes[: end // group.tokens]:
        if not find(block_hash, [group.index]):
            break
        count += 1
    return count * group.tokens


def reads(request: Any, *, handed_over: bool) -> bool:
    """Return whether the cache is searched for a request's blocks.

    It is not if the request opts out. Nor is it if another connector loads all of its blocks from
    a remote prefill; ``handed_over`` says that such a connector may stand beside this one.
    """
    if request.skip_reading_prefix_cache:
        return False
    said: object = getattr(request, "kv_transfer_params", None)
    return not (handed_over and is_mapping(said) and said.get("do_remote_prefill"))


def waits_for_adapter(state: RequestState, weights: Weights, notices: Notices) -> bool:
    """Return whether a request has to wait until all ranks have its adapter in memory.

    Only the adapter in memory tells what the request computes with. After ``ADAPTER_STEPS`` steps
    it is computed without the cache, and its blocks have no keys.
    """
    if state.lora is None or state.apart or weights.adapter(state.number) is not None:
        return False
    state.waited += 1
    if state.waited <= ADAPTER_STEPS:
        weights.want(state.lora)
        return True
    what = f"adapter {state.lora.lora_name} is not in the memory of all ranks"
    notices.say("adapter", f"a request is not cached: {what}")
    state.apart = True
    return False
