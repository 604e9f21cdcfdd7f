"""Cases G: buffers that grow in place, and beams over them."""

from __future__ import annotations

import random

import pytest

from kvladder.errors import PlanError
from kvladder.gpu.sizing.grow import BeamTable, Growing, growth_step


def test_g1_capacity_and_length_are_two_things() -> None:
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
    """How many buffers grow in each step of generation."""
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
        lambda: BeamTable(0, 4),
        lambda: BeamTable(2, 0),
        lambda: BeamTable(2, 4).append(-1),
        lambda: BeamTable(2, 4).reorder([0]),
        lambda: BeamTable(2, 4).reorder([0, 2]),
    ):
        with pytest.raises(PlanError):
            call()
    assert (buffer.capacity, buffer.length) == (128, 5)


@pytest.mark.parametrize("block_tokens", [1, 3, 4])
def test_beams_read_their_own_history_whatever_their_parents(block_tokens: int) -> None:
    rng = random.Random(block_tokens)
    table = BeamTable(4, block_tokens)
    buffers: list[list[str]] = [[] for _ in range(4)]
    histories: list[list[str]] = [[] for _ in range(4)]
    copied = 0
    for step in range(200):
        table.append()
        for beam in range(4):
            token = f"{step}.{beam}"
            buffers[beam].append(token)
            histories[beam].append(token)
        parents = [rng.randrange(4) for _ in range(4)]
        histories = [histories[parent][:] for parent in parents]
        copies = table.reorder(parents)
        read = [buffers[source][first:end] for source, _, first, end in copies]
        for (_, target, first, end), tokens in zip(copies, read, strict=True):
            buffers[target][first:end] = tokens
            copied += end - first
        for beam, row in enumerate(table.rows):
            gathered = [buffers[row[at // block_tokens]][at] for at in range(step + 1)]
            assert gathered == histories[beam]
    assert copied <= 200 * 4 * (block_tokens - 1)  # never a whole block
