"""Run foreign clients against vLLM alone and with kvladder, in turns: ``make bench-clients``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.clients.inputs import MODEL, conversations, make_hub, make_model, write_trace
from benchmarks.clients.programs import HUB, PROGRAMS, TRACE, Program, Unreadable
from benchmarks.clients.servers import ALONE, OURS, end, started
from benchmarks.clients.turns import ClientFailed, Outcome, Resettable, in_turns
from benchmarks.foreign import Absent
from benchmarks.machine import RESULTS, machine
from benchmarks.stopping import exit_on_sigterm

FIGURES = (("p50_ms", "p50, ms"), ("p99_ms", "p99, ms"), ("tokens_per_s", "tokens/s"))
CHECKS = (
    "pairs", "answers differ", "unpaired", "cached alone", "cached kvladder",
    "late after turn 2", "late by medians", "late by chance",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a client failed or an answer differed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="run only clients with TEXT in the title"
    )
    parser.add_argument(
        "--turns", type=int, default=4, metavar="N", help="run each client N times on each server"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the table to benchmarks/results/FILE as well"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files of the run here")
    arguments = parser.parse_args(argv)
    if arguments.turns < 3:
        parser.error(f"--turns {arguments.turns}: the limit needs at least 3")
    wanted = [p for p in PROGRAMS if any(text in p.title for text in arguments.only or [""])]
    if not wanted:
        titles = ", ".join(program.title for program in PROGRAMS)
        parser.error(
            f"no client has {' or '.join(arguments.only)} in its title; there are: {titles}"
        )
    with tempfile.TemporaryDirectory(prefix="kvladder-clients-") as name:
        folder = (arguments.keep or Path(name)).resolve()
        outcomes = measured(wanted, folder, arguments.turns)
    text = page(wanted, outcomes, arguments.turns)
    print(f"\n{text}")
    if arguments.out:
        (RESULTS / Path(arguments.out).name).write_text(text)
    for outcome in outcomes:
        if outcome.failure:
            print(f"{outcome.title} failed: {outcome.failure}", file=sys.stderr)
    return int(any(one.failure or one.answers().differ for one in outcomes))


def measured(wanted: Iterable[Program], folder: Path, turns: int) -> list[Outcome]:
    """Install the clients, start both servers, and run one client after the other."""
    ready: list[tuple[Program, Outcome]] = []
    outcomes: list[Outcome] = []
    for program in wanted:
        outcome = Outcome(program.title)
        outcomes.append(outcome)
        say(f"installing {program.name} if needed")
        try:
            outcome.version = program.install()
            ready.append((program, outcome))
        except Absent as error:
            outcome.failure = f"cannot be installed: {error}"
    if not ready:
        return outcomes
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / MODEL)
    make_hub(folder / HUB, folder / MODEL)
    write_trace(folder / TRACE, conversations())
    servers = started(folder)
    try:
        for program, outcome in ready:
            say(program.title)
            attempt(program, servers, folder, turns, outcome)
    finally:
        end(servers)
    return outcomes


def attempt(
    program: Program, servers: Mapping[str, Resettable], folder: Path, turns: int, outcome: Outcome
) -> None:
    """Run one client; a failure is kept with its outcome, so that the others still run."""
    try:
        in_turns(program, servers, folder, turns, outcome)
    except (ClientFailed, Unreadable) as error:
        outcome.failure = str(error)
        outcome.turns = {ALONE: [], OURS: []}


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def page(wanted: Iterable[Program], outcomes: Iterable[Outcome], turns: int) -> str:
    """Return the results as a page."""
    facts = [f"- {name}: {value}" for name, value in machine().items()]
    facts.append(f"- load average: {os.getloadavg()[2]:.1f} over the last 15 minutes")
    facts.append(f"- turns: {turns}; medians are over the turns after the first")
    lines = ["# Foreign clients against vLLM alone and with kvladder", "", *facts, ""]
    lines += [*table(outcomes), "", "## Commands", ""]
    for program in wanted:
        command = program.command("URL", "OUT")
        lines += ["```", shlex.join([Path(command[0]).name, *command[1:]]), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the lines of the tables: figures, then answers and late requests, then failures."""
    rows = ["| client | figure | alone | kvladder | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    headings = ("client", *CHECKS)
    checks = [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * len(CHECKS)}"]
    failures: list[str] = []
    for one in outcomes:
        if one.failure:
            failures.append(f"- **{one.title}** failed: {one.failure}")
            continue
        for name, label in FIGURES:
            alone, ours = one.figure(ALONE, name), one.figure(OURS, name)
            rows.append(
                f"| {one.title} | {label} | {alone:,.1f} | {ours:,.1f} | {ours / alone:.2f} |"
            )
        answers, late, noise = one.answers(), one.late(), one.noise()
        middle = one.late_in_the_middle()
        checks.append(
            f"| {one.title} | {answers.pairs} | {answers.differ} | {answers.unpaired} "
            f"| {one.cached(ALONE):.0%} | {one.cached(OURS):.0%} "
            f"| {late.late} of {late.pairs} | {middle.late} of {middle.pairs} "
            f"| {noise.late} of {noise.pairs} |"
        )
    return [*rows, "", *checks, *(["", *failures] if failures else [])]


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
