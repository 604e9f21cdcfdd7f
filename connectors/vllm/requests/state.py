"""The scheduler half's state of one of vLLM's requests, and the keys of its blocks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.connectors.vllm.identity.contents import Items
from kvladder.connectors.vllm.options import NO_POLICY, RequestPolicy
from kvladder.connectors.vllm.requests.lookup import LookupState, RequestLookup
from kvladder.connectors.vllm.requests.reporting import PrefillReport, report_of
from kvladder.gpu.copy.copier import JobId
from kvladder.hints.requests import RequestHints
from kvladder.keys import BlockKey
from kvladder.manager import LookupSpan, TraceHeaders
from kvladder.policy.eviction import PRIORITY_MAX

BESIDE: Final[Mapping[LookupState, tuple[str, str, str]]] = {
    LookupState.IDLE: ("may", "may", "may"),
    LookupState.SEARCHING: ("may", "may", "never"),
    LookupState.FOUND: ("may", "may", "never"),
    LookupState.NOTHING: ("may", "may", "never"),
    LookupState.LOADING: ("always", "may", "if apart"),
    LookupState.COMPUTES: ("always", "may", "if apart"),
}
"""Whether ``begun``, ``apart`` and an unknown adapter hold beside each state of the lookup."""


Describe = Callable[[Any, int, int, Sequence[BlockKey]], None]
"""Takes named blocks: request, group, position of the first block, and the keys."""


def _describe_nothing(request: Any, group: int, first: int, keys: Sequence[BlockKey]) -> None:
    """Do nothing, as no events are published."""


@dataclass
class RequestState:
    """The state of one request.

    ``lookup`` has one state at a time. ``begun``, ``apart`` and an unknown adapter are no states
    of it, because each may hold beside several: see ``BESIDE``. The weights of a request's model
    or adapter may change during a search or a load, and the request is then ``apart``. A request
    that was preempted has ``begun``, and is searched for again.
    """

    request: Any
    groups: VllmGroups
    adapter: bytes | None = b""
    """Digest of its LoRA adapter in the ranks' memory; empty without one, None if not known yet."""
    items: Items | None = None
    """The images, sounds and videos in its prompt."""
    policy: RequestPolicy = NO_POLICY
    hints: RequestHints | None = None
    """The hints that came with it; None if it had none."""
    waited: int = 0
    """Number of steps it has waited for that digest."""
    saved: list[int] = field(default_factory=list[int])
    """Number of its leading blocks that were offered to the cache, by group."""
    floors: list[int] = field(default_factory=list[int])
    """Lowest priority among those blocks, by group."""
    due: float = 0
    """Number of computed tokens below which it has no new block to offer."""
    lookup: RequestLookup = field(default_factory=RequestLookup)
    """The search for its blocks, from the first one until they are loaded."""
    left: int = 0
    """Number of its tokens that wait to be computed; see ``Computing``."""
    own: int = 0
    """Number of its tokens that vLLM had itself when it last asked."""
    told: int = 0
    """Number of leading tokens that vLLM had when it last asked, plus those loaded since."""
    asked: tuple[int, int] | None = None
    """Positions of the first block of the main group that the cache was first asked for, and of the
    one after the last; None if it was never asked."""
    sync: bool = False
    """True if the step that computes the rest waits for the load."""
    sources: list[str] = field(default_factory=list[str])
    """The levels that served the last load, one for each block of the main group."""
    report: PrefillReport | None = None
    """The report for the request's answer, of its first search; None if it asks for none."""
    asked_s: float | None = None
    """Loop time of that search, if the request asks for a report."""
    waited_s: float = 0.0
    """Time from then until the answer was known or, if it loads, the load had ended."""
    apart: bool = False
    """True if nothing is loaded or saved for it any more: its blocks cannot be named."""
    begun: bool = False
    """True if it has, or had, blocks in vLLM's memory."""

    trace: TraceHeaders | None = None
    """Headers of its trace; None if it has none, or if the cache is not traced."""
    lookup_span: LookupSpan | None = None
    """The span of the search that is under way, if the cache is traced."""

    mark: Callable[[], int] = int
    """Returns the mark in all keys for the current weights; 0 for those at start."""
    describe: Describe = _describe_nothing
    """Callback for named blocks."""

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
        if self.lookup.ended(job_id, ok=ok):
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
        self.describe(self.request, group.index, start, keys)
        return keys

    def reported(self) -> dict[str, Any] | None:
        """Return what the request's answer says of its prompt; None if it asks for no report."""
        if not self.policy.report:
            return None
        main = self.groups.main
        report = self.report
        if report is None:  # never searched for, so that all that vLLM lacked was computed
            asked = self.groups.aligned(self.request.num_prompt_tokens - 1)
            report = report_of(asked, min(asked, self.own), 0, (), block_tokens=main.tokens)
        sources = Counter({name: n * main.tokens for name, n in Counter(self.sources).items()})
        told = {"waited_s": round(self.waited_s, 6)}
        return told | report.as_dict(sources, failed=self.lookup.state is LookupState.COMPUTES)

    def read(self, end: int) -> Iterator[list[BlockKey]]:
        """Yield, by group, the keys of the blocks that are read once ``end`` tokens are computed.

        Groups without such blocks are left out.
        """
        for group in self.groups:
            keys = self.keys(group, group.first(end), end // group.tokens)
            if keys:
                yield keys

    def check(self) -> None:
        """Assert that the lookup and the flags may hold together; for tests."""
        self.lookup.check()
        state, is_unknown = self.lookup.state, self.adapter is None
        begun, _, unknown = BESIDE[state]
        assert self.begun or begun != "always", state
        assert not is_unknown or unknown == "may" or (unknown == "if apart" and self.apart), state
