"""Groups of layers with one block shape and window; the blocks that a prefix needs in each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Final, Literal

from kvladder.errors import ConfigError, PlanError
from kvladder.gpu.sizing.base import ITEM_BYTES, Kept, ResourceHandler, type_name
from kvladder.policy.numbers import settle

Kind = Literal["full", "window", "state"]

SIZES: Final = "a power of two above 1"
"""Allowed numbers of tokens per block, as text for errors."""


def is_size(tokens: int) -> bool:
    """Return whether a pool's blocks may have this many tokens."""
    return tokens > 1 and not tokens & (tokens - 1)


@dataclass(frozen=True, slots=True)
class Group:
    """One group of a model.

    Parameters
    ----------
    name:
        Name of the group, for people and in the keys of its blocks.
    block_tokens:
        Tokens per block, a power of two above 1; groups may have different ones.
    kind:
        ``full``: a token reads all tokens before it. ``window``: a token reads itself and the
        ``window - 1`` tokens before it. ``state``: a token reads the recurrent state after the
        token before it. A block is then the state after its last token, so the states at multiples
        of ``block_tokens`` are checkpoints.
    window:
        Tokens of the window, 1 or more; 0 for other kinds.

    Raises
    ------
    ConfigError
        A number is out of its range.
    """

    name: str
    block_tokens: int
    kind: Kind = "full"
    window: int = 0

    def __post_init__(self) -> None:
        settle(self, "block_tokens", "window")
        if (self.window > 0) != (self.kind == "window"):
            hint = "expected 1 or more for a window, 0 for other kinds"
            raise ConfigError(f"{self.kind}: window {self.window}", path=self.name, hint=hint)
        if not is_size(self.block_tokens):
            what = f"blocks of {self.block_tokens} tokens"
            raise ConfigError(what, path=self.name, hint=f"expected {SIZES}")

    def first(self, end: int) -> int:
        """Return the first block that is read to compute the token behind the first ``end``."""
        if self.kind == "full":
            return 0
        back = 1 if self.kind == "state" else self.window - 1
        return max(0, end - back) // self.block_tokens

    def keeps(self, end: int) -> int:
        """Return the first block that a sequence keeps at ``end``: it can rewind by one block."""
        return self.first(max(0, end - self.block_tokens))

    def holes(self, present: Sequence[bool]) -> list[int]:
        """Return, for each ``n``, an absent block among the first ``n``, or -1 if none is absent.

        With full attention it is the first absent block, which ends the prefix; else the last one.
        """
        if self.kind == "full":
            whole = next((at for at, here in enumerate(present) if not here), len(present))
            return [-1] * (whole + 1) + [whole] * (len(present) - whole)
        absent = (-1 if here else at for at, here in enumerate(present))
        return list(accumulate(absent, max, initial=-1))

    def serves(self, holes: Sequence[int], shared: Shared, end: int, step: int) -> int:
        """Return the length of the longest prefix, up to ``end`` tokens, that cached blocks serve.

        The result and ``end`` are multiples of ``step``. The prefix needs every block that the next
        token reads. If it ends within a block, a cached block must begin with that part's tokens.
        ``holes`` are those of the group's blocks.
        """
        size = self.block_tokens
        while end:
            block, rest = divmod(end, size)
            if rest and (begun := shared(block)) < rest:
                end = (block * size + begun) // step * step
            elif (hole := holes[block]) >= self.first(end):
                end = (hole * size + shared(hole)) // step * step
            else:
                break
        return end


Shared = Callable[[int], int]
"""Returns how many leading tokens of a block, but not all, a usable cached block has."""


def served_by_all(
    groups: Sequence[Group],
    holes: Sequence[Sequence[int]],
    shared: Sequence[Shared],
    end: int,
    step: int,
) -> int:
    """Return the length of the longest prefix, up to ``end``, that every group can serve.

    It is a multiple of ``step``. The cost is a few numbers per step of the prompt, no matter which
    blocks are missing.
    """
    found = list(zip(groups, holes, shared, strict=True))
    found.sort(key=lambda one: one[0].kind != "full")  # full attention shortens it most at once
    before = -1
    while before != end:
        before = end
        for group, missing, begun in found:
            end = group.serves(missing, begun, end, step)
    return end


