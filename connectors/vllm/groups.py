"""vLLM's groups of KV cache: what kind each is, and which of its blocks a prefix needs.

Layers whose blocks have one table are a group: all of them where a model has one kind of
attention, else one group for each kind, or several. A block of a group holds ``tokens`` tokens of
its layers, or the state after so many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import lcm
from typing import Any, Final, cast

from kvladder.errors import LayoutError
from kvladder.keys import BlockKey
from kvladder.layout import Kind as Kind

KINDS: Final[Mapping[str, Kind]] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "local",
    "MambaSpec": "state",
}


_SECTION: Final = "attention_chunk_size"


@dataclass(frozen=True)
class VllmGroup:
    """What the scheduler half knows of one group."""

    index: int
    """Its position among vLLM's."""
    kind: Kind
    tokens: int
    """Tokens per block."""
    hashes: int
    """vLLM's hashes per block."""
    reach: int = 0
    """Window: how many tokens before the next one it reads. Local: tokens of one section."""
    handed: bool = False
    """Whether vLLM hands over what is to be saved: a state that is not kept in the table."""
    mark: int = 0
    """What is added, bit by bit without carry, to a block's hash to name this group's block.

    Another constant of 256 bits for each group but the first: two groups' blocks never share a
    name, and two names of one group are equal only if the hashes are.
    """

    def first(self, end: int) -> int:
        """The first block that is read once ``end`` tokens are computed, as vLLM counts it."""
        if self.kind == "window":
            return max(0, end - self.reach) // self.tokens
        if self.kind == "local":
            return end // self.reach * self.reach // self.tokens
        if self.kind == "state":
            return max(0, end - 1) // self.tokens
        return 0

    def keys(
        self, hashes: Sequence[bytes], start: int, end: int, *, mark: int = 0
    ) -> list[BlockKey]:
        """Names of blocks ``start <= n < end``, as far as ``hashes``, vLLM's, go.

        ``mark`` is added to the group's own.
        """
        chosen = hashes[(start + 1) * self.hashes - 1 : end * self.hashes : self.hashes]
        return cast("list[BlockKey]", marked(chosen, self.mark ^ mark))


Wanted = Callable[[int], bool]


class VllmGroups(tuple[VllmGroup, ...]):
    """All groups of one model."""

    @cached_property
    def step(self) -> int:
        """Tokens between two ends of prefixes that every group can serve."""
        return lcm(*(group.tokens for group in self))

    def aligned(self, tokens: int) -> int:
        """The last such end within the first so many tokens."""
        return tokens // self.step * self.step

    @cached_property
    def whole(self) -> list[VllmGroup]:
        """The groups that keep every block of a prefix."""
        return [group for group in self if group.kind == "full"]

    @cached_property
    def partial(self) -> list[VllmGroup]:
        """The others: they read a part that depends on where the prefix ends."""
        return [group for group in self if group.kind != "full"]

    def useful(self, group: VllmGroup, interval: int | None, ends: Sequence[int]) -> Wanted:
        """Whether a block can be read by a later request; for groups that are not whole.

        Parameters
        ----------
        interval:
            vLLM's ``prefix_cache_retention_interval``: None, prefixes may end at any step; else
            only at its multiples, if it is not 0, and at ``ends``.
        """
        every = self.step if interval is None else interval
        if every == group.tokens:
            return lambda block: True
        known = [] if interval is None else [self.aligned(end) for end in ends]

        def wanted(block: int) -> bool:
            after = (block + 1) * group.tokens
            later = [-(-after // every) * every] if every else []
            return any(end >= after and group.first(end) <= block for end in [*known, *later])

        return wanted

    @cached_property
    def main(self) -> VllmGroup:
        """The one that stands for a prefix where one must: of full attention if there is any."""
        return next(iter(self.whole), self[0])


def groups_of(kv_cache_config: Any, *, model: str) -> VllmGroups:
    """Read vLLM's groups.

    Raises
    ------
    LayoutError
        One of them is of a kind that is not supported; names the model, the kind and its layers.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    hashed = getattr(kv_cache_config, "hash_block_size", None) or min(s.block_size for s in specs)
    found: list[VllmGroup] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, kind = _kind(group, model)
        tokens: int = group.kv_cache_spec.block_size
        if tokens % hashed:
            what = f"{model}: vLLM hashes every {hashed} tokens, but blocks have {tokens}"
            raise LayoutError(what, hint="leave --prefix-match-unit unset")
        reach, handed = 0, False
        if kind == "window":
            reach = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        elif kind == "local":
            reach = getattr(spec, _SECTION)
        elif kind == "state":
            handed = spec.mamba_cache_mode == "align"
        found.append(
            VllmGroup(index, kind, tokens, tokens // hashed, reach, handed, mark_of(index))
        )
    return VllmGroups(found)


def marked(hashes: Sequence[bytes], mark: int) -> list[bytes]:
    """Hashes of 256 bits with a mark of as many."""
    if not mark:
        return list(hashes)
    return [(int.from_bytes(one) ^ mark).to_bytes(32) for one in hashes]


@cache
def mark_of(index: int) -> int:
    """See ``VllmGroup.mark``."""
    if not index:
        return 0
    return int.from_bytes(hashlib.sha256(f"kvladder group {index}".encode()).digest())


def layer_specs(group: Any) -> dict[str, Any]:
    """The specification that vLLM has for each layer of a group, in order."""
    own: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: own.get(name, group.kv_cache_spec) for name in group.layer_names}


def _kind(group: Any, model: str) -> tuple[Any, Kind]:
    """A group's specification and kind; all its layers have the same."""
    specs = [*layer_specs(group).values()] or [group.kv_cache_spec]
    names = sorted({type(spec).__name__ for spec in specs})
    first = specs[0]
    where = f"{model}: {', '.join(group.layer_names[:3])} ..."
    if len({KINDS.get(name) for name in names}) > 1 or names[0] not in KINDS:
        what = f"{where} has KV cache of kind {', '.join(names)}"
        raise LayoutError(what, hint=f"kvladder supports {', '.join(KINDS)}")
    kept = getattr(group, "enable_kv_transfer", True) and getattr(first, "prefix_cacheable", True)
    if not kept or int(getattr(first, "prefix_replay_tokens", 0)):
        raise LayoutError(
            f"{where} has KV cache that vLLM does not keep for later requests ({names[0]})",
            hint="kvladder supports models all of whose layers can be cached by prefix",
        )
    if getattr(first, "mamba_cache_mode", "align") not in ("align", "all"):
        what = f"{where} has states that vLLM does not keep at block boundaries"
        raise LayoutError(what, hint="use --enable-prefix-caching and --mamba-cache-mode align")
    return first, KINDS[names[0]]
