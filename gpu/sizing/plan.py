"""A cache plan: what a model keeps per request, what of it is pooled, and how memory is divided.

Made in phases that can be printed: collect, check, group, size, allocate, and resize after a
forward pass was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, NamedTuple

from kvladder.errors import PlanError
from kvladder.gpu.requests.groups import ITEM_BYTES, SIZES, Group, Layer, group_layers, is_size
from kvladder.gpu.sizing.divide import Division, divide, pool_bytes
from kvladder.policy.numbers import settle, whole

Phase = Literal["collect", "check", "group", "size", "allocate", "resize"]
_AFTER: Final[dict[Phase, tuple[Phase, ...]]] = {
    "collect": (),
    "check": ("collect",),
    "group": ("check",),
    "size": ("group", "size"),
    "allocate": ("size",),
    "resize": ("allocate", "resize"),
}


def _require(name: str, dtype: str, *sizes: int) -> None:
    if dtype not in ITEM_BYTES:
        raise PlanError(f"dtype {dtype!r}", path=name, hint=f"one of: {', '.join(ITEM_BYTES)}")
    if not sizes or min(sizes) < 1:
        raise PlanError(f"sizes {list(sizes)}", path=name, hint="each 1 or more")


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of one layer: ``heads x head_dim x d_state`` elements per sequence."""

    name: str
    heads: int
    head_dim: int
    d_state: int
    dtype: str

    def __post_init__(self) -> None:
        settle(self, "heads", "head_dim", "d_state")
        _require(self.name, self.dtype, self.heads, self.head_dim, self.d_state)

    @property
    def bytes(self) -> int:
        """Per sequence, and per checkpoint."""
        return self.heads * self.head_dim * self.d_state * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ConvState:
    """The last ``width`` inputs of a layer's convolution, ``conv_dim`` elements each."""

    name: str
    conv_dim: int
    width: int
    dtype: str

    def __post_init__(self) -> None:
        settle(self, "conv_dim", "width")
        _require(self.name, self.dtype, self.conv_dim, self.width)

    @property
    def bytes(self) -> int:
        """Per sequence, and per checkpoint."""
        return self.conv_dim * self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PerSequence:
    """Something of one shape per sequence that is no state of its prefix, and is not pooled."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(whole(size, "shape") for size in self.shape))
        _require(self.name, self.dtype, *self.shape)

    @property
    def bytes(self) -> int:
        """Per sequence."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Unpaged:
    """Something that grows by ``width`` elements per token and lies in one piece."""

    name: str
    width: int
    dtype: str

    def __post_init__(self) -> None:
        settle(self, "width")
        _require(self.name, self.dtype, self.width)

    @property
    def token_bytes(self) -> int:
        """Per token."""
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Side:
    """A buffer beside a layer's KV that travels with its blocks, such as quantization scales."""

    name: str
    of: str
    """The layer's name."""
    head_bytes: int
    """Per token and head."""

    def __post_init__(self) -> None:
        settle(self, "head_bytes")
        if self.head_bytes < 1:
            raise PlanError(f"{self.head_bytes} bytes", path=self.name, hint="1 or more")


Resource = Layer | State | ConvState | PerSequence | Unpaged | Side


class Pool(NamedTuple):
    """What one block pool holds."""

    group: Group
    block_bytes: int
    members: tuple[str, ...]


class Alone(NamedTuple):
    """What is allocated by itself, and why."""

    name: str
    bytes: int
    """Per sequence."""
    why: str


Allocate = Callable[[str, int, int], object]
"""``allocate(name, count, bytes)``: memory for so many blocks, or sequences, of so many bytes."""


