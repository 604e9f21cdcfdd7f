"""Stacks that change at random times, under requests, removals, faults and restarts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tests.kit.changing import ChangingWorld
from tests.kit.knobs import Kind, Knobs
from tests.kit.soak import STEPS, WEIGHTS, drawn_steps, further_weights, take_steps

STEPS_PER_WORLD = 120
WORLDS = int(os.environ.get("KVLADDER_CHANGES", "12"))
"""Worlds of each kind; a night's run takes thousands."""


def run_world(seed: int, kind: Kind) -> ChangingWorld:
    random = Random(seed)
    world = ChangingWorld(Knobs.draw(random).of(kind), seed)
    weights = [*WEIGHTS, *further_weights(kind, sets=5, pauses=0), 12]

    def draw() -> Callable[[], None]:
        kinds = [*STEPS.get(kind, drawn_steps)(world, random), world.change]
        return random.choices(kinds, weights)[0]

    take_steps(world, seed, STEPS_PER_WORLD, draw)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shared", "tenants"])
def test_worlds_with_changing_stacks(kind: Kind) -> None:
    worlds = [run_world(seed, kind) for seed in range(70_000, 70_000 + WORLDS)]
    served = sum((world.served for world in worlds), start=worlds[0].served)
    assert {"host", "level1", "more1"} <= served.keys()
    lines = [line.split(" change: ")[-1] for world in worlds for line in world.trace]
    done = Counter(line.split()[0] for line in lines if line)
    assert all(done[what] > WORLDS // 10 for what in ("attach", "detach", "tune", "host"))
