"""Groups of layers that share one block shape and window, and which blocks a prefix needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from kvladder.errors import ConfigError, PlanError
from kvladder.policy.numbers import settle

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of an element by the name of its type."""

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

    def serves(self, holes: Sequence[int], end: int, step: int) -> int:
        """The longest prefix up to ``end`` tokens that the cached blocks can serve.

        A multiple of ``step``, as ``end`` is; it needs every block that is read after it.
        ``holes`` are those of the group's blocks, see ``holes_of``.
        """
        while (hole := holes[end // self.block_tokens]) >= self.first(end):
            end = hole * self.block_tokens // step * step
        return end


def holes_of(present: Iterable[bool]) -> list[int]:
    """By ``n``, the last of the first ``n`` blocks that is not present, or -1 if all are."""
    absent = (-1 if here else at for at, here in enumerate(present))
    return list(accumulate(absent, max, initial=-1))


def served_by_all(
    groups: Sequence[Group], holes: Sequence[Sequence[int]], end: int, step: int
) -> int:
    """The longest prefix up to ``end`` tokens that every group can serve, a multiple of ``step``.

    Reads a few numbers per step of the prompt, whatever is missing where.
    """
    before = -1
    while before != end:
        before = end
        for group, missing in zip(groups, holes, strict=True):
            end = group.serves(missing, end, step)
    return end


@dataclass(frozen=True, slots=True)
class Layer:
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
        The engine's name for the order of what is in a block.
    side_bytes:
        Per token and head, of buffers that travel with the block, such as quantization scales.
    """

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
        per_head = self.factor * self.head_dim * ITEM_BYTES[self.dtype] + self.side_bytes
        return self.heads * per_head


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
