"""Groups of layers that share one block shape and window, and which blocks a prefix needs."""

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
"""How many tokens the blocks of a pool may have."""


def is_size(tokens: int) -> bool:
    """Whether the blocks of a pool may have so many tokens."""
    return tokens > 1 and not tokens & (tokens - 1)


@dataclass(frozen=True, slots=True)
class Group:
    """One group of a model.

    Parameters
    ----------
    name:
        Names the group for people, and its blocks in keys.
    block_tokens:
        Tokens per block, a power of two above 1; groups may differ in it.
    kind:
        ``full``: a token reads all tokens before it. ``window``: itself and ``window - 1`` before
        it. ``state``: the recurrent state after the token before it; a block is the state after
        its last token, so the states at multiples of ``block_tokens`` are checkpoints.
    window:
        Tokens, 1 or more, for a window.

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
            hint = "1 or more, of a window alone"
            raise ConfigError(f"{self.kind}: window {self.window}", path=self.name, hint=hint)
        if not is_size(self.block_tokens):
            what = f"blocks of {self.block_tokens} tokens"
            raise ConfigError(what, path=self.name, hint=SIZES)

    def first(self, end: int) -> int:
        """The first block that is read when ``end`` tokens are computed."""
        if self.kind == "full":
            return 0
        back = 1 if self.kind == "state" else self.window - 1
        return max(0, end - back) // self.block_tokens

    def keeps(self, end: int) -> int:
        """The first block that a sequence keeps then: enough to rewind by a block."""
        return self.first(max(0, end - self.block_tokens))

    def holes(self, present: Sequence[bool]) -> list[int]:
        """By ``n``, one of the first ``n`` blocks that is not present, or -1 if all are.

        The first where all are read, so that nobody goes through the others; else the last.
        """
        if self.kind == "full":
            whole = next((at for at, here in enumerate(present) if not here), len(present))
            return [-1] * (whole + 1) + [whole] * (len(present) - whole)
        absent = (-1 if here else at for at, here in enumerate(present))
        return list(accumulate(absent, max, initial=-1))

    def serves(self, holes: Sequence[int], shared: Shared, end: int, step: int) -> int:
        """The longest prefix up to ``end`` tokens that the cached blocks can serve.

        A multiple of ``step``, as ``end`` is; it needs every block that is read after it, and of
        the block that it cuts short, one that shares its tokens. ``holes`` are those of the group's
        blocks.
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
"""By block, with how many of its tokens, but not all, a cached one begins that can be used."""


def served_by_all(
    groups: Sequence[Group],
    holes: Sequence[Sequence[int]],
    shared: Sequence[Shared],
    end: int,
    step: int,
) -> int:
    """The longest prefix up to ``end`` tokens that every group can serve, a multiple of ``step``.

    Reads a few numbers per step of the prompt, whatever is missing where.
    """
    found = list(zip(groups, holes, shared, strict=True))
    found.sort(key=lambda one: one[0].kind != "full")  # these say the most at once
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
        Of keys and values; a latent is one head.
    dtype:
        A name in ``ITEM_BYTES``.
    window:
        How many tokens a token reads, itself included; None for all.
    factor:
        2 for keys and values, 1 for one latent vector per token (MLA).
    layout:
        The order of what is in a block: ``nhd`` has all heads of a token together, ``hnd`` all
        tokens of a head; another name is an engine's own, for memory that it lays out itself.
    side_bytes:
        Per token and head, of buffers that travel with the block, such as quantization scales.
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
                raise PlanError(f"{what}: {getattr(self, what)}", path=self.name, hint="1 or more")
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise PlanError(f"dtype {self.dtype!r}", path=self.name, hint=f"one of: {known}")
        if self.side_bytes < 0 or (self.window is not None and self.window < 1):
            raise PlanError(f"window {self.window}, side buffers {self.side_bytes}", path=self.name)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: ``factor x heads x (head_dim x itemsize)`` and side buffers."""
        return self.size_bytes(1) + self.heads * self.side_bytes

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """``[factor, tokens, heads, head_dim]``, or ``[factor, heads, tokens, head_dim]``."""
        inner = (self.heads, tokens) if self.layout == "hnd" else (tokens, self.heads)
        return self.factor, *inner, self.head_dim

    def family(self) -> Hashable:
        """All but the heads, the window and what travels along."""
        return self.head_dim, self.dtype, self.factor, self.layout

    def check(self, others: Mapping[str, ResourceHandler]) -> None:
        """A latent has one head."""
        if self.factor == 1 and self.heads != 1:
            raise PlanError(f"a latent of {self.heads} heads", path=self.name, hint="1 head")

    @classmethod
    def collect(cls, at: int, layer: Any) -> Iterable[ResourceHandler]:
        """Keys and values, what stands for both, and an indexer's keys."""
        keys = getattr(layer, "keys", None)
        if keys is not None:
            window = getattr(layer, "sliding_window", None)
            heads, key_size, value_size = keys.shape[1], keys.shape[-1], layer.values.shape[-1]
            if key_size == value_size:
                yield cls(f"{at}.kv", heads, key_size, type_name(keys), window)
            else:  # a latent and what is rotated, or heads of two sizes
                size = heads * (key_size + value_size)
                yield cls(f"{at}.latent", 1, size, type_name(keys), window, factor=1)
        indexer = getattr(layer, "indexer_keys", None)
        if indexer is not None:
            yield cls(f"{at}.indexer", 1, indexer.shape[-1], type_name(indexer), factor=1)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a pool: equal in window, heads, head size, type and layout."""

    group: Group
    layers: tuple[Layer, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers together."""
        return self.group.block_tokens * sum(layer.token_bytes for layer in self.layers)


def group_layers(
    layers: Sequence[Layer], *, block_tokens: int, max_tokens: int
) -> list[LayerGroup]:
    """The pools of a model, in the order of their first layers.

    A window that holds ``max_tokens``, the longest sequence, is full attention.

    Raises
    ------
    PlanError
        There are no layers, or two of one name.
    """
    if not layers or len({layer.name for layer in layers}) < len(layers):
        raise PlanError(f"{len(layers)} layers", hint="one or more, each with a name of its own")
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
