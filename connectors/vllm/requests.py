"""The scheduler half's state of vLLM's requests.

It covers the keys of their blocks, what the cache has for them, and what is left to compute.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.connectors.vllm.identity.contents import Items
from kvladder.connectors.vllm.identity.weights import Weights
from kvladder.connectors.vllm.options import NO_POLICY, RequestPolicy
from kvladder.gpu.copy.copier import JobId
from kvladder.keys import BlockKey
from kvladder.manager import Fetch
from kvladder.notices import Notices
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.fetch_cost import AvoidedCompute
from kvladder.schema import is_mapping

ADAPTER_STEPS = 10
"""Maximum number of steps that a request waits for all ranks to have its adapter; usually one."""
ROUNDS_MAX = 8
"""A search gives up when tiers have failed to deliver its prefix this number of times."""

Keys = Callable[[VllmGroup, int, int], list[BlockKey]]
"""Returns the keys of a request's blocks ``start <= n < end`` in a group."""


@dataclass
class Held:
    """The blocks of one group that a search pins or fetches."""

    first: int
    """Position of the first of these blocks in the request."""
    wanted: int
    match: Fetch


class Find:
    """A search for blocks after the first ``own`` tokens, up to token ``limit``.

    Groups of full attention are looked up first, because they can serve only a prefix without a
    hole. The other groups need the blocks that their kind of attention reads at the end of that
    prefix. If these are missing, the prefix is shortened until they are not. All lookups are in
    memory. Then the search fetches the blocks below host. If a tier does not deliver, it shortens
    the prefix again.

    Parameters
    ----------
    groups, keys:
        The groups to look in, and the keys to look for.
    match:
        Pins the longest cached prefix of some keys, as far as loading it is faster than computing;
        see ``Connector.match``.
    lookup:
        Returns the number of leading keys that are cached.
    own, limit:
        Multiples of ``groups.step``.
    behind:
        Tokens of other requests that the engine computes first.
    """

    def __init__(
        self,
        groups: VllmGroups,
        keys: Keys,
        *,
        match: Callable[[Sequence[BlockKey], AvoidedCompute], Fetch],
        lookup: Callable[[Sequence[BlockKey]], int],
        own: int,
        limit: int,
        behind: int = 0,
    ) -> None:
        self._groups = groups
        self._keys = keys
        self._match = match
        self._lookup = lookup
        self._behind = behind
        self.own = own
        self.end = limit
        """End of the prefix in tokens; final once ``done``."""
        self.held: dict[int, Held] = {}
        self._rounds = 0
        self._done = False
        self._begin()
        self.unasked = limit - self.end
        """Number of tokens up to ``limit`` that were not fetched, because no level has them."""

    @property
    def pins(self) -> int:
        """Number of blocks that this search pins, or will pin if its fetches succeed."""
        return sum(
            held.match.blocks if held.match.done else held.wanted for held in self.held.values()
        )

    @property
    def done(self) -> bool:
        """True if the answer is final. Reading it polls the matches."""
        while not self._done:
            whole = (self.held[g.index].match for g in self._groups.whole if g.index in self.held)
            if any(match.done and not match.blocks for match in whole):
                self.release()  # the blocks of other groups are useless alone
                return True
            if not all(held.match.done for held in self.held.values()):
                return False
            self._settle()
        return True

    def release(self) -> None:
        """Unpin all blocks, and end the search without a hit. May be called again."""
        for held in self.held.values():
            held.match.release()
        self.held.clear()
        self.end, self._done = self.own, True

    def take(self) -> dict[int, Held]:
        """Hand the pinned blocks over to the caller, which releases them."""
        taken, self.held = self.held, {}
        self.end, self._done = self.own, True
        return taken

    def _begin(self) -> None:
        """Look up the longest prefix, and begin to fetch it."""
        for group in self._groups.whole:
            self._shorten(group)
        while self._groups.partial and self.own < self.end:
            before = self.end
            for group in self._groups.partial:
                self._shorten(group)
            if self.end == before:
                break
        if self.own >= self.end:
            self.release()
            return
        for group in self._groups:
            start, end = self._needed(group)
            if start < end and group.index not in self.held:
                keys = self._keys(group, start, end)
                match = self._match(keys, self._saves(group, start, end))
                self.held[group.index] = Held(start, len(keys), match)

    def _saves(self, group: VllmGroup, start: int, end: int) -> AvoidedCompute:
        """Return what the engine need not compute if these blocks and the other groups' come."""
        if group in self._groups.partial:
            return AvoidedCompute(self.end - self.own, whole=True, behind=self._behind)
        return AvoidedCompute((end - start) * group.tokens, behind=self._behind)

    def _needed(self, group: VllmGroup) -> tuple[int, int]:
        """Return the range of a group's blocks from ``own`` on that a prefix to ``end`` reads."""
        start = max(group.first(self.end), self.own // group.tokens)
        return start, self.end // group.tokens

    def _shorten(self, group: VllmGroup) -> None:
        """End the prefix before the first block that the group needs and no level has."""
        start, end = self._needed(group)
        if start < end and group.index not in self.held:
            found = self._lookup(self._keys(group, start, end))
            if found < end - start:
                self.end = self._groups.aligned((start + found) * group.tokens)

    def _settle(self) -> None:
        """Take the answers of all matches; search again if they allow only a shorter prefix."""
        before = self.end
        for group in self._groups:
            held = self.held.get(group.index)
            if held is not None and held.match.blocks < held.wanted:
                got = self._groups.aligned((held.first + held.match.blocks) * group.tokens)
                self.end = max(self.own, min(self.end, got))
        if self.end == before or (self.end > self.own and not self._groups.partial):
            self._done = True
            return
        self._rounds += 1
        if self.end == self.own or self._rounds == ROUNDS_MAX:
            self.release()
            return
        for group in self._groups.partial:  # their blocks belong to the end of the longer prefix
            held = self.held.pop(group.index, None)
            if held is not None:
                held.match.release()
        self._begin()


@dataclass
class RequestState:
    """The state of one request."""

    request: Any
    groups: VllmGroups
    adapter: bytes | None = b""
    """Digest of its LoRA adapter in the ranks' memory; empty without one, None if not known yet."""
    items: Items | None = None
    """The images, sounds and videos in its prompt."""
    policy: RequestPolicy = NO_POLICY
    waited: int = 0
    """Number of steps it has waited for that digest."""
    saved: list[int] = field(default_factory=list[int])
    """Number of its leading blocks that were offered to the cache, by group."""
    floors: list[int] = field(default_factory=list[int])
    """Lowest priority among those blocks, by group."""
    due: float = 0
    """Number of computed tokens below which it has no new block to offer."""
    find: Find | None = None
    """The search for its blocks, from the first lookup until they are loaded."""
    left: int = 0
    """Number of its tokens that wait to be computed; see ``Computing``."""
    unasked: int = 0
    """Number of tokens that the last search found in no level."""
    pins: int = 0
    """Number of blocks that ``find`` pins, as last counted."""
    own: int = 0
    """Number of its tokens that vLLM had itself when it last asked."""
    told: int = 0
    """Number of leading tokens that vLLM had when it last asked, plus those loaded since."""
    answer: tuple[int, int] | None = None
    """Number of tokens that vLLM has itself, and number of further tokens that the cache has."""
    sync: bool = False
    """True if the step that computes the rest waits for the load."""
    loading: set[JobId] = field(default_factory=set[JobId])
    """The copies in flight that fill its blocks, one for each group."""
    sources: list[str] = field(default_factory=list[str])
    """The levels that served the last load, one for each block of the main group."""
    computes: bool = False
    """True if nothing is loaded for it any more: a load failed, and is not retried."""
    apart: bool = False
    """True if nothing is loaded or saved for it any more: its blocks cannot be named."""
    begun: bool = False
    """True if it has, or had, blocks in vLLM's memory."""

    mark: Callable[[], int] = int
    """Returns the mark in all keys for the current weights; 0 for those at start."""
    describe: Callable[[Any, int, int, Sequence[BlockKey]], None] | None = None
    """Callback for named blocks: request, group, position of the first block, and the keys."""

    def __post_init__(self) -> None:
        self.offer_again()
        self.floors = [PRIORITY_MAX] * len(self.groups)

    def offer_again(self) -> None:
        """Offer its blocks to the cache again, starting with the first one."""
        self.saved = [0] * len(self.groups)
        self.due = 0

    @property
    def lora(self) -> Any:
        """Its LoRARequest in vLLM; None without an adapter."""
        return getattr(self.request, "lora_request", None)

    @property
    def number(self) -> int:
        """The number of its adapter; 0 without one."""
        return 0 if self.lora is None else int(self.lora.lora_int_id)

    @property
    def salt(self) -> str:
        """Its cache salt, which separates owners of blocks; empty without one."""
        return getattr(self.request, "cache_salt", None) or ""

    def loaded(self, job_id: JobId, *, ok: bool) -> None:
        """Record the end of a copy; if it failed, compute and save the whole request."""
        if job_id in self.loading:
            self.loading.discard(job_id)
            if not ok:
                self.computes = True
                self.offer_again()

    def keys(self, group: VllmGroup, start: int, end: int) -> list[BlockKey]:
        """Return the keys of a group's blocks ``start <= n < end`` that vLLM has hashed already.

        vLLM's hash covers the tokens, the salt, the identifiers of multimodal items, and the name
        and path of an adapter. The contents of the items and of the adapter are added here.
        """
        assert self.adapter is not None
        keys = group.keys(self.request.block_hashes, start, end, mark=self.mark())
        if self.adapter:
            keys = [BlockKey(hashlib.sha256(self.adapter + one).digest()) for one in keys]
        if self.items is not None:
            keys = self.items.bind(keys, start, group.tokens)
        if self.describe is not None:
            self.describe(self.request, group.index, start, keys)
        return keys

    def read(self, end: int) -> Iterator[list[BlockKey]]:
        """Yield, by group, the keys of the blocks that are read once ``end`` tokens are computed.

        Groups without such blocks are left out.
        """
        for group in self.groups:
            keys = self.keys(group, group.first(end), end // group.tokens)
            if keys:
                yield keys


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


DECODES = 16
"""Number of recent decode-only steps for which the duration is kept."""


class _Begun(NamedTuple):
    """A step in flight."""

    at_s: float
    prompt_tokens: int
    decodes: bool
    """True if it computes only one token of each request."""


class Computing:
    """Measures the time that the engine's steps take to compute prompts.

    A step's time begins when it is scheduled, or when the step before it ends if that is later. It
    ends with the report of the step's end. From a step with prompt tokens, the median time of
    decode-only steps is subtracted.

    Parameters
    ----------
    now:
        Returns monotonic seconds.
    prefilled:
        Called with prompt tokens and seconds; see ``CacheManager.prefilled``.
    """

    def __init__(self, now: Callable[[], float], prefilled: Callable[[int, float], None]) -> None:
        self._now = now
        self._prefilled = prefilled
        self._decodes: deque[float] = deque(maxlen=DECODES)
        self._begun: dict[int, _Begun] = {}
        self._steps = 0
        self._ended_s = 0.0
        self.waiting = 0
        """Number of tokens of all requests that are neither computed nor loaded yet."""

    def expect(self, state: RequestState, tokens: int) -> None:
        """Set the number of tokens that a request has left to compute."""
        self.waiting += tokens - state.left
        state.left = tokens

    def begin(self, scheduled: Sequence[tuple[RequestState | None, int]], *, timed: bool) -> int:
        """Record that a step begins; return its number, or 0 if it is not timed.

        ``scheduled`` has each request's state, or None, and its number of tokens in the step.
        """
        prompt_tokens, decodes = 0, True
        for state, count in scheduled:
            decodes = decodes and count == 1
            if state is not None and state.left:
                computed = min(state.left, count)
                prompt_tokens += computed
                self.expect(state, state.left - computed)
        if not timed or not scheduled:
            return 0
        self._steps += 1
        self._begun[self._steps] = _Begun(self._now(), prompt_tokens, decodes)
        return self._steps

    def end(self, number: int) -> None:
        """Record that the step with this number has ended. Unknown numbers are ignored."""
        begun = self._begun.get(number)
        if begun is None:
            return
        self._begun = {at: step for at, step in self._begun.items() if at > number}
        now_s = self._now()
        seconds = now_s - max(begun.at_s, self._ended_s)
        self._ended_s = now_s
        if begun.decodes:
            self._decodes.append(seconds)
        elif begun.prompt_tokens:
            usual_s = median(self._decodes) if self._decodes else 0.0
            self._prefilled(begun.prompt_tokens, max(0.0, seconds - usual_s))


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
