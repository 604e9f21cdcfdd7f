"""Runs fleets in simulated time under faults: ``python -m tests.sim.night --faults 1000000``.

Each world has a seed of its own, which alone decides everything that happens in it. A world that
fails is shrunk to fewer steps, and the command that repeats it is printed. One world in a hundred
runs twice, and must do the same. At the end a table has the faults by kind.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from tests.sim.fleet.faults import FAULTS
from tests.sim.fleet.fleet import Fleet
from tests.sim.fleet.plan import STEPS, Failed, Step, command, drawn, fails, run, shrunk

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
    purges: int = 0
    undone: int = 0
    failovers: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    packets: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])
    failed: list[str] = field(default_factory=list[str])

    def add(self, fleet: Fleet, steps: int) -> None:
        """Add a world that passed."""
        self.worlds += 1
        self.steps += steps
        self.simulated_s += fleet.loop.time()
        self.purges += fleet.purges
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
        yield f"{self.worlds:,} worlds, {self.steps:,} steps, {self.simulated_s:,.0f} simulated"
        yield f"seconds. Packets of the network: {packets}."
        yield f"Blocks served and compared: {blocks}."
        yield f"Purges on all engines: {self.purges:,}. Fail-overs of Redis: {self.failovers:,},"
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


def worlds(
    seeds: Iterator[int], steps: int, only: list[int] | None, goes_on: Callable[[Tally], bool]
) -> Tally:
    """Run worlds while ``goes_on``; print each failure with the command that repeats it."""
    tally = Tally()
    while goes_on(tally) and len(tally.failed) < FAILURES_MAX:
        seed = next(seeds)
        plan = drawn(seed, steps)
        chosen = plan if only is None else [plan[index] for index in only]
        try:
            fleet = twice(seed, chosen) if seed % AGAIN == 0 else run(seed, chosen)
        except Failed as failure:
            print(f"seed {seed} failed: {failure}", *failure.trace, sep="\n  ", flush=True)
            again = command(seed, steps, only or range(len(plan)))
            if only is None and failure.__cause__ is not None:
                print(f"all of its steps: {again}", flush=True)
                again = shrink(seed, plan, failure)
            print(f"repeat it: {again}", flush=True)
            tally.failed.append(again)
            continue
        tally.add(fleet, len(chosen))
        if tally.worlds % 100 == 0:
            print(
                f"{tally.worlds} worlds, to seed {seed}: {tally.faults.total():,} faults",
                flush=True,
            )
    return tally


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
    parser.add_argument("--out", type=Path, help="file that the table is appended to")
    options = parser.parse_args(given)
    began_s, cpu_s = time.monotonic(), time.process_time()

    def goes_on(tally: Tally) -> bool:
        is_late = options.minutes and time.monotonic() - began_s > 60 * options.minutes
        done = tally.worlds + len(tally.failed)
        is_enough = tally.faults.total() >= options.faults or done == options.worlds
        return not (is_late or is_enough)

    only = None if options.only is None else [int(one) for one in options.only.split(",") if one]
    tally = worlds(count(options.seed), options.steps, only, goes_on)
    table = "\n".join([about(given, time.process_time() - cpu_s), *tally.lines()])
    print(table)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(table + "\n")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
