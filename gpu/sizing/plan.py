"""A cache plan: what a model keeps per request, what of it is pooled, and how memory is divided.

Made in phases that can be printed: collect, check, group, size, allocate, and resize after a
forward pass was measured. ``kvladder size`` prints one, and ``open_device`` opens one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import Final, Literal, NamedTuple

from kvladder.errors import PlanError
from kvladder.gpu.requests.groups import SIZES, Group, Layer, group_layers, is_size
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
"""What memory is asked for as that pools share, see ``CachePlan.size``."""


class Place(NamedTuple):
    """Where a handler's elements are in each block of its pool."""

    name: str
    offset: int
    """Bytes."""
    shape: tuple[int, ...]
    dtype: str


class PlannedPool(NamedTuple):
    """What one block pool holds."""

    group: Group
    block_bytes: int
    members: tuple[str, ...]
    places: tuple[Place, ...]


class Alone(NamedTuple):
    """What is allocated by itself, and why."""

    name: str
    bytes: int
    """Per sequence."""
    why: str
    shape: tuple[int, ...]
    dtype: str


Allocate = Callable[[str, int, int], object]
"""``allocate(name, count, bytes)``: memory for so many blocks, or sequences, of so many bytes."""


class CachePlan:
    """The plan of one model. Each phase is a method; one that comes too early raises PlanError.

    Parameters
    ----------
    resources:
        Handlers of all that the model keeps: paged KV (:class:`Layer`; a latent is one of factor
        1), states, side buffers and the rest, each with a name of its own.
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
        """Names of what is managed together: paged KV of one shape of a head, or equal states."""
        self.pools: list[PlannedPool] = []
        self.alone: list[Alone] = []
        self.division: Division | None = None
        self.sequences = 0
        """How many run at a time: what is allocated by itself is for so many."""
        self.memory: dict[str, object] = {}
        """By name of a pool or of what is alone, what ``allocate`` returned."""
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
            raise PlanError(f"{phase} after {self.phase}", hint=f"it comes after {before}")

    # ---- what may be reused

    @property
    def states(self) -> list[StateHandler]:
        """What is the same for all prefixes of one length: states and convolution states."""
        return [one for one in self.resources if isinstance(one, StateHandler)]

    @property
    def no_reuse(self) -> str:
        """Why blocks are not reused by later requests, once they are grouped; empty if they are."""
        apart = {one.name for one in self.alone}
        for one in self.resources:
            if one.kind == "alone" or one.name in apart:
                return f"{one.name} is not paged"
            if one.kind == "state" and not self.checkpoint_tokens:
                return f"{one.name} is not paged and no checkpoints are kept"
        return ""

    @property
    def partial(self) -> bool:
        """Whether the beginning of a block may be copied: not where a state depends on its end."""
        return not self.no_reuse and not self.states

    # ---- the phases

    def adapt(self, *, dtype: str = "auto", windows: Sequence[int] = ()) -> CachePlan:
        """Have layers keep another type, with scales if it has 8 bits, or see fewer tokens.

        Before ``check``; see ``adapted``.
        """
        if self.phase != "collect":
            raise PlanError(f"adapt after {self.phase}", hint="it comes before check")
        self.resources = tuple(adapted(self.resources, dtype=dtype, windows=windows))
        return self

    def check(self) -> CachePlan:
        """Raise PlanError where resources contradict each other."""
        self._enter("check")
        names = [one.name for one in self.resources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or not names:
            raise PlanError(f"{twice!r} twice" if names else "no resources", path="resources")
        others = {one.name: one for one in self.resources}
        for one in self.resources:
            require(one.name, one.dtype, *one.shape_of(1))
            if one.kind == "paged" and not isinstance(one, Layer | Side):
                what = f"{type(one).__name__} is paged and no Layer"
                raise PlanError(what, path=one.name, hint="derive it from Layer, or from Side")
            one.check(others)
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
        """Decide what is pooled, and with what, and where it lies in a block."""
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
        """Pool equal states, and the convolutions that fit their heads and are equal to each other.

        Others are allocated by themselves.
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
            why = f"its shape or type is not that of {other.name}: {_like(conv)}, {_like(other)}"
        else:
            why = f"conv_dim {conv.conv_dim} is not head_dim x heads + 2 x n x d_state of any state"
        self._leave_alone(conv, why)

    def _pool(
        self,
        group: Group,
        members: Sequence[str],
        parts: Sequence[tuple[str, tuple[int, ...], str]],
    ) -> None:
        """A pool whose blocks hold these parts: the widest elements first, so that all align."""
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
        """Each pool's group and the bytes of its block, as ``divide`` takes them."""
        return [(pool.group, pool.block_bytes) for pool in self.pools]

    @property
    def alone_bytes(self) -> int:
        """Of what is allocated by itself, for one sequence."""
        return sum(one.bytes for one in self.alone)

    @property
    def pooled_bytes(self) -> int:
        """Of the blocks that one sequence of ``max_tokens`` holds at most."""
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
            Bytes: all of them for the cache, or of them ``fraction``, once a forward pass has what
            it takes at its peak.
        sequences:
            How many run at a time, for what is allocated by itself; None for as many as fit.
        shares:
            What each pool gets, in proportion, instead of what a sequence needs of it.
        rebalance:
            Whether pools share one memory, of which regions go from one to another; of a single
            pool nothing does.

        Raises
        ------
        PlanError
            A number is out of its range, or not one sequence fits, or memory cannot be shared.
        """
        self._enter("size")
        self._rebalance = rebalance and len(self.pools) > 1
        kinds = sorted({place.dtype for pool in self.pools for place in pool.places})
        if self._rebalance and len(kinds) > 1:  # what one left is no number of another's
            what = f"pools hold {', '.join(kinds)}"
            raise PlanError(what, path="gpu.rebalance", hint="false, or layers of one type alone")
        self._wanted = None if sequences is None else whole(sequences, "sequences")
        self._free, self._fraction, self._shares = whole(free), fraction, shares
        self._max_tokens = None if max_tokens is None else whole(max_tokens)
        if self._wanted is not None and self._wanted < 1:
            raise PlanError(f"{self._wanted} sequences", path="sequences", hint="1 or more")
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
                f"{self._free} bytes, of which {self.sequences} sequences take {other} apart from"
                f" the pools and a forward pass {peak}",
                hint=f"more than {other + peak}, or fewer sequences",
            )
        self.division = (
            divide(self.pairs, memory, context=self.max_tokens, step=self.step, shares=self._shares)
            if self.pools
            else None
        )
        if self.division is not None and self._rebalance:
            self.division = in_regions(self.division)

    def _fitting(self, peak: int) -> int:
        """Sequences that fit at the same time, 1 at least."""
        part = 1 if self._fraction is None else self._fraction
        one = self.pooled_bytes + part * self.alone_bytes
        return max(1, int(part * (self._free - peak) // one)) if one else 1

    def allocate(self, allocate: Allocate, *, least: bool = False) -> CachePlan:
        """Have every pool, and what is by itself, allocated.

        With ``least`` for one sequence only: a forward pass is measured over it, then ``resize``.
        """
        self._enter("allocate")
        self._allocate = allocate
        self._make(least=least)
        self.phase = "allocate"
        return self

    def _make(self, *, least: bool = False) -> None:
        assert self._allocate is not None
        self.memory.clear()  # first, so that there is room for what comes
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
        """A forward pass was measured to take ``peak`` bytes at most: divide and allocate anew."""
        self._enter("resize")
        self._divide(whole(peak))
        self._make()
        self.phase = "resize"
        return self

    @property
    def described(self) -> str:
        """Its pools, what is alone, and how memory is divided."""
        lines = [f"plan of {len(self.resources)} resources, after phase {self.phase}"]
        lines += [f"  together: {', '.join(names)}" for names in self.pooled]
        for pool in self.pools:
            group, members = pool.group, ", ".join(place.name for place in pool.places)
            lines.append(f"  pool {group.name}: {pool.block_bytes} bytes a block, for {members}")
        lines += [
            f"  alone {one.name}: {one.bytes} bytes a sequence ({one.why})" for one in self.alone
        ]
        if self.division is not None:
            lines += [f"  {line}" for line in str(self.division).splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        why = self.no_reuse
        off = "on" if self.partial else "off" + (", states end a block" if self.states else "")
        reuse = f"  reuse of blocks: {f'off, {why}' if why else 'on'}"
        return "\n".join([self.described, reuse, f"  partial copies: {off}"])


def _like(one: StateHandler) -> str:
    return f"{'x'.join(map(str, one.shape_of(1)))} {one.dtype}"


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 2
