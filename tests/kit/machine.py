"""A Hypothesis state machine over :class:`~tests.kit.world.World`: it shrinks failing runs."""

from __future__ import annotations

import sys
from random import Random
from typing import get_args

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kit.knobs import PRIORITIES, Kind, Knobs
from tests.kit.wishes import LEVEL_NAMES, NO_WISHES, Wishes
from tests.kit.world import World

NUMBERS = st.integers(0, 15)
LENGTHS = st.integers(1, 6)
LEVELS = st.integers(0, 2)
_SOME = st.none() | st.lists(st.sampled_from(LEVEL_NAMES), unique=True).map(tuple)
WISHES = st.just(NO_WISHES) | st.builds(
    Wishes, load=_SOME, store=_SOME, ttl_s=st.none() | st.sampled_from([0.5, 5.0, 25.0])
)
SESSIONS = st.none() | st.integers(0, 2)
SECONDS = st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0, 10.0])


class CacheMachine(RuleBasedStateMachine):
    """Requests, time and trouble in any order; every invariant after each step.

    Have pytest run it: ``TestCache = CacheMachine.TestCase``.
    """

    world: World
    wishing: bool

    @initialize(
        shape=st.integers(0, 2**16),
        seed=st.integers(0, 2**16),
        kind=st.sampled_from(get_args(Kind)),
    )
    def open(self, shape: int, seed: int, kind: Kind) -> None:
        """A cache of some shape, and an order of events."""
        self.world = World(Knobs.draw(Random(shape)).of(kind), seed)
        self.wishing = kind == "wishing"

    @rule(
        number=NUMBERS,
        length=LENGTHS,
        priority=st.none() | st.sampled_from(PRIORITIES),
        duration_s=st.none() | st.just(2.0),
        wishes=WISHES,
        session=SESSIONS,
    )
    def serve(
        self,
        number: int,
        length: int,
        priority: int | None,
        duration_s: float | None,
        wishes: Wishes,
        session: int | None,
    ) -> None:
        """Begin a request; it continues as time advances."""
        wishes = wishes if self.wishing else NO_WISHES
        self.world.begin(number, length, priority, duration_s, wishes, session)
        self.world.poll()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3, unique=True))
    def gather(self, numbers: list[int]) -> None:
        """Another process wants a set of blocks."""
        self.world.gather(numbers)
        self.world.poll()

    @rule(session=st.integers(0, 2))
    def end_session(self, session: int) -> None:
        """End a session."""
        self.world.end_session(session)

    @rule(seconds=SECONDS)
    def advance(self, seconds: float) -> None:
        """Advance time, and with it the requests."""
        self.world.advance(seconds)
        self.world.check()
        self.world.poll()

    @rule(seconds=SECONDS)
    def pause(self, seconds: float) -> None:
        """The process stands still."""
        self.world.pause(seconds)
        self.world.check()
        self.world.poll()

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        """Cancel a running request."""
        self.world.cancel(number)

    @rule(number=NUMBERS)
    def forget(self, number: int) -> None:
        """Report that a request could not use its loaded blocks."""
        self.world.forget(number)

    @rule(number=NUMBERS, length=LENGTHS)
    def touch(self, number: int, length: int) -> None:
        """A prompt was used by other ways."""
        self.world.touch(number, length)

    @rule(number=NUMBERS, length=LENGTHS)
    def remove(self, number: int, length: int) -> None:
        """A prompt's blocks are removed."""
        self.world.remove(number, length)

    @rule()
    def purge(self) -> None:
        """Everything of one salt is removed, step by step."""
        if self.wishing:
            self.world.purge()

    @rule()
    def clear(self) -> None:
        """Everything is removed."""
        self.world.clear()

    @rule(level=LEVELS, kind=st.integers(0, 12))
    def trouble(self, level: int, kind: int) -> None:
        """Make a tier fail, hang, be full, read too little, or break its rules."""
        self.world.trouble(level, kind)

    @rule(level=LEVELS)
    def heal(self, level: int) -> None:
        """A tier gets well."""
        self.world.heal(level)

    @rule(level=LEVELS, lose=st.booleans())
    def damage(self, level: int, *, lose: bool) -> None:
        """A tier loses or damages blocks."""
        self.world.damage(level, lose=lose)

    @rule(number=NUMBERS, length=LENGTHS)
    def others(self, number: int, length: int) -> None:
        """Another engine puts a prompt's blocks."""
        self.world.others(number, length)

    @rule(crash=st.booleans())
    def reopen(self, *, crash: bool) -> None:
        """The process ends, well or not, and another begins."""
        self.world.reopen(crash=crash)

    @invariant()
    def holds(self) -> None:
        """Every invariant of the world."""
        self.world.check()

    def teardown(self) -> None:
        """Repair all tiers, let all work end, and close; assert that nothing is left."""
        if hasattr(self, "world"):
            try:
                if sys.exc_info()[0] is None:
                    self.world.end()
            finally:
                self.world.dispose()
