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


class Beams:
    """How much of what beams wrote is the same, so that a beam takes over only what differs.

    For beam search over buffers that grow in place, one per beam. An attention kernel reads a
    beam's history in one piece, so each buffer holds a whole one; when beams are reordered, what
    the new parent and the buffer have in common is there already: the prompt, and all up to where
    the two parted.

    Parameters
    ----------
    beams:
        Buffers, as many as there are beams. What they hold at first has nothing in common.
    """

    def __init__(self, beams: int) -> None:
        if beams < 1:
            raise PlanError(f"{beams} beams", hint="1 or more")
        self._alike = [[0] * beams for _ in range(beams)]
        """How many leading tokens are the same, for each pair of different beams."""

    def __len__(self) -> int:
        return len(self._alike)

    @property
    def shared(self) -> int:
        """How many leading tokens all buffers have in common, as far as it is known."""
        return min(min(row) for row in self._alike)

    def crop(self, length: int) -> None:
        """All buffers hold at most so many tokens now."""
        self._alike = [[min(alike, length) for alike in row] for row in self._alike]

    def reorder(self, parents: Sequence[int], length: int) -> list[tuple[int, int, int]]:
        """Beam ``b`` goes on from what beam ``parents[b]`` has, ``length`` tokens.

        Returns copies ``(source, target, first)`` of the tokens from ``first`` on, to be made
        before the beams write on, all reads before any write.

        Raises
        ------
        PlanError
            There is not one parent per beam; nothing was changed.
        """
        beams, alike = len(self._alike), self._alike
        if len(parents) != beams or not all(0 <= parent < beams for parent in parents):
            raise PlanError(f"parents {list(parents)}", hint=f"{beams} of 0 .. {beams - 1}")
        copies = [
            (parent, beam, alike[beam][parent])
            for beam, parent in enumerate(parents)
            if parent != beam and alike[beam][parent] < length
        ]
        self._alike = [
            [length if one == other else alike[one][other] for other in parents] for one in parents
        ]
        return copies
