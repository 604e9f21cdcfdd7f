"""Cases G: buffers that grow in place, and beams over them."""

from __future__ import annotations

import random

import pytest

from kvladder.errors import PlanError
from kvladder.gpu.sizing.grow import Beams, Growing, growth_step


def test_g1_capacity_and_length_are_independent() -> None:
    buffer = Growing(128, length=17)
    assert (buffer.capacity, buffer.length, buffer.spare) == (128, 17, 111)
    assert not buffer.append(1)
    assert (buffer.capacity, buffer.length, buffer.spare) == (128, 18, 110)
    assert not buffer.append(110)
    assert buffer.append(1)
    assert (buffer.capacity, buffer.length) == (256, 129)
    buffer.rewind(100)
    assert (buffer.capacity, buffer.length) == (256, 29)
    assert buffer.append(1000)
    assert (buffer.capacity, buffer.length) == (1152, 1029)


def grown_at_once(steps: list[int], generated: int) -> list[int]:
    """Return how many buffers grow in each step of generation."""
    buffers = [Growing(step) for step in steps]
    return [sum(buffer.append(1) for buffer in buffers) for _ in range(generated)]


def test_g2_staggered_layers_do_not_grow_in_one_step() -> None:
    equal = grown_at_once([128] * 32, 4095)
    assert set(equal) == {0, 32}
    staggered = grown_at_once([growth_step(layer) for layer in range(32)], 4096)
    assert staggered[0] == 32  # the first token makes them all
    assert max(staggered[1:]) <= 3


def test_wrong_numbers_are_refused() -> None:
    buffer = Growing(128, length=5)
    for call in (
        lambda: Growing(0),
        lambda: Growing(1, length=-1),
        lambda: buffer.append(-1),
        lambda: buffer.rewind(6),
        lambda: buffer.rewind(-1),
        lambda: growth_step(-1),
        lambda: growth_step(0, step=0),
        lambda: Beams(0),
        lambda: Beams(2).reorder([0], 1),
        lambda: Beams(2).reorder([0, 2], 1),
    ):
        with pytest.raises(PlanError):
            call()
    assert (buffer.capacity, buffer.length) == (128, 5)


def test_beams_read_their_own_history_whatever_their_parents() -> None:
    rng = random.Random(1)
    beams = Beams(4)
    buffers: list[list[str]] = [[] for _ in range(4)]
    histories: list[list[str]] = [[] for _ in range(4)]
    copied = whole = 0
    for step in range(400):
        for beam in range(4):
            for held in (buffers[beam], histories[beam]):
                held.append(f"{step}.{beam}")
        if rng.random() < 0.1:  # a draft was wrong
            cut = rng.randrange(1, 4)
            for held in (*buffers, *histories):
                del held[-cut:]
            beams.crop(len(buffers[0]))
        length = len(buffers[0])
        parents = [rng.randrange(4) for _ in range(4)]
        histories = [histories[parent][:] for parent in parents]
        copies = beams.reorder(parents, length)
        read = [buffers[source][first:] for source, _, first in copies]
        for (_, target, first), tokens in zip(copies, read, strict=True):
            buffers[target][first:] = tokens
            copied += length - first
            whole += length
        assert buffers == histories
        assert len({tuple(history[: beams.shared]) for history in histories}) == 1
    assert copied < whole / 10  # equal rows stay
