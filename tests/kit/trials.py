"""Far ends, their clients and the processes of tiers, killed and stopped in mid-transfer.

``python -m tests.kit.trials 200 --out FILE`` runs 200 trials and writes their figures to
``benchmarks/results/FILE``. Correctness is asserted on a busy machine too; times are only reported.
One trial is measured at a time, while others recover and take processor time from it. With
``--alone nixl`` or ``--alone mooncake`` it runs alone.

``--alone redis-sentinel``, ``redis-cluster``, ``object`` or ``mooncake-store`` uses a cache while
the servers of its level fail. ``--alone failover`` runs this number of trials of each kind, in
parallel processes.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.machine import RESULTS, machine
from tests.kit.failover import DEADLINE_S, FAILOVER_LANES
from tests.kit.lanes import Figures, Lane, run
from tests.kit.moving import ABANDON_S, TIMEOUT_S, MooncakeLane, NixlLane

ALONE: dict[str, Sequence[type[Lane]]] = {
    "nixl": (NixlLane,),
    "mooncake": (MooncakeLane,),
    **{name: (lane,) for name, lane in FAILOVER_LANES.items()},
}
FAILOVER = "failover"
NIXL_LANES: Sequence[type[Lane]] = (NixlLane, NixlLane)
ALL_LANES: Sequence[type[Lane]] = (*NIXL_LANES, MooncakeLane)


def run_alone(name: str, trials: int, within_s: float) -> Figures:
    """Do trials of one kind in this process."""
    with tempfile.TemporaryDirectory() as folder:
        lanes = ALONE.get(name, ALL_LANES)
        return asyncio.run(run(Path(folder), trials, lanes, within_s=within_s))


def run_failover(trials: int, within_s: float) -> tuple[Figures, list[BaseException]]:
    """Run this number of trials of each kind of failover, each kind in its own process.

    Returns the figures, and the errors of kinds that failed, which have no figures.
    """
    figures, errors = Figures(), list[BaseException]()
    with ProcessPoolExecutor(len(FAILOVER_LANES), get_context("spawn")) as pool:
        for one in [pool.submit(run_alone, name, trials, within_s) for name in FAILOVER_LANES]:
            if error := one.exception():
                errors.append(error)
            else:
                figures.add(one.result())
    return figures, errors


def told(figures: Figures) -> str:
    """The figures as a page."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    about = {**machine(), "load": f"{load} in the last 1, 5, 15 minutes, these trials included"}
    about |= {"command": f"python -m tests.kit.trials {' '.join(sys.argv[1:])}"}
    about |= {"took": f"{figures.took_s:.0f} s"}
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    title = f"# {figures.trials.total()} trials of processes that are killed and stopped\n"
    parts = [title, facts, ""]
    if any(case not in figures.services for case in figures.trials):
        parts += _moved(figures)
    if figures.services:
        parts += _served(figures)
    return "\n".join(parts)


def _moved(figures: Figures) -> Iterator[str]:
    """Tables of trials with single calls."""
    worst = {
        f"longest wait of a caller beyond its time-out of {TIMEOUT_S:g} s": figures.wait_s,
        f"longest time from there until slots are free, abandon {ABANDON_S:g} s": figures.held_s,
        "longest stall of another thread of the caller's process": figures.stall_s,
        "longest time until a far end has the slots of a dead or stopped client": figures.gone_s,
    }
    yield "| | worst |\n| --- | ---: |"
    yield from (f"| {what} | {1e3 * seconds:,.0f} ms |" for what, seconds in worst.items())
    yield f"| bytes that landed in slots after they were free | {figures.late_bytes} |"
    yield "\n| tier | victim | fault | in mid | trials |\n| --- | --- | --- | --- | ---: |"
    for case, times in sorted(figures.trials.items()):
        if case not in figures.services:
            yield f"| {case.tier} | {case.victim} | {case.fault} | {case.call} | {times} |"
    yield ""


def _served(figures: Figures) -> Iterator[str]:
    """Tables of trials with caches."""
    lanes = [FAILOVER_LANES[name] for name in figures.held]
    times_out = ", ".join(f"{lane.name} {lane.timeout_s:g} s" for lane in lanes)
    yield (
        f"Two threads save and load prefixes. A fetch has a deadline of {DEADLINE_S:g} s; a call of"
        f" the level has a time-out ({times_out}). Longest wait: of one of them for a fetch. Again:"
        " the time from the end of the fault, which is when the servers could serve, until a prefix"
        " that was saved since has come whole from the level.\n"
    )
    yield (
        "| servers | victim | fault | rounds | loads | wrong bytes | longest wait | beyond deadline"
        " | again, median | again, max |"
    )
    yield "| --- | --- | --- |" + " ---: |" * 7
    for case, one in sorted(figures.services.items()):
        numbers = len(one.again_s), f"{one.loads:,}", one.wrong_bytes
        times = (
            one.longest_s,
            max(one.longest_s - DEADLINE_S, 0),
            statistics.median(one.again_s),
            max(one.again_s),
        )
        cells = [*case[:3], *map(str, numbers), *(f"{1e3 * seconds:,.0f} ms" for seconds in times)]
        yield f"| {' | '.join(cells)} |"
    yield "\nWhat is held while nothing is under way. Slots: those that hold no block of host.\n"
    yield "| servers | when | slots | descriptors | threads | Python's threads |"
    yield "| --- | --- |" + " ---: |" * 4
    for tier, moments in sorted(figures.held.items()):
        for moment, held in moments.items():
            yield f"| {tier} | {moment} | {' | '.join(map(str, held))} |"
    yield ""


def main() -> None:
    """Run the trials of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.trials", description=__doc__)
    parser.add_argument("trials", type=int, nargs="?", default=200)
    parser.add_argument(
        "--alone", choices=[*ALONE, FAILOVER], help="one trial after the other, of one tier"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--out", metavar="FILE", help="write to benchmarks/results/FILE as well")
    arguments = parser.parse_args()
    within_s, errors = 60 * arguments.minutes, list[BaseException]()
    if arguments.alone == FAILOVER:
        figures, errors = run_failover(arguments.trials, within_s)
    else:
        figures = run_alone(arguments.alone, arguments.trials, within_s)
    text = told(figures)
    print(text)
    if arguments.out:
        (RESULTS / Path(arguments.out).name).write_text(text)
    figures.check()
    if errors:
        raise BaseExceptionGroup("not all kinds ended", errors)


if __name__ == "__main__":
    main()
