"""How much KV cache takes, and how much fits: exact numbers for plans, pools and people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm, prod

from kvladder.errors import PlanError
from kvladder.gpu.requests.groups import Group
from kvladder.policy.numbers import whole

REGIONS = 64
"""About so many regions the memory has that goes from one pool to another."""
REGIONS_MIN = 8
"""With fewer the smallest step would be a large part of a pool."""


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name}: {number}", hint="expected 1 or more")


def kv_bytes_per_token(
    layers: int, heads: int, head_dim: int, itemsize: int, *, factor: int = 2
) -> int:
    """Bytes of one token's KV in so many equal layers.

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
    """Blocks that ``tokens`` tokens take, the last of which may be cut short."""
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
    """Bytes for paged KV: the smaller of ``max_tokens`` and a fraction of what is left over.

    Parameters
    ----------
    free:
        Bytes of device memory that nobody uses once the weights are loaded.
    fraction:
        Of what is left; more than 0, less than 1.
    other:
        Bytes of caches that are not paged.
    peak:
        Bytes that a forward pass takes at most, measured or estimated.
    max_tokens, token_bytes:
        A bound in tokens of ``token_bytes`` bytes; None for none.

    Raises
    ------
    PlanError
        A number is out of its range, or nothing is left.
    """
    if not 0 < fraction < 1:
        raise PlanError(str(fraction), path="gpu.fraction", hint="more than 0, less than 1")
    free, other, peak, token_bytes = whole(free), whole(other), whole(peak), whole(token_bytes)
    left = int(fraction * (free - other - peak))
    if left < 1:
        raise PlanError(f"{free} bytes free, {other} for other caches, {peak} for the forward pass")
    if max_tokens is None:
        return left
    max_tokens = whole(max_tokens, "max_tokens")
    _positive(max_tokens=max_tokens, token_bytes=token_bytes)
    return min(left, max_tokens * token_bytes)


@dataclass(frozen=True)
class PoolShare:
    """What one group gets of the memory."""

    group: Group
    block_bytes: int
    """Of a block in all layers of the group."""
    needed: int
    """Blocks that one sequence holds of it at most."""
    blocks: int


@dataclass(frozen=True)
class Division:
    """How memory is divided among the pools of a model.

    The rule: every group gets as many sequences' worth of blocks as every other, where a sequence
    has ``context`` tokens, of which ``step`` are computed at a time. Explicit shares replace it.
    """

    memory: int
    context: int
    step: int
    shares: tuple[PoolShare, ...]
    explicit: bool
    region_bytes: int = 0
    """Memory goes from one pool to another in regions of so many bytes; 0: it stays."""
    regions: int = 0
    """How many there are in all: those of the first pool come first."""

    @property
    def sequences(self) -> int:
        """Sequences of ``context`` tokens that fit at the same time."""
        return min(share.blocks // share.needed for share in self.shares)

    def places(self, share: PoolShare) -> int:
        """Slots that a pool may ever have: those in regions of others included."""
        return self.regions * self.region_bytes // share.block_bytes or share.blocks

    def firsts(self) -> list[int]:
        """By pool, the number of its first slot."""
        if not self.regions:
            return [0] * len(self.shares)
        ends = accumulate((share.blocks * share.block_bytes for share in self.shares), initial=0)
        return [end // share.block_bytes for end, share in zip(ends, self.shares, strict=False)]

    def __str__(self) -> str:
        rule = "by explicit shares" if self.explicit else "the same number of sequences in each"
        fit = f"{self.sequences} sequences of {self.context} tokens"
        lines = [f"{self.memory} bytes, pools: {len(self.shares)}, {rule}; {fit}"]
        for share in self.shares:
            group = share.group
            kind = f"window {group.window}" if group.kind == "window" else group.kind
            lines.append(
                f"  {group.name} ({kind}): {share.blocks} blocks of {group.block_tokens} tokens,"
                f" {share.block_bytes} bytes each; a sequence holds {share.needed}"
            )
        if self.regions:
            lines.append(
                f"  {self.regions} regions of {self.region_bytes} bytes, rebalanced by use"
            )
        return "\n".join(lines)


def needed(group: Group, context: int, step: int) -> int:
    """Blocks of a group that one sequence of ``context`` tokens holds at most.

    ``step`` is how many tokens are computed at a time; a window keeps one block more than it
    reads, and the one that is being filled.
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
    """Divide ``memory`` bytes among pools; ``groups`` are pairs of a group and its block's bytes.

    Parameters
    ----------
    context:
        Tokens of the longest sequence.
    step:
        Tokens computed at a time; None for all of a prompt at once.
    shares:
        What each group gets instead, in proportion to their sum.

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
    # Each group gets what its share of a sequence is, or what explicit shares say.
    need = [needed(group, context, step) for group, _ in groups]
    if shares and (len(shares) != len(groups) or min(shares) <= 0):
        hint = f"one number above 0 for each of {', '.join(group.name for group, _ in groups)}"
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
        raise PlanError(what, hint=f"{sum(bytes_each)} bytes do, or fewer tokens at a time")
    return found


def in_regions(division: Division) -> Division:
    """The same, rounded to regions that hold whole blocks of every pool.

    Raises
    ------
    PlanError
        There are too few of them: blocks differ too much in size, or one sequence does not fit.
    """
    shares, memory = division.shares, division.memory
    size = lcm(*(share.block_bytes for share in shares))
    size *= max(1, memory // (REGIONS * size))
    count = memory // size
    least = [-(-share.needed * share.block_bytes // size) for share in shares]
    if count < REGIONS_MIN or sum(least) > count:
        what = (
            f"{memory} bytes are {count} regions of {size} bytes, and a sequence needs {sum(least)}"
        )
        hint = f"{REGIONS_MIN} or more, so that memory can go from pool to pool, or leave it out"
        raise PlanError(what, path="gpu.rebalance", hint=hint)
    # Each pool gets what it had, in whole regions; what is over goes where it changes least.
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
