"""What the scheduler half knows of vLLM's requests.

How their blocks are named, what the cache has for them, and what is left to compute.
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
"""How many steps a request waits until all ranks have its adapter in memory; usually one."""
ROUNDS_MAX = 8
"""How often a prefix is shortened because a tier did not give what it was thought to have."""

Keys = Callable[[VllmGroup, int, int], list[BlockKey]]
"""Names of a request's blocks ``start <= n < end`` of a group."""


@dataclass
class Held:
    """The blocks of one group that are pinned, or on their way."""

    first: int
    """Position of the first of them."""
    wanted: int
    match: Fetch


class Find:
    """A search for blocks after the first ``own`` tokens, up to token ``limit``.

    Groups of full attention are looked up first, since they serve only what has no hole. The others
    need what their kind of attention reads at the end of that prefix: where this is not there, the
    prefix gives way until it is. All of it is looked up in memory; what lies below host is then
    fetched, and the search shortens itself if a tier does not deliver.

    Parameters
    ----------
    groups, keys:
        What to look for.
    match:
        Pins the longest cached prefix of some keys, as far as that is faster than computing what
        it saves; see ``Connector.match``.
    lookup:
        How many leading ones of some keys are cached.
    own, limit:
        Multiples of ``groups.step``.
    behind:
        Tokens of other requests that are computed before.
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
        """Where the prefix ends, in tokens; final once ``done``."""
        self.held: dict[int, Held] = {}
        self._rounds = 0
        self._done = False
        self._begin()
        self.unasked = limit - self.end
        """Tokens that were not even asked for, since nobody has them."""

    @property
    def pins(self) -> int:
        """How many blocks this search pins, or may come to pin."""
        return sum(
            held.match.blocks if held.match.done else held.wanted for held in self.held.values()
        )

    @property
    def done(self) -> bool:
        """Whether the answer is final; asks the matches."""
        while not self._done:
            whole = (self.held[g.index].match for g in self._groups.whole if g.index in self.held)
            if any(match.done and not match.blocks for match in whole):
                self.release()  # what other groups have is of no use alone
                return True
            if not all(held.match.done for held in self.held.values()):
                return False
            self._settle()
        return True

    def release(self) -> None:
        """Unpin everything. May be called again."""
        for held in self.held.values():
            held.match.release()
        self.held.clear()
        self.end, self._done = self.own, True

    def take(self) -> dict[int, Held]:
        """Hand over what is pinned to the caller, who releases it."""
        taken, self.held = self.held, {}
        self.end, self._done = self.own, True
        return taken

    def _begin(self) -> None:
        """Look the prefix up, and fetch it."""
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
        """What need not be computed if these blocks come, the other groups' provided."""
        if group in self._groups.partial:
            return AvoidedCompute(self.end - self.own, whole=True, behind=self._behind)
        return AvoidedCompute((end - start) * group.tokens, behind=self._behind)

    def _needed(self, group: VllmGroup) -> tuple[int, int]:
        """The blocks of a group, from ``own`` on, that a prefix up to ``end`` reads."""
        start = max(group.first(self.end), self.own // group.tokens)
        return start, self.end // group.tokens

    def _shorten(self, group: VllmGroup) -> None:
        """Let the prefix end before the first block that it needs and that is not cached."""
        start, end = self._needed(group)
        if start < end and group.index not in self.held:
            found = self._lookup(self._keys(group, start, end))
            if found < end - start:
                self.end = self._groups.aligned((start + found) * group.tokens)

    def _settle(self) -> None:
        """Every match has its answer: take it, or look for a shorter prefix."""
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
        for group in self._groups.partial:  # they were fetched for the end of a longer prefix
            held = self.held.pop(group.index, None)
            if held is not None:
                held.match.release()
        self._begin()


@dataclass
class RequestState:
    """What is known of one request."""

    request: Any
    groups: VllmGroups
    adapter: bytes | None = b""
    """Digest of its LoRA adapter as it is in memory, empty without one; None until it is known."""
    items: Items | None = None
    """The images, sounds and videos in its prompt."""
    policy: RequestPolicy = NO_POLICY
    waited: int = 0
    """How many steps it has waited for that digest."""
    saved: list[int] = field(default_factory=list[int])
    """By group, how many of its leading blocks were offered to the cache."""
    floors: list[int] = field(default_factory=list[int])
    """By group, the lowest priority among those blocks."""
    due: float = 0
    """Below so many computed tokens there is no other block to offer."""
    find: Find | None = None
    """What the cache has for it, from the time it was looked for until it is loaded."""
    left: int = 0
    """How many of its tokens wait to be computed; see ``Computing``."""
    unasked: int = 0
    """How many tokens were looked up for it in vain the last time."""
    pins: int = 0
    """How many blocks ``find`` counts for while it waits."""
    own: int = 0
    """How many tokens vLLM had itself when it asked the last time."""
    told: int = 0
    """Up to where it has tokens that it asked behind, or that were loaded."""
    answer: tuple[int, int] | None = None
    """How many tokens vLLM has itself, and how many more it was told that the cache has."""
    sync: bool = False
    """Whether the step that computes the rest waits for what the cache has."""
    loading: set[JobId] = field(default_factory=set[JobId])
    """The copies that fill its blocks, one for each group."""
    sources: list[str] = field(default_factory=list[str])
    """The levels that the blocks of the last load came from, in the main group."""
    computes: bool = False
    """Nothing is loaded for it: a load failed, and must not be tried for ever."""
    apart: bool = False
    """Nothing is saved for it either: its blocks cannot be named."""
    begun: bool = False
    """Whether it has, or had, blocks in vLLM's memory."""

    mark: Callable[[], int] = int
    """What is added to names for weights that are not those at start."""
    describe: Callable[[Any, int, int, Sequence[BlockKey]], None] | None = None
    """Told of the request, the group, the position of the first and the names of its blocks."""

    def __post_init__(self) -> None:
        self.offer_again()
        self.floors = [PRIORITY_MAX] * len(self.groups)

    def offer_again(self) -> None:
        """Its blocks are offered to the cache from the first one on."""
        self.saved = [0] * len(self.groups)
        self.due = 0

    @property
    def lora(self) -> Any:
        """The LoRARequest that vLLM has of it; None without an adapter."""
        return getattr(self.request, "lora_request", None)

    @property
    def number(self) -> int:
        """The number of its adapter, 0 without one."""
        return 0 if self.lora is None else int(self.lora.lora_int_id)

    @property
    def salt(self) -> str:
        """Whose its blocks are."""
        return getattr(self.request, "cache_salt", None) or ""

    def loaded(self, job_id: JobId, *, ok: bool) -> None:
        """A copy has ended; unless it was well, all of the request is computed and saved."""
        if job_id in self.loading:
            self.loading.discard(job_id)
            if not ok:
                self.computes = True
                self.offer_again()

    def keys(self, group: VllmGroup, start: int, end: int) -> list[BlockKey]:
        """Names of a group's blocks ``start <= n < end``, as far as vLLM has hashed them.

        vLLM's hash covers tokens, salt, what multimodal items are called, and of an adapter name
        and path; what the items and the adapter's weights are is added here.
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
        """By group, the names of what is read once ``end`` tokens are computed."""
        for group in self.groups:
            keys = self.keys(group, group.first(end), end // group.tokens)
            if keys:
                yield keys


def held_by_vllm(pool: Any, request: Any, group: VllmGroup, end: int) -> int:
    """How many of a request's first ``end`` tokens are in vLLM's own prefix cache now, about."""
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
"""How many steps without a prompt are remembered."""


class _Begun(NamedTuple):
    """A step under way."""

    at_s: float
    prompt_tokens: int
    decodes: bool
    """Whether it computes one token of each request."""


class Computing:
    """Measures the engine's steps.

    A step takes from its scheduling, or the end of the step before, until it is reported to have
    ended. What one that only decodes takes is taken off those that compute prompts, too.

    Parameters
    ----------
    now:
        Monotonic seconds.
    prefilled:
        Told tokens and seconds; see ``CacheManager.prefilled``.
    """

    def __init__(self, now: Callable[[], float], prefilled: Callable[[int, float], None]) -> None:
        self._now = now
        self._prefilled = prefilled
        self._decodes: deque[float] = deque(maxlen=DECODES)
        self._begun: dict[int, _Begun] = {}
        self._steps = 0
        self._ended_s = 0.0
        self.waiting = 0
        """Tokens of requests that are neither computed nor loaded yet."""

    def expect(self, state: RequestState, tokens: int) -> None:
        """So many tokens of a request are left to compute."""
        self.waiting += tokens - state.left
        state.left = tokens

    def begin(self, scheduled: Sequence[tuple[RequestState | None, int]], *, timed: bool) -> int:
        """A step computes so many tokens of these requests: its number, 0 if it is not timed."""
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
        """The step of this number has ended."""
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
    """Return whether a request's blocks are looked for.

    They are not if it says so, nor where the connector beside this one, if requests may be
    ``handed_over`` to it, brings all of them.
    """
    if request.skip_reading_prefix_cache:
        return False
    said: object = getattr(request, "kv_transfer_params", None)
    return not (handed_over and is_mapping(said) and said.get("do_remote_prefill"))


def waits_for_adapter(state: RequestState, weights: Weights, notices: Notices) -> bool:
    """Return whether a request has to wait until all ranks have its adapter in memory.

    Nothing else tells what it would compute with. After ``ADAPTER_STEPS`` it is computed without
    the cache, and its blocks have no names.
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
