"""Plans of a fleet's steps: drawn from a seed, run, and shrunk if they fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest import mock

from kvladder.tiers.nixl import pump
from tests.sim.fleet.faults import FAULTS
from tests.sim.fleet.fleet import STORES, Fleet, FleetKnobs

STEPS = 120
TRACE_LINES = 40
KEPT = Path(__file__).parents[1] / "kept.txt"
WORK = {
    "serve": (40,),
    "advance": (20, 40),
    "cancel": (1, 3, 9),
    "hint": (0, 5, 15),
    "end_session": (0, 2, 4),
    "purge": (0.5, 2, 8),
    "upgrade": (0.5, 1, 4),
    "new_weights": (0, 0.3, 1),
    "mend": (0, 6),
    "serve_alone": (0, 4),
    "purge_alone": (0.5, 2, 8),
}
"""How frequent the other steps are; each world has one of the numbers."""
DENSITIES = {"quiet": 0.05, "light": 0.15, "mixed": 0.3, "dense": 0.55, "storm": 0.85}
"""Share of the steps that are faults, by the name of the density."""
OFTEN = {"quiet": 1, "light": 1, "mixed": 2, "dense": 3, "storm": 3}
"""How many of ten worlds have each density: the dense ones cost the least per fault."""
FEW = 3
"""Most kinds of faults in a world of few kinds."""


class Step(NamedTuple):
    """One step, by the name of a fleet's method or of a fault; the numbers are its arguments."""

    name: str
    a: int
    b: int
    c: int
    seconds: float = 0.0

    def take(self, fleet: Fleet) -> None:
        """Take the step."""
        if self.name in FAULTS:
            fleet.fault(self.name, self.a, self.b, self.seconds)
        else:
            getattr(fleet, self.name)(self.a, self.b, self.c)


class Climate(NamedTuple):
    """How dense the faults of a world are, and how frequent each kind and each other step is."""

    density: str
    kinds: dict[str, int]
    work: dict[str, float]

    @classmethod
    def of(cls, seed: int) -> Climate:
        """Draw a seed's climate: a subset of the kinds that its fleet has targets for.

        A quarter of the seeds have two or three kinds, the others about half of all. Faults that
        never meet hide what two of them do, and so do those that other faults always precede.
        """
        knobs, random = FleetKnobs.draw(Random(seed)), Random(f"{seed} climate")
        absent = {*STORES} - {*knobs.stores}
        fit = [kind for kind in FAULTS if kind.partition(":")[0] not in absent]
        if random.random() < 0.25:
            some = random.sample(fit, random.randint(2, FEW))
            kinds = dict.fromkeys(some, 1)
        else:
            every = {kind: random.choice((0, 0, 1, 3)) for kind in fit}
            kinds = {kind: often for kind, often in every.items() if often}
        (density,) = random.choices([*OFTEN], [*OFTEN.values()])
        work: dict[str, float] = {name: random.choice(often) for name, often in WORK.items()}
        return cls(density, kinds or dict.fromkeys(fit, 1), work)


def drawn(seed: int, count: int = STEPS) -> list[Step]:
    """Return the steps of a seed, in its own climate."""
    climate, random = Climate.of(seed), Random(f"{seed} steps")
    share = DENSITIES[climate.density]
    steps: list[Step] = []
    for _ in range(count):
        table: Mapping[str, float] = climate.kinds if random.random() < share else climate.work
        (name,) = random.choices([*table], [*table.values()])
        a, b, c = (random.randrange(1 << 16) for _ in range(3))
        steps.append(Step(name, a, b, c, random.choice((0.1, 0.5, 3.0, 10.0))))
    return steps


def kept(seed: int) -> list[Step]:
    """Return the steps of a world that failed once: what a seed draws may change, these do not."""
    rows = [line.split(", ") for line in KEPT.read_text().splitlines()[1:]]
    return [
        Step(name, int(a), int(b), int(c), float(seconds))
        for of, name, a, b, c, seconds in rows
        if int(of) == seed
    ]


@contextmanager
def coarse() -> Iterator[None]:
    """Let the data plane's pump poll less often: in simulated time each poll costs as much."""
    level = logging.getLogger("kvladder").level
    logging.getLogger("kvladder").setLevel(logging.CRITICAL)
    try:
        with mock.patch.object(pump, "NAPS", 1), mock.patch.object(pump, "REST_S", 0.02):
            yield
    finally:
        logging.getLogger("kvladder").setLevel(level)


class Failed(AssertionError):
    """A fleet broke an invariant."""

    def __init__(self, error: BaseException, at: int, trace: Sequence[str]) -> None:
        super().__init__(f"step {at}: {type(error).__name__}: {error}")
        self.at = at
        """Index of the step, among those that ran; their number if it was at the end."""
        self.trace = trace


def run(seed: int, steps: Sequence[Step]) -> Fleet:
    """Run a fleet through steps; raise ``Failed`` at the first broken invariant."""
    with coarse():
        fleet, taken = Fleet(seed), 0
        try:
            for step in steps:
                step.take(fleet)
                fleet.poll()
                fleet.check()
                taken += 1
            fleet.finish()
        except BaseException as error:
            with suppress(BaseException):
                fleet.dispose()
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Failed(error, taken, fleet.trace[-TRACE_LINES:]) from error
        return fleet


def fails(seed: int, steps: Sequence[Step]) -> Failed | None:
    """Return how a run fails, None if it does not."""
    try:
        run(seed, steps)
    except Failed as failure:
        return failure
    return None


def shrunk(
    steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], *, tries: int = 400
) -> list[int]:
    """Return the indices of fewer steps that fail, too: faults go first, then all others.

    Parts of half the steps, a quarter and so on are left out as long as the rest still fails.
    """
    kept = [*range(len(steps))]

    def without(part: set[int]) -> bool:
        nonlocal kept, tries
        rest = [index for index in kept if index not in part]
        tries -= 1
        if not part or not fails([steps[index] for index in rest]):
            return False
        kept = rest
        return True

    for wanted in (lambda step: step.name in FAULTS, lambda _step: True):
        size = len(kept)
        while size and tries > 0:
            chosen = [index for index in kept if wanted(steps[index])]
            parts = [chosen[at : at + size] for at in range(0, len(chosen), size)]
            is_less = [without({*part}) for part in reversed(parts) if tries > 0]
            if size > 1 or not any(is_less):
                size //= 2
    return kept


def command(seed: int, count: int, kept: Sequence[int]) -> str:
    """Return the command that repeats a run with some of its steps."""
    only = "" if len(kept) == count else " --only " + ",".join(map(str, kept))
    return f"python -m tests.sim.night --seed {seed} --steps {count} --worlds 1{only}"


def counted(fleets: Sequence[Fleet]) -> Counter[str]:
    """Return the faults of several runs, by kind."""
    return sum((fleet.faults for fleet in fleets), start=Counter[str]())
