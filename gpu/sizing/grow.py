"""Caches that grow in place: capacity and length apart, and layers that do not grow all at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.errors import PlanError

STEP = 128
STAGGER = 64
"""Growth steps of layers differ by less than this many tokens."""


def growth_step(layer: int, *, step: int = STEP, stagger: int = STAGGER) -> int:
    """By how many tokens the buffer of a layer grows: ``step + layer mod stagger``.

    With steps of one size all layers copy their caches in the same step of generation. With these
    at most three of 32 do in any of the first 4095 steps.

    Raises
    ------
    PlanError
        A number is out of its range.
    """
    if layer < 0 or step < 1 or stagger < 1:
        raise PlanError(f"layer {layer}, step {step}, stagger {stagger}", hint="0, 1, 1 or more")
    return step + layer % stagger


class Growing:
    """Length and capacity of one buffer, in tokens; the caller keeps the memory itself.

    Parameters
    ----------
    step:
        It grows by multiples of so many tokens.
    length:
        Tokens that are in it at first.
    """

    __slots__ = ("capacity", "length", "step")

    def __init__(self, step: int = STEP, *, length: int = 0) -> None:
        if step < 1 or length < 0:
            raise PlanError(f"step {step}, length {length}", hint="1 or more, 0 or more")
        self.step = step
        self.length = 0
        self.capacity = 0
        self.append(length)

    @property
    def spare(self) -> int:
        """Tokens that can come before it grows."""
        return self.capacity - self.length

    def append(self, tokens: int) -> bool:
        """So many tokens more; whether the memory must be made ``capacity`` tokens long first."""
        if tokens < 0:
            raise PlanError(f"{tokens} tokens", hint="0 or more")
        self.length += tokens
        if self.length <= self.capacity:
            return False
        self.capacity = -(-self.length // self.step) * self.step
        return True

    def rewind(self, tokens: int) -> None:
        """So many tokens less; the capacity stays."""
        if not 0 <= tokens <= self.length:
            raise PlanError(f"{tokens} tokens", hint=f"0 .. {self.length}")
        self.length -= tokens


class BeamTable:
    """Which buffer holds which block of each beam, so that beams are reordered without a copy.

    For beam search over buffers that grow in place, one per beam: entry ``[beam][block]`` is the
    buffer whose ``block``-th block of tokens is that beam's. A new parent copies the table's row,
    and of the tokens only those of the last block that it writes on in.

    Parameters
    ----------
    beams:
        Buffers, as many as there are beams.
    block_tokens:
        Tokens that are told apart at a time.
    """

    def __init__(self, beams: int, block_tokens: int) -> None:
        if beams < 1 or block_tokens < 1:
            raise PlanError(f"{beams} beams, blocks of {block_tokens} tokens", hint="1 or more")
        self.block_tokens = block_tokens
        self.length = 0
        self.rows: list[list[int]] = [[] for _ in range(beams)]

    def append(self, tokens: int = 1) -> None:
        """Every beam writes so many tokens more, each to its own buffer."""
        if tokens < 0:
            raise PlanError(f"{tokens} tokens", hint="0 or more")
        self.length += tokens
        blocks = -(-self.length // self.block_tokens)
        for beam, row in enumerate(self.rows):
            row.extend([beam] * (blocks - len(row)))

    def reorder(self, parents: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Beam ``b`` goes on from what beam ``parents[b]`` has so far.

        Returns copies ``(source buffer, target buffer, first token, end)`` to be made before the
        beams write on, all reads before any write: the last block, where it is cut short and
        another's. What a buffer holds and some beam still reads is not written over, since a
        beam's buffer is written at the end of the sequence alone.

        Raises
        ------
        PlanError
            There is not one parent per beam; nothing was changed.
        """
        beams = len(self.rows)
        if len(parents) != beams or not all(0 <= parent < beams for parent in parents):
            raise PlanError(f"parents {list(parents)}", hint=f"{beams} of 0 .. {beams - 1}")
        self.rows = [self.rows[parent][:] for parent in parents]
        first = self.length // self.block_tokens * self.block_tokens
        if first == self.length:
            return []
        copies: list[tuple[int, int, int, int]] = []
        for beam, row in enumerate(self.rows):
            if row[-1] != beam:
                copies.append((row[-1], beam, first, self.length))
                row[-1] = beam
        return copies