@dataclass(frozen=True, slots=True)
class Layer(ResourceHandler):
    """One layer's paged KV.

    Parameters
    ----------
    heads, head_dim:
        Number and size of the heads of keys and values; a latent is one head.
    dtype:
        Name of the element type, a key of ``ITEM_BYTES``.
    window:
        Number of tokens that a token reads, itself included; None for all.
    factor:
        2 for keys and values, 1 for one latent vector per token (MLA).
    layout:
        Order within a block: ``nhd`` has all heads of a token together, ``hnd`` all tokens of a
        head. Any other name means an engine's own layout of memory that it manages itself.
    side_bytes:
        Bytes per token and head of buffers that travel with the block, such as quantization scales.
    """

    kind: ClassVar[Kept] = "paged"
    name: str
    heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    factor: int = 2
    layout: str = "nhd"
    side_bytes: int = 0

    def __post_init__(self) -> None:
        settle(self, "heads", "head_dim", "window", "factor", "side_bytes")
        for what in ("heads", "head_dim", "factor"):
            if getattr(self, what) < 1:
                found = f"{what}: {getattr(self, what)}"
                raise PlanError(found, path=self.name, hint="expected 1 or more")
        if self.dtype not in ITEM_BYTES:
            hint = f"expected one of: {', '.join(ITEM_BYTES)}"
            raise PlanError(f"dtype {self.dtype!r}", path=self.name, hint=hint)
        if self.side_bytes < 0 or (self.window is not None and self.window < 1):
            what = f"window {self.window}, side buffers {self.side_bytes}"
            hint = "expected a window of 1 or more, side buffers of 0 or more"
            raise PlanError(what, path=self.name, hint=hint)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: ``factor x heads x (head_dim x itemsize)``, plus side buffers."""
        return self.size_bytes(1) + self.heads * self.side_bytes

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Return ``[factor, tokens, heads, head_dim]``; for ``hnd``, heads come before tokens."""
        inner = (self.heads, tokens) if self.layout == "hnd" else (tokens, self.heads)
        return self.factor, *inner, self.head_dim

    def family(self) -> Hashable:
        """Return all properties except the heads, the window and the side buffers."""
        return self.head_dim, self.dtype, self.factor, self.layout

    def check(self, others: Mapping[str, ResourceHandler]) -> None:
        """Raise PlanError if a latent has more than one head."""
        if self.factor == 1 and self.heads != 1:
            what = f"a latent of {self.heads} heads"
            raise PlanError(what, path=self.name, hint="expected 1 head")

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ResourceHandler]:
        """Yield handlers of a layer's keys and values, or its latent, and of an indexer's keys."""
        keys = getattr(layer, "keys", None)
        if keys is not None:
            window = getattr(layer, "sliding_window", None)
            heads, key_size, value_size = keys.shape[1], keys.shape[-1], layer.values.shape[-1]
            if key_size == value_size:
                yield cls(f"{at}.kv", heads, key_size, type_name(keys), window)
            else:  # a latent with its rotated part, or heads of two sizes
                size = heads * (key_size + value_size)
                yield cls(f"{at}.latent", 1, size, type_name(keys), window, factor=1)
        indexer = getattr(layer, "indexer_keys", None)
        if indexer is not None:
            yield cls(f"{at}.indexer", 1, indexer.shape[-1], type_name(indexer), factor=1)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a pool, with equal window, heads, head size, type and layout."""

    group: Group
    layers: tuple[Layer, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers together."""
        return self.group.block_tokens * sum(layer.token_bytes for layer in self.layers)


def group_layers(
    layers: Sequence[Layer], *, block_tokens: int, max_tokens: int
) -> list[LayerGroup]:
    """Group a model's layers into pools; return these in the order of their first layers.

    A window of ``max_tokens`` (the longest sequence) or more counts as full attention.

    Raises
    ------
    PlanError
        There are no layers, or two layers have the same name.
    """
    if not layers or len({layer.name for layer in layers}) < len(layers):
        hint = "expected one or more, each with its own name"
        raise PlanError(f"{len(layers)} layers", hint=hint)
    found: dict[tuple[int, tuple[object, ...]], list[Layer]] = {}
    for layer in layers:
        window = layer.window or 0
        window = window if window < max_tokens else 0
        shape = (layer.heads, layer.head_dim, layer.dtype, layer.factor, layer.side_bytes)
        found.setdefault((window, (*shape, layer.layout)), []).append(layer)
    groups: list[LayerGroup] = []
    taken: set[str] = set()
    for (window, _), members in found.items():
        first = members[0]
        name = f"{first.heads}x{first.head_dim}-{first.dtype}"
        if first.factor == 1:
            name = f"latent-{name}"
        if window:
            name = f"{name}-window-{window}"
        if name in taken:  # they differ in layout or side buffers
            name = f"{name}-{len(taken)}"
        taken.add(name)
        group = Group(name, block_tokens, "window" if window else "full", window)
        groups.append(LayerGroup(group, tuple(members)))
    return groups
