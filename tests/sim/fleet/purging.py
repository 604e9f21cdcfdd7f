"""A purge in a fleet: which engines run it, how far each is, and when it is done."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from kvladder.keys import BlockKey
from tests.sim.fleet.engine import Engine
from tests.sim.fleet.model import FleetModel


class Purging:
    """At most one purge at a time, each of whose engines takes a step of it in each turn.

    If one of them ends, all of these begin anew: it may have written meanwhile.
    """

    def __init__(self, model: FleetModel, note: Callable[[str], None]) -> None:
        self.salt: str | None = None
        """The salt that is being purged: no request uses it meanwhile."""
        self.done = 0
        self._model = model
        self._note = note
        self._by_keys = False
        self._keys: list[BlockKey] = []
        self._steps: dict[Engine, Generator[Any] | None] = {}

    def begin(self, salt: str, engines: Sequence[Engine], *, by_keys: bool) -> None:
        """Have these engines purge a salt, or remove its blocks by their keys."""
        for engine in engines:
            if engine.process is not None:
                engine.process.run(engine.cancel_all, salt)
        self.salt, self._by_keys = salt, by_keys
        self._keys = self._model.of_salt(salt)
        self._model.purging(self._keys)
        self._steps = dict.fromkeys(engines)
        self._note(f"purge {salt}{' by keys' if by_keys else ''}")

    def again(self, ended: Engine) -> None:
        """Begin the purge anew, if an engine ends that runs it."""
        if ended in self._steps:
            self.let_go()
            self._steps = dict.fromkeys(self._steps)

    def let_go(self) -> None:
        """End the steps of a purge, in the engines that run: the rest is done at once."""
        for engine, steps in self._steps.items():
            if steps is not None and engine.process is not None:
                engine.process.run(steps.close)

    def go_on(self) -> None:
        """Let each engine take a step of its purge."""
        if self.salt is None:
            return
        is_done = True
        for engine, steps in [*self._steps.items()]:
            if not engine.is_up:
                is_done = False
                continue
            assert engine.process is not None
            if steps is None and engine.hints.counts()["in_flight"]:
                is_done = False  # a hint of before may still read
                continue
            if steps is None:
                begin = engine.begin_removal if self._by_keys else engine.begin_purge
                steps = self._steps[engine] = begin(self.salt)
            ended = engine.process.run(next, steps, None) is None
            is_done &= ended and not engine.manager.removals
        if is_done:
            self._model.purged(self._keys)
            self.salt, self._steps = None, {}
            self.done += 1
            self._note("purged")
