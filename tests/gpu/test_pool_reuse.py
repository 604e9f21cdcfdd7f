"""Cases U: what a prompt is served, and what is kept of it."""

from __future__ import annotations

import pytest

from tests.gpu.engine import Engine

COPYING = pytest.mark.parametrize("partial", ["off", "take", "copy"])


def test_u1_what_is_stored_on_release() -> None:
    engine = Engine(8)
    sequence = engine.begin(range(9))
    assert (sequence.cached, len(sequence.table), engine.pool.used) == (0, 3, 3)
    engine.generate(sequence, [9, 10])
    assert len(sequence.table) == 3
    engine.release(sequence)
    assert engine.pool.free == 8
    stored = [tokens for event in engine.pool.snapshot() for _, tokens, _ in map(block, event.blocks)]
    assert stored == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def block(stored):
    return stored.key, stored.tokens, stored.priority
