"""vLLM's KV cache groups: the kind of each, and the blocks of it that a prefix needs.

The layers of a group share one block table. A model with one kind of attention has one group for
all layers; other models have one or several groups for each kind. A block of a group holds
``tokens`` tokens of its layers, or the recurrent state after that number of tokens.
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
    """One KV cache group, as the scheduler half sees it."""

    index: int
    """Position among vLLM's groups."""
    kind: Kind
    tokens: int
    """Tokens per block."""
    hashes: int
    """vLLM's hashes per block."""
    reach: int = 0
    """Window: number of tokens that it reads before the next one. Local: tokens of one section."""
    handed: bool = False
    """True if vLLM hands over each state to save, because the block table does not keep it."""
    mark: int = 0
    """Constant of 256 bits that is combined (XOR) with a block's hash to form its key.

    It is 0 for the first group, and differs between groups. So blocks of two groups never share a
    key, and two keys of one group are equal only if the hashes are.
    """

    def first(self, end: int) -> int:
        """Return the first block that is read once ``end`` tokens are computed, as vLLM counts."""
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
        """Return the keys of blocks ``start <= n < end``, as far as vLLM's ``hashes`` reach.

        ``mark`` is combined (XOR) with the group's own.
        """
        chosen = hashes[(start + 1) * self.hashes - 1 : end * self.hashes : self.hashes]
        return cast("list[BlockKey]", marked(chosen, self.mark ^ mark))


Wanted = Callable[[int], bool]


class VllmGroups(tuple[VllmGroup, ...]):
    """All groups of one model."""

    @cached_property
    def step(self) -> int:
        """Distance in tokens between two prefix ends that every group can serve."""
        return lcm(*(group.tokens for group in self))

    def aligned(self, tokens: int) -> int:
        """Return the last such end that is not beyond ``tokens``."""
        return tokens // self.step * self.step

    @cached_property
    def whole(self) -> list[VllmGroup]:
        """The groups that need every block of a prefix."""
        return [group for group in self if group.kind == "full"]

    @cached_property
    def partial(self) -> list[VllmGroup]:
        """The other groups: they read a part that depends on where the prefix ends."""
        return [group for group in self if group.kind != "full"]

    def useful(self, group: VllmGroup, interval: int | None, ends: Sequence[int]) -> Wanted:
        """Return a function that tells whether a later request may read a block.

        For groups that are not whole.

        Parameters
        ----------
        interval:
            vLLM's ``prefix_cache_retention_interval``. With None, prefixes may end at any step.
            Otherwise they end only at ``ends`` and, if it is not 0, at its multiples.
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
        """The group used where one must stand for all: of full attention if there is any."""
        return next(iter(self.whole), self[0])


def groups_of(kv_cache_config: Any, *, model: str) -> VllmGroups:
    """Read vLLM's groups.

    Raises
    ------
    LayoutError
        The kind of a group is not supported (the error names the model, the kind and its layers),
        or its block size is not a multiple of vLLM's hash block size.
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
    """Return hashes of 256 bits, each combined (XOR) with a mark of the same size."""
    if not mark:
        return list(hashes)
    return [(int.from_bytes(one) ^ mark).to_bytes(32) for one in hashes]


@cache
def mark_of(index: int) -> int:
    """Return the mark of a group; see ``VllmGroup.mark``."""
    if not index:
        return 0
    return int.from_bytes(hashlib.sha256(f"kvladder group {index}".encode()).digest())


def layer_specs(group: Any) -> dict[str, Any]:
    """Return vLLM's specification for each layer of a group, in order."""
    own: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: own.get(name, group.kv_cache_spec) for name in group.layer_names}


def _kind(group: Any, model: str) -> tuple[Any, Kind]:
    """Return a group's specification and kind; all its layers must be of one kind."""
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
            hint="kvladder supports only models with a prefix cache for every layer",
        )
    if getattr(first, "mamba_cache_mode", "align") not in ("align", "all"):
        what = f"{where} has states that vLLM does not keep at block boundaries"
        raise LayoutError(what, hint="use --enable-prefix-caching and --mamba-cache-mode align")
    return first, KINDS[names[0]]
