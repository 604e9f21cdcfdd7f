"""Sizes of KV caches, and the division of memory: exact numbers for plans, pools and people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm, prod

from kvladder.errors import PlanError
from kvladder.gpu.sizing.groups import Group
from kvladder.policy.numbers import whole
from kvladder.units import Size, counted

REGIONS = 64
"""Approximate number of regions of memory that can move from one pool to another."""
REGIONS_MIN = 8
"""Smallest number of regions; with fewer, one region would be a large part of a pool."""


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name}: {number}", hint="expected 1 or more")


def kv_bytes_per_token(
    layers: int, heads: int, head_dim: int, itemsize: int, *, factor: int = 2
) -> int:
    """Return the bytes of one token's KV in ``layers`` equal layers.

    ``factor`` is 2 for keys and values, 1 for one latent vector of ``head_dim`` elements (MLA).

    Raises
    ------
    PlanError
        A number is 0 or less.
    """
    numbers = {"layers": layers, "heads": heads, "head_dim": head_dim, "itemsize": itemsize}
    numbers = {name: whole(one, name) for name, one in {**numbers, "factor": factor}.items()}
    _positive(**numbers)
    return prod(numbers.values())


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks for ``tokens`` tokens; the last may be partly filled."""
    tokens, block_tokens = whole(tokens, "tokens"), whole(block_tokens, "block_tokens")
    _positive(block_tokens=block_tokens)
    if tokens < 0:
        raise PlanError(f"tokens: {tokens}", hint="expected 0 or more")
    return -(-tokens // block_tokens)


def pool_bytes(
    *,
    free: int,
    fraction: float,
    other: int = 0,
    peak: int = 0,
    max_tokens: int | None = None,
    token_bytes: int = 1,
) -> int:
    """Return the bytes for paged KV: a fraction of the remaining memory, at most ``max_tokens``.

    Parameters
    ----------
    free:
        Bytes of device memory that are free once the weights are loaded.
    fraction:
        Share of ``free - other - peak``; more than 0, less than 1.
    other:
        Bytes of caches that are not paged.
    peak:
        Bytes that a forward pass needs at most, measured or estimated.
    max_tokens, token_bytes:
        Upper bound in tokens of ``token_bytes`` bytes; None for no bound.

    Raises
    ------
    PlanError
        A number is out of its range, or no memory is left.
    """
    if not 0 < fraction < 1:
        raise PlanError(
            str(fraction), path="gpu.fraction", hint="expected more than 0 and less than 1"
        )
    free, other, peak, token_bytes = whole(free), whole(other), whole(peak), whole(token_bytes)
    left = int(fraction * (free - other - peak))
    if left < 1:
        what = f"{free} bytes free, {other} for other caches, {peak} for the forward pass"
        raise PlanError(what, hint="expected memory to be left for the pools")
    if max_tokens is None:
        return left
    max_tokens = whole(max_tokens, "max_tokens")
    _positive(max_tokens=max_tokens, token_bytes=token_bytes)
    return min(left, max_tokens * token_bytes)


@dataclass(frozen=True)
class PoolShare:
    """One group's share of the memory."""

    group: Group
    block_bytes: int
    """Bytes of a block in all layers of the group."""
    needed: int
    """Largest number of the group's blocks that one sequence holds."""
    blocks: int


@dataclass(frozen=True)
class Division:
    """Division of memory among the pools of a model.

    The rule: all groups get blocks for the same number of sequences. A sequence has ``context``
    tokens and computes ``step`` of them at a time. Explicit shares replace this rule.
    """

    memory: int
    context: int
    step: int
    shares: tuple[PoolShare, ...]
    explicit: bool
    region_bytes: int = 0
    """Bytes of the regions that can move from one pool to another; 0 if memory does not move."""
    regions: int = 0
    """Number of regions of all pools; those of the first pool come first."""

    @property
    def sequences(self) -> int:
        """Number of sequences of ``context`` tokens that fit at the same time."""
        return min(share.blocks // share.needed for share in self.shares)

    def places(self, share: PoolShare) -> int:
        """Return how many slots a pool may ever have, including those in other pools' regions."""
        return self.regions * self.region_bytes // share.block_bytes or share.blocks

    def firsts(self) -> list[int]:
        """Return the number of each pool's first slot."""
        if not self.regions:
            return [0] * len(self.shares)
        ends = accumulate((share.blocks * share.block_bytes for share in self.shares), initial=0)
        return [end // share.block_bytes for end, share in zip(ends, self.shares, strict=False)]

    def __str__(self) -> str:
        rule = "by explicit shares" if self.explicit else "the same number of sequences in each"
        fit = f"{counted(self.sequences, 'sequence')} of {counted(self.context, 'token')}"
        lines = [f"{Size(self.memory).brief()}, pools: {len(self.shares)}, {rule}; {fit}"]
        for share in self.shares:
            group = share.group
            kind = f"window {group.window}" if group.kind == "window" else group.kind
            lines.append(
                f"  {group.name} ({kind}): {counted(share.blocks, 'block')} of"
                f" {counted(group.block_tokens, 'token')},"
                f" {Size(share.block_bytes).brief()} each; a sequence holds {share.needed}"
            )
        if self.regions:
            lines.append(
                f"  {counted(self.regions, 'region')} of {Size(self.region_bytes).brief()},"
                " rebalanced by use"
            )
        return "\n".join(lines)


def needed(group: Group, context: int, step: int) -> int:
    """Return the largest number of a group's blocks that a sequence of ``context`` tokens holds.

    ``step`` is the number of tokens computed at a time. A window keeps the blocks that it reads,
    one more, and the block that is being filled.
    """
    whole = blocks_of(context, group.block_tokens)
    if group.kind == "full":
        return whole
    back = 1 if group.kind == "state" else group.window - 1
    return min(whole, blocks_of(back + group.block_tokens + step - 1, group.block_tokens) + 1)


def divide(
    groups: Sequence[tuple[Group, int]],
    memory: int,
    *,
    context: int,
    step: int | None = None,
    shares: Sequence[float] = (),
) -> Division:
    """Divide ``memory`` bytes among pools; ``groups`` are pairs of a group and its block size.

    Parameters
    ----------
    context:
        Tokens of the longest sequence.
    step:
        Tokens computed at a time; None for a whole prompt at once.
    shares:
        Explicit shares of the groups, in proportion to their sum.

    Raises
    ------
    PlanError
        A number is out of its range, or not even one sequence fits.
    """
    memory, context = whole(memory, "memory"), whole(context, "context")
    step = context if step is None else min(whole(step, "step"), context)
    groups = [(group, whole(size, f"bytes of {group.name}")) for group, size in groups]
    _positive(memory=memory, context=context, step=step, groups=len(groups))
    _positive(**{f"bytes of {group.name}": size for group, size in groups})
    # Each group gets memory in proportion to its part of a sequence, or to the explicit shares.
    need = [needed(group, context, step) for group, _ in groups]
    if shares and (len(shares) != len(groups) or min(shares) <= 0):
        names = ", ".join(group.name for group, _ in groups)
        hint = f"expected one number above 0 for each of {names}"
        raise PlanError(", ".join(map(str, shares)), path="gpu.shares", hint=hint)
    bytes_each = [size * blocks for (_, size), blocks in zip(groups, need, strict=True)]
    total = sum(shares) or sum(bytes_each)
    blocks = [
        int(memory * part // total) // size
        for part, (_, size) in zip(shares or bytes_each, groups, strict=True)
    ]
    found = Division(
        memory,
        context,
        step,
        tuple(
            PoolShare(group, size, held, count)
            for (group, size), held, count in zip(groups, need, blocks, strict=True)
        ),
        explicit=bool(shares),
    )
    if found.sequences < 1:
        what = f"{memory} bytes do not hold one sequence of {context} tokens"
        raise PlanError(
            what, hint=f"expected at least {sum(bytes_each)} bytes, or fewer tokens at a time"
        )
    return found


def in_regions(division: Division) -> Division:
    """Return the division rounded to regions that hold whole blocks of every pool.

    Raises
    ------
    PlanError
        There are too few regions: block sizes differ too much, or one sequence does not fit.
    """
    shares, memory = division.shares, division.memory
    size = lcm(*(share.block_bytes for share in shares))
    size *= max(1, memory // (REGIONS * size))
    count = memory // size
    least = [-(-share.needed * share.block_bytes // size) for share in shares]
    if count < REGIONS_MIN or sum(least) > count:
        what = f"{memory} bytes hold {count} regions of {size} bytes; a sequence needs {sum(least)}"
        hint = f"expected {REGIONS_MIN} regions or more and room for a sequence; or leave it out"
        raise PlanError(what, path="gpu.rebalance", hint=hint)
    # Each pool gets its share in whole regions, but enough for a sequence. Then single regions are
    # added or taken where that changes the shares least.
    wanted = [share.blocks * share.block_bytes / size for share in shares]
    got = [max(few, int(want)) for few, want in zip(least, wanted, strict=True)]
    at = range(len(got))
    while sum(got) > count:
        got[
            max((one for one in at if got[one] > least[one]), key=lambda a: got[a] - wanted[a])
        ] -= 1
    while sum(got) < count:
        got[max(at, key=lambda a: wanted[a] - got[a])] += 1
    return replace(
        division,
        shares=tuple(
            replace(share, blocks=regions * size // share.block_bytes)
            for share, regions in zip(shares, got, strict=True)
        ),
        region_bytes=size,
        regions=count,
    )
