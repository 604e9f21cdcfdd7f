"""Runs fleets in simulated time under faults: ``python -m tests.sim.night --faults 1000000``.

Each world has a seed of its own, which alone decides everything that happens in it. A world that
fails is shrunk to fewer steps, and the command that repeats it is printed. One world in a hundred
runs twice, and must do the same. At the end, or at SIGTERM, a table has the faults by kind. With
``--kept`` the sums are in a file after each batch of worlds, and the next night continues there.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.sim.fleet.faults import FAULTS
from tests.sim.fleet.fleet import Fleet
from tests.sim.fleet.plan import (
    DENSITIES,
    STEPS,
    Climate,
    Failed,
    Step,
    command,
    drawn,
    fails,
    run,
    shrunk,
)

BATCH = 20
"""Worlds whose sums are added at once."""
AGAIN = 100
FAILURES_MAX = 10
SHRINK_S = 60.0
"""Processor seconds after which a failure is told with the fewest steps found so far."""


@dataclass
class Tally:
    """The sums over all worlds."""

    worlds: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    purges: int = 0
    undone: int = 0
    failovers: int = 0
    densities: Counter[str] = field(default_factory=Counter[str])
    """Worlds by the density of their faults."""
    faults: Counter[str] = field(default_factory=Counter[str])
    packets: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])
    failed: list[str] = field(default_factory=list[str])

    @property
    def done(self) -> int:
        """Number of worlds that ended, those that failed included."""
        return self.worlds + len(self.failed)

    def __add__(self, other: Tally) -> Tally:
        """Return the sums of both."""
        names = [one.name for one in fields(self)]
        return Tally(*(getattr(self, name) + getattr(other, name) for name in names))

    def add(self, fleet: Fleet, seed: int, steps: int) -> None:
        """Add a world that passed."""
        self.worlds += 1
        self.densities[Climate.of(seed).density] += 1
        self.steps += steps
        self.simulated_s += fleet.loop.time()
        self.purges += fleet.purging.done
        self.undone += fleet.undone
        self.failovers += 0 if fleet.redis is None else fleet.redis.failovers
        self.faults += fleet.faults
        self.packets += fleet.net.counts
        for engine in fleet.engines:
            for source, blocks in engine.sources.items():
                names = ["host", "files", *fleet.knobs.stores]
                number = 0 if source == "host" else int(source.removeprefix("level"))
                self.sources[names[number]] += blocks

    def lines(self) -> Iterator[str]:
        """Yield the table, as Markdown."""
        yield "| kind of fault | injected |"
        yield "|---|---:|"
        for kind in sorted({*FAULTS, *self.faults}):
            yield f"| {kind} | {self.faults[kind]:,} |"
        yield f"| **all** | **{self.faults.total():,}** |"
        yield ""
        packets = ", ".join(f"{n:,} {kind}" for kind, n in sorted(self.packets.items()))
        blocks = ", ".join(f"{n:,} from {name}" for name, n in sorted(self.sources.items()))
        worlds = ", ".join(f"{self.densities[name]:,} {name}" for name in DENSITIES)
        yield f"{self.worlds:,} worlds ({worlds}), {self.steps:,} steps,"
        yield f"{self.simulated_s:,.0f} simulated seconds. Packets of the network: {packets}."
        yield f"Blocks served and compared: {blocks}."
        yield f"Purges: {self.purges:,}. Fail-overs of Redis: {self.failovers:,},"
        yield f"which took back {self.undone:,} removals that replicas had not got."
        yield f"Worlds that failed: {len(self.failed)}."


def shrink(seed: int, steps: list[Step], failure: Failed) -> str:
    """Return the command that repeats a failure with as few steps as were found."""
    kind = str(failure.__cause__)
    tried = steps[: failure.at + 1]
    until_s = time.process_time() + SHRINK_S

    def same(some: object) -> bool:
        if time.process_time() > until_s:
            return False
        found = fails(seed, some)  # type: ignore[arg-type]
        return found is not None and str(found.__cause__) == kind

    return command(seed, len(steps), shrunk(tried, same, tries=200))


def twice(seed: int, steps: Sequence[Step]) -> Fleet:
    """Run a world two times; raise ``Failed`` if the second run does something else."""
    fleet = run(seed, steps)
    if run(seed, steps).trace != fleet.trace:
        raise Failed(AssertionError("the same seed did something else"), len(steps), ())
    return fleet


def worlds(seeds: Iterable[int], steps: int, only: list[int] | None, until_s: float) -> Tally:
    """Run worlds until a time; print each failure with the command that repeats it."""
    tally, began_s = Tally(), time.process_time()
    for seed in seeds:
        if time.monotonic() > until_s or len(tally.failed) == FAILURES_MAX:
            break
        plan = drawn(seed, steps)
        chosen = plan if only is None else [plan[index] for index in only]
        try:
            fleet = twice(seed, chosen) if seed % AGAIN == 0 else run(seed, chosen)
        except Failed as failure:
            tally.failed.append(told(seed, plan, only, failure))
        else:
            tally.add(fleet, seed, len(chosen))
    tally.cpu_s = time.process_time() - began_s
    return tally


def told(seed: int, plan: list[Step], only: list[int] | None, failure: Failed) -> str:
    """Print a failure; return the command that repeats it, with fewer steps if they suffice."""
    print(f"seed {seed} failed: {failure}", *failure.trace, sep="\n  ", flush=True)
    again = command(seed, len(plan), only or range(len(plan)))
    if only is None and failure.__cause__ is not None:
        print(f"all of its steps: {again}", flush=True)
        again = shrink(seed, plan, failure)
    print(f"repeat it: {again}", flush=True)
    return again


class Night:
    """Batches of worlds, one after the other or several at a time, and their sums."""

    def __init__(self, options: argparse.Namespace, only: list[int] | None) -> None:
        self.options = options
        self.only = only
        self.tally = Tally()
        self.is_stopped = False
        self._until_s = time.monotonic() + 60 * (options.minutes or inf)
        if options.kept is not None and options.kept.exists():
            self.tally = self._resumed(json.loads(options.kept.read_text()))
        self._began = time.monotonic(), self.tally.faults.total()

    def _resumed(self, found: dict[str, Any]) -> Tally:
        if found.pop("of") != [self.options.seed, self.options.steps]:
            raise SystemExit(f"{self.options.kept}: give the --seed and --steps it was made with")
        values: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value
            for name, value in found.items()
        }
        return Tally(**values)

    @property
    def goes_on(self) -> bool:
        """True if another batch is to begin."""
        options, tally = self.options, self.tally
        is_enough = tally.faults.total() >= options.faults or tally.done == options.worlds
        is_late = time.monotonic() > self._until_s
        return not (self.is_stopped or is_enough or is_late or len(tally.failed) >= FAILURES_MAX)

    def run(self) -> None:
        """Run batches until there is enough; add their sums in the order of the seeds."""
        if self.options.jobs == 1:
            while self.goes_on:
                self._add(worlds(*self._batch(self.tally.done)))
            return
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.sim.night"])
        with ProcessPoolExecutor(self.options.jobs, context) as pool:
            begun, running = self.tally.done, deque[Future[Tally]]()
            while self.goes_on:
                while len(running) <= self.options.jobs and (batch := self._batch(begun))[0]:
                    running.append(pool.submit(worlds, *batch))
                    begun += len(batch[0])
                self._add(running.popleft().result())
            pool.shutdown(cancel_futures=True)

    def _batch(self, begun: int) -> tuple[range, int, list[int] | None, float]:
        """Return the arguments of ``worlds`` for the batch after ``begun`` worlds."""
        options = self.options
        size = BATCH if options.worlds is None else min(BATCH, options.worlds - begun)
        first = options.seed + begun
        return range(first, first + size), options.steps, self.only, self._until_s

    def _add(self, some: Tally) -> None:
        self.tally += some
        now = self.tally.faults.total()
        began_s, before = self._began
        rate = 3600 * (now - before) / max(1e-3, time.monotonic() - began_s)
        last = self.options.seed + self.tally.done - 1
        worlds = f"{self.tally.worlds} worlds, to seed {last}"
        print(f"{worlds}: {now:,} faults, {rate:,.0f} an hour", flush=True)
        if self.options.kept is not None:
            aside = self.options.kept.with_suffix(".new")
            of = {"of": [self.options.seed, self.options.steps]}
            aside.write_text(json.dumps(vars(self.tally) | of))
            aside.replace(self.options.kept)

    def stop(self, *_: object) -> None:
        """Begin no other batch."""
        self.is_stopped = True


def about(arguments: list[str], seconds: float) -> str:
    """Return where and how a table was made."""
    ran = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    what = " ".join(["python -m tests.sim.night", *arguments])
    return f"`{what}`, commit {ran.stdout.strip()}, {when}, {machine}, {seconds:,.0f} s of CPU\n"


def main(arguments: list[str] | None = None) -> int:
    """Run worlds until there were enough faults, or enough time has passed."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1_000_000, help="stop after this many")
    parser.add_argument("--worlds", type=int, help="stop after this many")
    parser.add_argument("--minutes", type=float, help="begin no world after this time")
    parser.add_argument("--seed", type=int, default=1, help="of the first world")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each world")
    parser.add_argument("--only", help="indices of the steps to take, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run worlds")
    parser.add_argument("--kept", type=Path, help="file that keeps the sums, to continue from")
    parser.add_argument("--out", type=Path, help="file that the table is appended to")
    options = parser.parse_args(given)
    only = None if options.only is None else [int(one) for one in options.only.split(",") if one]
    night = Night(options, only)
    before = signal.signal(signal.SIGTERM, night.stop)
    try:
        night.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    table = "\n".join([about(given, night.tally.cpu_s), *night.tally.lines()])
    print(table)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(table + "\n")
    return 1 if night.tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
