"""Runs simulated worlds one after the other: ``python -m tests.kit.soak --steps 100000``.

Each world has a seed of its own, which alone decides everything that happens in it. When one
fails, its seed, its knobs and its last steps are printed; ``--seed S --steps 1`` runs it again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import get_args

from tests.kit.knobs import PRIORITIES, Kind, Knobs
from tests.kit.wishes import NO_WISHES, Wishes
from tests.kit.world import World

STEPS_PER_WORLD = 200
TRACE_LINES = 30


def drawn_steps(world: World, random: Random) -> list[Callable[[], None]]:
    """One of each kind of step, with random arguments; those that are drawn rarely, once."""
    number, length, level = random.randrange(16), random.randrange(1, 7), random.randrange(3)
    priority = random.choice((None, *PRIORITIES))
    duration_s = random.choice((None, None, 2.0))
    return [
        lambda: world.begin(number, length, priority, duration_s),
        lambda: world.advance(random.choice((0.0, 0.0, 0.001, 0.01, 0.1, 1.0, 10.0))),
        lambda: world.touch(number, length),
        lambda: world.cancel(number),
        lambda: world.remove(number, length),
        lambda: world.trouble(level, number),
        lambda: world.heal(level),
        lambda: world.damage(level, lose=number % 2 == 0),
        lambda: world.forget(number),
        world.clear,
        lambda: world.reopen(crash=number % 2 == 0),
        lambda: world.others(number, length),
        lambda: world.gather([number, length]),
        lambda: world.pause(random.choice((0.5, 3.0, 20.0))),
    ]


WEIGHTS = (30, 60, 3, 2, 2, 3, 6, 1, 1, 0.3, 0.7)
OTHERS_WEIGHT = 10
SETS_WEIGHT = 20
PAUSES_WEIGHT = 10


def further_weights(kind: Kind, *, sets: float, pauses: float) -> list[float]:
    """Return the weights of the steps that ``WEIGHTS`` does not have, in their order."""
    return [OTHERS_WEIGHT if kind == "shared" else 0, sets, pauses]


def wishing_steps(world: World, random: Random) -> list[Callable[[], None]]:
    """The same where requests have wishes, and a salt may be purged."""
    steps = drawn_steps(world, random)
    number, length, priority = (
        random.randrange(16),
        random.randrange(1, 7),
        random.choice(PRIORITIES),
    )
    wishes = Wishes.draw(random)
    steps[0] = lambda: world.begin(number, length, priority, None, wishes)
    if random.random() < 0.3:
        steps[4] = world.purge
    return steps


def tenants_steps(world: World, random: Random) -> list[Callable[[], None]]:
    """The same where some requests belong to sessions, which end."""
    steps = drawn_steps(world, random)
    number, length = random.randrange(16), random.randrange(1, 7)
    priority, duration_s = random.choice((None, None, *PRIORITIES)), random.choice((None, 2.0))
    session = random.choice((None, 0, 1, 2))
    steps[0] = lambda: world.begin(number, length, priority, duration_s, NO_WISHES, session)
    if random.random() < 0.3:
        steps[2] = lambda: world.end_session(number % 3)
    return steps


STEPS = {"wishing": wishing_steps, "tenants": tenants_steps}


def run_world(
    seed: int,
    steps: int = STEPS_PER_WORLD,
    *,
    kind: Kind = "plain",
    sets: bool = False,
    pauses: bool = False,
) -> World:
    """Run the world of this seed, which determines its steps and their frequencies.

    With ``sets``, others fetch sets of its blocks, too. With ``pauses``, its process stands still
    now and then.
    """
    random = Random(seed)
    knobs = Knobs.draw(random).of(kind)
    weights = [weight * random.choice((0, 1, 1, 3)) for weight in WEIGHTS]
    weights[:2] = WEIGHTS[:2]
    weights += further_weights(kind, sets=SETS_WEIGHT * sets, pauses=PAUSES_WEIGHT * pauses)
    if kind == "tenants":
        weights[2] = 10
    world = World(knobs, seed)

    def draw() -> Callable[[], None]:
        return random.choices(STEPS.get(kind, drawn_steps)(world, random), weights)[0]

    take_steps(world, seed, steps, draw)
    return world


def take_steps(world: World, seed: int, steps: int, draw: Callable[[], Callable[[], None]]) -> None:
    """Take drawn steps and check after each; a failure is told with the seed and the last steps."""
    try:
        for _ in range(steps):
            draw()()
            world.check()
            world.poll()
            world.check()
        world.end()
    except BaseException as error:
        last = "\n  ".join(world.trace[-TRACE_LINES:])
        error.add_note(f"seed {seed}\n{world.knobs}\n  {last}")
        with suppress(Exception):
            world.dispose()
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run worlds until the steps are used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="in all worlds together")
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    kinds = get_args(Kind)
    parser.add_argument("--kind", choices=kinds, default="plain", help="what the levels are like")
    options = parser.parse_args(arguments)
    served: Counter[str] = Counter()
    worlds = max(1, options.steps // STEPS_PER_WORLD)
    for number in range(worlds):
        seed = options.seed + number
        try:
            world = run_world(seed, kind=options.kind)
        except BaseException:
            again = f"--steps 1 --seed {seed} --kind {options.kind}"
            print(f"failed: python -m tests.kit.soak {again}")
            raise
        served += world.served
        if number % 50 == 49 or number == worlds - 1:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(served.items()))
            print(f"{number + 1}/{worlds} worlds, to seed {seed}; blocks served: {counts}")
    return 0


if __name__ == "__main__":
    logging.getLogger("kvladder").setLevel(logging.ERROR)  # it warns of every fault
    sys.exit(main())
