"""What the scheduler half knows of vLLM's requests, and how their blocks are named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvladder.connectors.vllm.find import Find
from kvladder.connectors.vllm.groups import Group, Groups
from kvladder.connectors.vllm.identity.contents import Items
from kvladder.connectors.vllm.params import NO_POLICY, RequestPolicy
from kvladder.gpu.copy.copier import JobId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX


@dataclass
class RequestState:
    """What is known of one request."""

    request: Any
    groups: Groups
    adapter: bytes | None = b""
    """Digest of its LoRA adapter's weights, empty without one; None until it is known."""
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
    answer: tuple[int, int] | None = None
    """How many tokens vLLM has itself, and how many more it was told that the cache has."""
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

    def keys(self, group: Group, start: int, end: int) -> list[BlockKey]:
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


def held_by_vllm(pool: Any, request: Any, group: Group, end: int) -> int:
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


class Filling:
    """Blocks that are being copied into vLLM's memory for one request.

    A request that begins alike waits for that copy and finds them in vLLM's own prefix cache: they
    are neither copied nor kept there twice. Only where vLLM has such a cache.
    """

    def __init__(self, *, cached: bool) -> None:
        self._cached = cached
        self._keys: dict[str, frozenset[BlockKey]] = {}

    def begin(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """These blocks are copied for the request from now on."""
        if self._cached:
            self._keys[request_id] = frozenset(keys)

    def end(self, request_id: str) -> None:
        """They are there, or they are not going to be."""
        self._keys.pop(request_id, None)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._keys)

    def has(self, keys: Sequence[BlockKey]) -> bool:
        """Whether the first of ``keys`` is among them."""
        return any(keys[0] in filled for filled in self._keys.values()) if keys else False
