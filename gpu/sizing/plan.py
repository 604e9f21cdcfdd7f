"""A cache plan: a model's resources per request, their pools, and the division of memory.

It is made in phases, and can be printed after each: collect, check, group, size, allocate, and
resize after a forward pass was measured. ``kvladder size`` prints a plan, and ``open_device`` opens
one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import Final, Literal, NamedTuple

from kvladder.errors import PlanError
from kvladder.gpu.sizing.adapt import adapted
from kvladder.gpu.sizing.base import ITEM_BYTES, ResourceHandler, require
from kvladder.gpu.sizing.divide import (
    Division,
    blocks_of,
    divide,
    in_regions,
    needed,
    pool_bytes,
)
from kvladder.gpu.sizing.groups import SIZES, Group, Layer, group_layers, is_size
from kvladder.gpu.sizing.handlers import ConvState, Side, State, StateHandler
from kvladder.policy.numbers import whole

Phase = Literal["collect", "check", "group", "size", "allocate", "resize"]
_AFTER: Final[dict[Phase, tuple[Phase, ...]]] = {
    "collect": (),
    "check": ("collect",),
    "group": ("check",),
    "size": ("group", "size"),
    "allocate": ("size",),
    "resize": ("allocate", "resize"),
}


SHARED: Final = "pools"
"""Name under which memory that pools share is allocated, see ``CachePlan.size``."""


class Place(NamedTuple):
    """Place of a handler's elements in each block of its pool."""

    name: str
    offset: int
    """Offset in bytes."""
    shape: tuple[int, ...]
    dtype: str


class PlannedPool(NamedTuple):
    """Contents of one block pool."""

    group: Group
    block_bytes: int
    members: tuple[str, ...]
    places: tuple[Place, ...]


class Alone(NamedTuple):
    """A resource that is allocated separately, and the reason."""

    name: str
    bytes: int
    """Bytes per sequence."""
    why: str
    shape: tuple[int, ...]
    dtype: str


Allocate = Callable[[str, int, int], object]
"""``allocate(name, count, bytes)`` returns memory for ``count`` blocks or sequences."""