class CachePlan:
    """The plan of one model. Each phase is a method; one that comes too early raises PlanError.

    Parameters
    ----------
    resources:
        All that the model keeps: paged KV (:class:`Layer`; a latent is one of factor 1), states,
        side buffers and the rest, each with a name of its own.
    block_tokens:
        Tokens per block.
    max_tokens:
        Of the longest sequence.
    step:
        How many tokens of a prompt are computed at a time; None for all. A window holds those
        beside what it reads.
    checkpoint_tokens:
        After how many tokens a state is kept for later requests, a multiple of ``block_tokens``;
        0 keeps none.
    """

    def __init__(
        self,
        resources: Sequence[Resource],
        *,
        block_tokens: int,
        max_tokens: int,
        step: int | None = None,
        checkpoint_tokens: int = 0,
    ) -> None:
        self.resources = tuple(resources)
        self.block_tokens = whole(block_tokens, "block_tokens")
        self.max_tokens = whole(max_tokens, "max_tokens")
        self.step = None if step is None else whole(step, "step")
        self.checkpoint_tokens = whole(checkpoint_tokens, "checkpoint_tokens")
        self.phase: Phase = "collect"
        self.pooled: list[tuple[str, ...]] = []
        """Names of what is managed together: paged KV of one shape of a head, or equal states."""
        self.pools: list[Pool] = []
        self.alone: list[Alone] = []
        self.division: Division | None = None
        self.sequences = 0
        self.memory: dict[str, object] = {}
        """By name of a pool or of what is alone, what ``allocate`` returned."""
        self._free = 0
        self._fraction = 0.0
        self._max_tokens: int | None = None
        self._allocate: Allocate | None = None

    def _enter(self, phase: Phase) -> None:
        if self.phase not in _AFTER[phase]:
            before = " or ".join(_AFTER[phase])
            raise PlanError(f"{phase} after {self.phase}", hint=f"it comes after {before}")

    # ---- what may be reused

    @property
    def states(self) -> list[State | ConvState]:
        """What is the same for all prefixes of one length: states and convolution states."""
        return [one for one in self.resources if isinstance(one, State | ConvState)]

    @property
    def no_reuse(self) -> str:
        """Why blocks are not reused by later requests; empty if they are."""
        kept = (State, ConvState) if self.checkpoint_tokens else ()
        paged = (Layer, Side, *kept)
        rest = [one for one in self.resources if not isinstance(one, paged) or self._lone(one)]
        if not rest:
            return ""
        states = isinstance(rest[0], State | ConvState) and not self.checkpoint_tokens
        return f"{rest[0].name} is not paged" + (" and no checkpoints are kept" if states else "")

    def _lone(self, one: Resource) -> bool:
        """Whether it is a convolution without a state whose pool it joins."""
        states = [each for each in self.states if isinstance(each, State)]
        return isinstance(one, ConvState) and not any(
            fits(one.conv_dim, each.heads, each.head_dim, each.d_state) for each in states
        )

    @property
    def partial(self) -> bool:
        """Whether the beginning of a block may be copied: not where a state depends on its end."""
        return not self.no_reuse and not self.states

    # ---- the phases

    def check(self) -> CachePlan:
        """Raise PlanError where resources contradict each other."""
        self._enter("check")
        names = [one.name for one in self.resources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or not names:
            raise PlanError(f"{twice!r} twice" if names else "no resources", path="resources")
        layers = {one.name: one for one in self.resources if isinstance(one, Layer)}
        for one in self.resources:
            if isinstance(one, Side) and one.of not in layers:
                raise PlanError(f"{one.of!r} is no paged layer", path=one.name)
        for layer in layers.values():
            if layer.factor == 1 and layer.heads != 1:
                raise PlanError(f"a latent of {layer.heads} heads", path=layer.name, hint="1 head")
        size, every = self.block_tokens, self.checkpoint_tokens
        for path, tokens in (("block_tokens", size), ("checkpoint_tokens", every or size)):
            if not is_size(tokens):
                raise PlanError(f"{tokens} tokens", path=path, hint=SIZES)
        if every % size:
            raise PlanError(f"{every} tokens", path="checkpoint_tokens", hint="whole blocks")
        for path, bound in (("max_tokens", self.max_tokens), ("step", self.step)):
            if bound is not None and bound < 1:
                raise PlanError(f"{bound} tokens", path=path, hint="1 or more")
        self.phase = "check"
        return self

    def group(self) -> CachePlan:
        """Decide what is pooled, and with what."""
        self._enter("group")
        sides: dict[str, int] = {}
        for one in self.resources:
            if isinstance(one, Side):
                sides[one.of] = sides.get(one.of, 0) + one.head_bytes
        layers = [
            replace(one, side_bytes=one.side_bytes + sides.get(one.name, 0))
            for one in self.resources
            if isinstance(one, Layer)
        ]
        shapes: dict[tuple[object, ...], list[str]] = {}
        for layer in layers:
            shape = (layer.head_dim, layer.dtype, layer.factor, layer.layout)
            shapes.setdefault(shape, []).append(layer.name)
        self.pooled = [tuple(names) for names in shapes.values()]
        if layers:
            found = group_layers(layers, block_tokens=self.block_tokens, max_tokens=self.max_tokens)
            for group in found:
                members = tuple(layer.name for layer in group.layers)
                self.pools.append(Pool(group.group, group.block_bytes, members))
        self._group_states()
        for rest in self.resources:
            if isinstance(rest, PerSequence):
                self.alone.append(Alone(rest.name, rest.bytes, "one per sequence, not paged"))
            elif isinstance(rest, Unpaged):
                size = rest.token_bytes * self.max_tokens
                self.alone.append(Alone(rest.name, size, "grows in one piece, not paged"))
        self.phase = "group"
        return self

    def _group_states(self) -> None:
        """Pool states of one shape, and the convolution states that fit their heads."""
        shapes: dict[tuple[int, int, int, str], list[str]] = {}
        for one in self.resources:
            if isinstance(one, State):
                shape = (one.heads, one.head_dim, one.d_state, one.dtype)
                shapes.setdefault(shape, []).append(one.name)
        for conv in self.resources:
            if isinstance(conv, ConvState):
                fitting = next((s for s in shapes if fits(conv.conv_dim, *s[:3])), None)
                if fitting is not None:
                    shapes[fitting].append(conv.name)
                else:
                    why = f"conv_dim {conv.conv_dim} is not head_dim x heads + 2 x n x d_state"
                    self.alone.append(Alone(conv.name, conv.bytes, f"{why} of any state"))
        sizes = {one.name: one.bytes for one in self.states}
        for (heads, head_dim, d_state, dtype), names in shapes.items():
            self.pooled.append(tuple(names))
            name = f"state-{heads}x{head_dim}x{d_state}-{dtype}"
            every = self.checkpoint_tokens or _power_of_two(self.max_tokens)
            group = Group(name, max(every, self.block_tokens), "state")
            self.pools.append(Pool(group, sum(sizes[one] for one in names), tuple(names)))

    def size(
        self,
        free: int,
        *,
        fraction: float,
        sequences: int,
        peak: int = 0,
        max_tokens: int | None = None,
    ) -> CachePlan:
        """Divide the memory; see ``pool_bytes`` and ``divide``.

        ``sequences`` is how many run at a time: what is allocated by itself is for so many.
        """
        self._enter("size")
        free, sequences, peak = whole(free), whole(sequences), whole(peak)
        max_tokens = None if max_tokens is None else whole(max_tokens)
        if sequences < 1:
            raise PlanError(f"{sequences} sequences", path="sequences", hint="1 or more")
        self._free, self._fraction, self.sequences = free, fraction, sequences
        self._max_tokens = max_tokens
        self._divide(peak)
        self.phase = "size"
        return self

    def _divide(self, peak: int) -> None:
        other = self.sequences * sum(one.bytes for one in self.alone)
        pairs = [(pool.group, pool.block_bytes) for pool in self.pools]
        paged = sum(p.block_bytes // p.group.block_tokens for p in self.pools if _paged(p))
        memory = pool_bytes(
            free=self._free,
            fraction=self._fraction,
            other=other,
            peak=peak,
            max_tokens=self._max_tokens if paged else None,
            token_bytes=max(1, paged),
        )
        context = self.max_tokens
        self.division = divide(pairs, memory, context=context, step=self.step) if pairs else None

    def allocate(self, allocate: Allocate) -> CachePlan:
        """Have every pool, and what is by itself, allocated."""
        self._enter("allocate")
        self._allocate = allocate
        self._make()
        self.phase = "allocate"
        return self

    def _make(self) -> None:
        assert self._allocate is not None
        self.memory.clear()  # first, so that there is room for what comes
        for one in self.alone:
            self.memory[one.name] = self._allocate(one.name, self.sequences, one.bytes)
        for share in self.division.shares if self.division is not None else ():
            name = share.group.name
            self.memory[name] = self._allocate(name, share.blocks, share.block_bytes)

    def resize(self, peak: int) -> CachePlan:
        """A forward pass was measured to take ``peak`` bytes at most: divide and allocate anew."""
        self._enter("resize")
        self._divide(whole(peak))
        self._make()
        self.phase = "resize"
        return self

    def __str__(self) -> str:
        lines = [f"plan of {len(self.resources)} resources, after phase {self.phase}"]
        lines += [f"  together: {', '.join(names)}" for names in self.pooled]
        for pool in self.pools:
            group, members = pool.group, ", ".join(pool.members)
            lines.append(f"  pool {group.name}: {pool.block_bytes} bytes a block, for {members}")
        lines += [
            f"  alone {one.name}: {one.bytes} bytes a sequence ({one.why})" for one in self.alone
        ]
        why = self.no_reuse
        lines.append(f"  reuse of blocks: {f'off, {why}' if why else 'on'}")
        off = "on" if self.partial else "off" + (", states end a block" if self.states else "")
        lines.append(f"  partial copies: {off}")
        if self.division is not None:
            lines += [f"  {line}" for line in str(self.division).splitlines()]
        return "\n".join(lines)


def fits(conv_dim: int, heads: int, head_dim: int, d_state: int) -> bool:
    """Whether a convolution's inputs are those of such a state: values, and two of each group."""
    rest = conv_dim - head_dim * heads
    return rest >= 0 and rest % (2 * d_state) == 0


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 2


def _paged(pool: Pool) -> bool:
    return pool.group.kind != "state"
