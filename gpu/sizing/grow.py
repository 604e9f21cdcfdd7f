"""Bookkeeping for caches that grow in place, with layers that grow at different times."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.errors import PlanError

STEP = 128
STAGGER = 64
"""Growth steps of layers differ by fewer than this many tokens."""


def growth_step(layer: int, *, step: int = STEP, stagger: int = STAGGER) -> int:
    """Return the growth step of a layer's buffer in tokens: ``step + layer mod stagger``.

    With equal steps, all layers would copy their caches in the same step of generation. With these,
    at most three of 32 layers do in any of the first 4095 steps.

    Raises
    ------
    PlanError
        A number is out of its range.
    """
    if layer < 0 or step < 1 or stagger < 1:
        hint = "expected a layer of 0 or more, a step and a stagger of 1 or more"
        raise PlanError(f"layer {layer}, step {step}, stagger {stagger}", hint=hint)
    return step + layer % stagger


class Growing:
    """Length and capacity of one buffer, in tokens; the caller keeps the memory itself.

    Parameters
    ----------
    step:
        The capacity is a multiple of this many tokens.
    length:
        Tokens in it at first.
    """

    __slots__ = ("capacity", "length", "step")

    def __init__(self, step: int = STEP, *, length: int = 0) -> None:
        if step < 1 or length < 0:
            hint = "expected a step of 1 or more, a length of 0 or more"
            raise PlanError(f"step {step}, length {length}", hint=hint)
        self.step = step
        self.length = 0
        self.capacity = 0
        self.append(length)

    @property
    def spare(self) -> int:
        """Number of tokens that fit before it must grow."""
        return self.capacity - self.length

    def append(self, tokens: int) -> bool:
        """Add tokens; return whether the caller must first grow the memory to ``capacity``."""
        if tokens < 0:
            raise PlanError(f"{tokens} tokens", hint="expected 0 or more")
        self.length += tokens
        if self.length <= self.capacity:
            return False
        self.capacity = -(-self.length // self.step) * self.step
        return True

    def rewind(self, tokens: int) -> None:
        """Remove tokens; the capacity stays."""
        if not 0 <= tokens <= self.length:
            raise PlanError(f"{tokens} tokens", hint=f"expected 0 .. {self.length}")
        self.length -= tokens


class Beams:
    """Tracks how many leading tokens beams have in common, so that reordering copies only the rest.

    For beam search over buffers that grow in place, one per beam. An attention kernel reads a
    beam's history as one piece, so each buffer holds a whole history. When beams are reordered, the
    buffer already holds the tokens that it has in common with the new parent: the prompt, and all
    tokens up to where the two parted.

    Parameters
    ----------
    beams:
        Number of beams, and of buffers. At first their contents have nothing in common.
    """

    def __init__(self, beams: int) -> None:
        if beams < 1:
            raise PlanError(f"{beams} beams", hint="expected 1 or more")
        self._alike = [[0] * beams for _ in range(beams)]
        """Number of equal leading tokens of each pair of different beams."""

    def __len__(self) -> int:
        return len(self._alike)

    @property
    def shared(self) -> int:
        """Number of leading tokens that all buffers are known to have in common."""
        return min(min(row) for row in self._alike)

    def crop(self, length: int) -> None:
        """Note that all buffers now hold at most ``length`` tokens."""
        self._alike = [[min(alike, length) for alike in row] for row in self._alike]

    def reorder(self, parents: Sequence[int], length: int) -> list[tuple[int, int, int]]:
        """Let beam ``b`` continue from the ``length`` tokens of beam ``parents[b]``.

        Return copies ``(source, target, first)`` of the tokens from ``first`` on. The caller makes
        them before the beams write more tokens, all reads before any write.

        Raises
        ------
        PlanError
            There is not one valid parent per beam; nothing was changed.
        """
        beams, alike = len(self._alike), self._alike
        if len(parents) != beams or not all(0 <= parent < beams for parent in parents):
            hint = f"expected {beams} numbers, each 0 .. {beams - 1}"
            raise PlanError(f"parents {list(parents)}", hint=hint)
        copies = [
            (parent, beam, alike[beam][parent])
            for beam, parent in enumerate(parents)
            if parent != beam and alike[beam][parent] < length
        ]
        self._alike = [
            [length if one == other else alike[one][other] for other in parents] for one in parents
        ]
        return copies