class CachePlan:
    """The plan of one model. Each phase is a method, which raises PlanError if called too early.

    Parameters
    ----------
    resources:
        Handlers of all resources of the model, each with a unique name: paged KV (:class:`Layer`;
        a latent has factor 1), states, side buffers and others.
    block_tokens:
        Tokens per block.
    max_tokens:
        Tokens of the longest sequence.
    step:
        Tokens of a prompt computed at a time; None for all. A window holds these besides the
        tokens that it reads.
    checkpoint_tokens:
        Distance in tokens between states kept for later requests, a multiple of ``block_tokens``;
        0 keeps none.
    """

    def __init__(
        self,
        resources: Sequence[ResourceHandler],
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
        """Names of resources managed together: paged KV with equal heads, or equal states."""
        self.pools: list[PlannedPool] = []
        self.alone: list[Alone] = []
        self.division: Division | None = None
        self.sequences = 0
        """Number of sequences that run at a time; separate resources are allocated for these."""
        self.memory: dict[str, object] = {}
        """Memory from ``allocate``, by the name of a pool or of a separate resource."""
        self._free = 0
        self._fraction: float | None = None
        self._max_tokens: int | None = None
        self._shares: Sequence[float] = ()
        self._rebalance = False
        self._wanted: int | None = None
        self._allocate: Allocate | None = None

    def _enter(self, phase: Phase) -> None:
        if self.phase not in _AFTER[phase]:
            before = " or ".join(_AFTER[phase])
            what = f"cannot {phase} a plan in phase {self.phase}"
            raise PlanError(what, hint=f"expected phase {before}")

    # ---- reuse of blocks

    @property
    def states(self) -> list[StateHandler]:
        """Handlers of recurrent states and of convolution states."""
        return [one for one in self.resources if isinstance(one, StateHandler)]

    @property
    def no_reuse(self) -> str:
        """Reason why blocks cannot be reused by later requests, known after ``group``; or empty."""
        apart = {one.name for one in self.alone}
        for one in self.resources:
            if one.kind == "alone" or one.name in apart:
                return f"{one.name} is not paged"
            if one.kind == "state" and not self.checkpoint_tokens:
                return f"{one.name} is not paged and no checkpoints are kept"
        return ""

    @property
    def partial(self) -> bool:
        """True if a part of a block may be copied: not with states, which depend on its end."""
        return not self.no_reuse and not self.states

    # ---- the phases

    def adapt(self, *, dtype: str = "auto", windows: Sequence[int] = ()) -> CachePlan:
        """Change the type of layers' KV (with scales if it has 8 bits), or narrow their windows.

        Call it before ``check``; see ``adapted``.
        """
        if self.phase != "collect":
            what = f"cannot adapt a plan in phase {self.phase}"
            raise PlanError(what, hint="expected phase collect")
        self.resources = tuple(adapted(self.resources, dtype=dtype, windows=windows))
        return self

    def check(self) -> CachePlan:
        """Raise PlanError if resources contradict each other."""
        self._enter("check")
        names = [one.name for one in self.resources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or not names:
            what = f"two resources are named {twice!r}" if names else "no resources"
            raise PlanError(
                what, path="resources", hint="expected one or more, each with its own name"
            )
        others = {one.name: one for one in self.resources}
        for one in self.resources:
            require(one.name, one.dtype, *one.shape_of(1))
            if one.kind == "paged" and not isinstance(one, Layer | Side):
                what = f"{type(one).__name__} is paged, but is not a Layer or Side"
                raise PlanError(what, path=one.name, hint="derive it from Layer or Side")
            one.check(others)
        size, every = self.block_tokens, self.checkpoint_tokens
        for path, tokens in (("block_tokens", size), ("checkpoint_tokens", every or size)):
            if not is_size(tokens):
                raise PlanError(f"{tokens} tokens", path=path, hint=f"expected {SIZES}")
        if every % size:
            hint = f"expected a multiple of {size}, the tokens of a block"
            raise PlanError(f"{every} tokens", path="checkpoint_tokens", hint=hint)
        for path, bound in (("max_tokens", self.max_tokens), ("step", self.step)):
            if bound is not None and bound < 1:
                raise PlanError(f"{bound} tokens", path=path, hint="expected 1 or more")
        self.phase = "check"
        return self

    def group(self) -> CachePlan:
        """Decide which resources share a pool, and their places in a block."""
        self._enter("group")
        self._group_layers()
        self._group_states()
        for one in self.resources:
            if one.kind == "alone":
                self._leave_alone(one, one.why)
        self.phase = "group"
        return self

    def _leave_alone(self, one: ResourceHandler, why: str) -> None:
        shape, size = one.shape_of(self.max_tokens), one.size_bytes(self.max_tokens)
        self.alone.append(Alone(one.name, size, why, shape, one.dtype))

    def _group_layers(self) -> None:
        """Pool paged KV by shape and window; side buffers travel with their layers."""
        sides: dict[str, list[Side]] = {}
        for one in self.resources:
            if isinstance(one, Side):
                sides.setdefault(one.of, []).append(one)
        layers: list[Layer] = []
        shapes: dict[Hashable, list[str]] = {}
        for one in self.resources:
            if isinstance(one, Layer):
                more = sum(side.head_bytes for side in sides.get(one.name, ()))
                layers.append(replace(one, side_bytes=one.side_bytes + more))
                shapes.setdefault(one.family(), []).append(one.name)
        if not layers:
            return
        self.pooled = [tuple(names) for names in shapes.values()]
        size = self.block_tokens
        for group in group_layers(layers, block_tokens=size, max_tokens=self.max_tokens):
            parts = [(each.name, each.shape_of(size), each.dtype) for each in group.layers]
            for each in group.layers:
                own = [(side.name, side.head_bytes) for side in sides.get(each.name, ())]
                told = each.side_bytes - sum(count for _, count in own)
                own += [(f"{each.name}.side", told)] if told else []
                parts += [(name, (size, each.heads, count), "uint8") for name, count in own]
            self._pool(group.group, [layer.name for layer in group.layers], parts)

    def _group_states(self) -> None:
        """Pool equal states, together with equal convolutions that fit their heads.

        Other convolutions are allocated separately.
        """
        families: dict[Hashable, list[StateHandler]] = {}
        for one in self.states:
            if not isinstance(one, ConvState):
                families.setdefault(one.family(), []).append(one)
        for conv in self.states:
            if isinstance(conv, ConvState):
                self._join(conv, list(families.values()))
        for members in families.values():
            names = tuple(one.name for one in members)
            self.pooled.append(names)
            first = members[0]
            name = f"state-{'x'.join(map(str, first.shape_of(1)))}-{first.dtype}"
            every = self.checkpoint_tokens or _power_of_two(self.max_tokens)
            group = Group(name, max(every, self.block_tokens), "state")
            self._pool(group, names, [(one.name, one.shape_of(1), one.dtype) for one in members])

    def _join(self, conv: ConvState, families: Sequence[list[StateHandler]]) -> None:
        fed = [
            members
            for members in families
            if isinstance(members[0], State) and members[0].feeds(conv)
        ]
        others = [[one for one in members if isinstance(one, ConvState)] for members in fed]
        for members, there in zip(fed, others, strict=True):
            if not there or there[0].family() == conv.family():
                members.append(conv)
                return
        if fed:
            other = others[0][0]
            why = f"its shape or type differs from {other.name}'s: {_like(conv)}, {_like(other)}"
        else:
            why = f"conv_dim {conv.conv_dim} is not head_dim x heads + 2 x n x d_state of any state"
        self._leave_alone(conv, why)

    def _pool(
        self,
        group: Group,
        members: Sequence[str],
        parts: Sequence[tuple[str, tuple[int, ...], str]],
    ) -> None:
        """Add a pool with these parts in each block, the widest elements first for alignment."""
        ordered = sorted(parts, key=lambda part: -ITEM_BYTES[part[2]])
        places: list[Place] = []
        end = 0
        for name, shape, dtype in ordered:
            places.append(Place(name, end, shape, dtype))
            end += prod(shape) * ITEM_BYTES[dtype]
        align = ITEM_BYTES[ordered[0][2]]
        size = -(-end // align) * align
        self.pools.append(PlannedPool(group, size, tuple(members), tuple(places)))

    @property
    def pairs(self) -> list[tuple[Group, int]]:
        """Group and block size of each pool, as ``divide`` takes them."""
        return [(pool.group, pool.block_bytes) for pool in self.pools]

    @property
    def alone_bytes(self) -> int:
        """Bytes of the separate resources of one sequence."""
        return sum(one.bytes for one in self.alone)

    @property
    def pooled_bytes(self) -> int:
        """Bytes of the most blocks that one sequence of ``max_tokens`` holds."""
        step = self.max_tokens if self.step is None else min(self.step, self.max_tokens)
        return sum(needed(group, self.max_tokens, step) * size for group, size in self.pairs)

    def size(
        self,
        free: int,
        *,
        fraction: float | None = None,
        sequences: int | None = None,
        peak: int = 0,
        max_tokens: int | None = None,
        shares: Sequence[float] = (),
        rebalance: bool = False,
    ) -> CachePlan:
        """Divide the memory; see ``pool_bytes`` and ``divide``.

        Parameters
        ----------
        free:
            Bytes of memory. ``peak`` is left for a forward pass; the cache gets the rest, or
            ``fraction`` of the rest.
        sequences:
            Number of sequences with separate resources; None for all that fit.
        shares:
            Explicit shares of the pools, instead of each pool's part of a sequence.
        rebalance:
            True if pools share one memory, and regions of it move between them. It has no effect on
            a single pool.

        Raises
        ------
        PlanError
            A number is out of its range, no sequence fits, or memory cannot be shared.
        """
        self._enter("size")
        self._rebalance = rebalance and len(self.pools) > 1
        kinds = sorted({place.dtype for pool in self.pools for place in pool.places})
        if self._rebalance and len(kinds) > 1:  # left bytes of one may be NaN in another
            what = f"pools hold data of types {', '.join(kinds)}"
            hint = "expected false, or layers of one data type"
            raise PlanError(what, path="gpu.rebalance", hint=hint)
        self._wanted = None if sequences is None else whole(sequences, "sequences")
        self._free, self._fraction, self._shares = whole(free), fraction, shares
        self._max_tokens = None if max_tokens is None else whole(max_tokens)
        if self._wanted is not None and self._wanted < 1:
            hint = "expected 1 or more"
            raise PlanError(f"{self._wanted} sequences", path="sequences", hint=hint)
        self._divide(whole(peak))
        self.phase = "size"
        return self

    def _divide(self, peak: int) -> None:
        apart, part = self.alone_bytes, self._fraction
        self.sequences = self._wanted or self._fitting(peak)
        other = self.sequences * apart
        if part is None:
            memory = self._free - other - peak
        else:
            context = self.max_tokens
            token = sum(size * blocks_of(context, one.block_tokens) for one, size in self.pairs)
            memory = pool_bytes(
                free=self._free,
                fraction=part,
                other=other,
                peak=peak,
                max_tokens=self._max_tokens if token else None,
                token_bytes=max(1, -(-token // context)),
            )
        if self.pools and memory < 1:
            raise PlanError(
                f"{self._free} bytes: {self.sequences} sequences take {other} outside the pools,"
                f" and a forward pass takes {peak}",
                hint=f"expected more than {other + peak} bytes, or fewer sequences",
            )
        self.division = (
            divide(self.pairs, memory, context=self.max_tokens, step=self.step, shares=self._shares)
            if self.pools
            else None
        )
        if self.division is not None and self._rebalance:
            self.division = in_regions(self.division)

    def _fitting(self, peak: int) -> int:
        """Return how many sequences fit at the same time, at least 1."""
        part = 1 if self._fraction is None else self._fraction
        one = self.pooled_bytes + part * self.alone_bytes
        return max(1, int(part * (self._free - peak) // one)) if one else 1

    def allocate(self, allocate: Allocate, *, least: bool = False) -> CachePlan:
        """Allocate all pools and separate resources by calls of ``allocate``.

        With ``least``, for one sequence only: measure a forward pass over it, then call ``resize``.
        """
        self._enter("allocate")
        self._allocate = allocate
        self._make(least=least)
        self.phase = "allocate"
        return self

    def _make(self, *, least: bool = False) -> None:
        assert self._allocate is not None
        self.memory.clear()  # first, to make room for the new memory
        for one in self.alone:
            count = 1 if least else self.sequences
            self.memory[one.name] = self._allocate(one.name, count, one.bytes)
        if self.division is None:
            return
        if self.division.regions:
            size = self.division.region_bytes
            each = (-(-one.needed * one.block_bytes // size) for one in self.division.shares)
            count = max(each) if least else self.division.regions
            whole = self._allocate(SHARED, count, size)
            self.memory.update((share.group.name, whole) for share in self.division.shares)
            return
        for share in self.division.shares:
            name, count = share.group.name, share.needed if least else share.blocks
            self.memory[name] = self._allocate(name, count, share.block_bytes)

    def resize(self, peak: int) -> CachePlan:
        """Divide and allocate again, with ``peak`` as the measured bytes of a forward pass."""
        self._enter("resize")
        self._divide(whole(peak))
        self._make()
        self.phase = "resize"
        return self

    @property
    def described(self) -> str:
        """Text that lists its pools, its separate resources and the division of memory."""
        lines = [f"plan of {len(self.resources)} resources, after phase {self.phase}"]
        lines += [f"  managed together: {', '.join(names)}" for names in self.pooled]
        for pool in self.pools:
            group, members = pool.group, ", ".join(place.name for place in pool.places)
            lines.append(f"  pool {group.name}: {pool.block_bytes} bytes per block, for {members}")
        lines += [
            f"  separate {one.name}: {one.bytes} bytes per sequence ({one.why})"
            for one in self.alone
        ]
        if self.division is not None:
            lines += [f"  {line}" for line in str(self.division).splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        why = self.no_reuse
        off = (
            "on"
            if self.partial
            else "off" + (", because states exist only at block ends" if self.states else "")
        )
        reuse = f"  reuse of blocks: {f'off, {why}' if why else 'on'}"
        return "\n".join([self.described, reuse, f"  partial copies: {off}"])


def _like(one: StateHandler) -> str:
    return f"{'x'.join(map(str, one.shape_of(1)))} {one.dtype}"


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 2
