"""The results of a soak as Markdown and as a page with plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.soak.users import Asked
from kvladder.report.charts import COLOURS
from kvladder.report.page import Plot, figure, page, plotly

GIVEN_UP_S = 180.0
"""Time within which a level must serve again after a fault."""

FOUND_MIN = 0.9
"""Share of the blocks in files that an engine finds again after it was killed."""

ABOUT_RESTARTS = """\
Engines that were killed with SIGKILL, all of their processes, and started again on the same files.
Cut: their own requests that were in flight. No request to the other engine may fail.
"""
ABOUT_STAGE = """\
Two vLLM with a tiny random model have host memory, files, Redis under Sentinel, `kvladder serve`,
Mooncake and moto below, in this order. All but the files are behind proxies. A third vLLM without
kvladder and without a prefix cache computes each prompt in the same run. A wait is the time of a
whole request. `fetch.when` is `always` and `fetch.deadline` is 1 s: engines wait for levels,
although computing is as fast.
"""
ABOUT_FILES = """\
Two vLLM with a tiny random model have host memory and files below. A third vLLM without kvladder
and without a prefix cache computes each prompt in the same run. A wait is the time of a whole
request.
"""
ABOUT_FAULTS = """\
Longest wait: of any request from the begin of the fault until the level served again. Again: the
time from the end of the fault until both engines have stored blocks in the level and got blocks
from it. It includes the time until a user asks for such a block. For a server that is empty
afterwards, it is the time until both have stored blocks.
"""
ABOUT_HELD = """\
What processes hold while no request is in flight. Slots: those that hold no block of the host
level. Memory: proportional set size.
"""


class Struck(NamedTuple):
    """One fault as the users noticed it."""

    level: str
    victim: str
    what: str
    begun_s: float
    over_s: float
    again_s: float | None
    """When all engines stored blocks in the level and got blocks from it; None: not in time."""
    errors: int
    """Failed calls of the level, of all engines."""
    damaged: int
    """Damaged blocks that readers of the level found."""

    @property
    def recovery_s(self) -> float:
        """Time from the end of the fault until the level served all engines again."""
        return GIVEN_UP_S if self.again_s is None else self.again_s - self.over_s


class Held(NamedTuple):
    """What a process and its children hold while no request is in flight."""

    who: str
    time_s: float
    slots: int
    """Slots of the arena that hold no block of the host level."""
    descriptors: int
    memory_bytes: int
    """Proportional set size."""


class Restart(NamedTuple):
    """An engine that was killed and started again, on the same directory of files."""

    engine: str
    took_s: float
    """Time until it served again."""
    blocks: int
    """Blocks in its files when it was killed."""
    recovered: int
    """Blocks that it found there."""
    cut: int
    """Its requests that were in flight and failed."""
    others: int
    """Requests that the other engine answered meanwhile."""


class Outcome(NamedTuple):
    """All that a soak measured."""

    minutes: float
    seed: int
    begun_s: float
    alone_s: Sequence[float]
    """The time that vLLM alone took for each prompt."""
    asked: Sequence[Asked]
    wrong: int
    failed: Sequence[str]
    struck: Sequence[Struck]
    held: Sequence[Held]
    served: dict[str, int]
    """Blocks that each level served."""
    restarts: Sequence[Restart] = ()

    def troubles(self) -> list[str]:
        """Return what must not happen, and has."""
        found = [f"{self.wrong} answers differ"] if self.wrong else []
        found += [f"a request failed: {error}" for error in self.failed]
        found += [
            f"{one.level} did not serve again within {GIVEN_UP_S:g} s: {one.victim} {one.what}"
            for one in self.struck
            if one.again_s is None
        ]
        found += [f"{one.who}: {one.slots} slots are held" for one in self.held if one.slots]
        found += [
            f"{one.engine} found {one.recovered} of {one.blocks} blocks after it was killed"
            for one in self.restarts
            if one.recovered < FOUND_MIN * one.blocks
        ]
        found += [
            f"no request was answered while {one.engine} started again"
            for one in self.restarts
            if not one.others
        ]
        return found


def during(outcome: Outcome, struck: Struck) -> list[Asked]:
    """Return the requests of the time from a fault's begin until the level served again."""
    end_s = struck.again_s or struck.over_s + GIVEN_UP_S
    return [
        one
        for one in outcome.asked
        if one.begun_s < end_s and one.begun_s + one.took_s > struck.begun_s
    ]


def quiet(outcome: Outcome) -> list[Asked]:
    """Return the requests outside of all faults."""
    busy = {one for struck in outcome.struck for one in during(outcome, struck)}
    return [one for one in outcome.asked if one not in busy]


def _waits(asked: Sequence[Asked]) -> tuple[float, float]:
    times = [one.took_s for one in asked] or [0.0]
    return statistics.median(times), max(times)


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def faults_table(outcome: Outcome) -> list[str]:
    """Return the table of faults; waits are ratios to vLLM alone in the same run."""
    alone = statistics.median(outcome.alone_s)
    kinds: dict[tuple[str, str, str], list[Struck]] = {}
    for one in outcome.struck:
        kinds.setdefault((one.level, one.victim, one.what), []).append(one)
    lines = [
        (
            "| level | victim | fault | rounds | requests | failed calls | damaged blocks |"
            " longest wait | times alone | again, median | again, max |"
        ),
        "| --- | --- | --- |" + " ---: |" * 8,
    ]
    for kind, rounds in sorted(kinds.items()):
        asked = [one for struck in rounds for one in during(outcome, struck)]
        longest, times = _waits(asked)[1], [struck.recovery_s for struck in rounds]
        lines.append(
            _row(
                (
                    *kind, len(rounds), len(asked), sum(struck.errors for struck in rounds),
                    sum(struck.damaged for struck in rounds), f"{1e3 * longest:,.0f} ms",
                    f"{longest / alone:.1f}", f"{1e3 * statistics.median(times):,.0f} ms",
                    f"{1e3 * max(times):,.0f} ms",
                )
            )
        )  # fmt: skip
    return lines


def waits_table(outcome: Outcome) -> list[str]:
    """Return the table of waits."""
    alone = statistics.median(outcome.alone_s)
    rows = {
        "vLLM alone, which computes all": (len(outcome.alone_s), sorted(outcome.alone_s)),
        "kvladder, no fault": _timed(quiet(outcome)),
        "kvladder, all": _timed(outcome.asked),
    }
    lines = ["| | requests | median | 99 % | longest | longest, times alone |"]
    lines.append("| --- |" + " ---: |" * 5)
    for name, (count, times) in rows.items():
        if times:
            high = times[min(count - 1, int(count * 0.99))]
            shown = [f"{1e3 * one:,.0f} ms" for one in (times[count // 2], high, times[-1])]
            lines.append(_row((name, count, *shown, f"{times[-1] / alone:.1f}")))
    return lines


def _timed(asked: Sequence[Asked]) -> tuple[int, list[float]]:
    return len(asked), sorted(one.took_s for one in asked)


def restarts_table(outcome: Outcome) -> list[str]:
    """Return the table of engines that were killed and started again."""
    names = "engine", "serves again after", "blocks in its files", "found again", "cut"
    lines = [_row((*names, "answers of the other"))]
    lines.append("| --- |" + " ---: |" * 5)
    lines += [
        _row((one.engine, f"{one.took_s:,.0f} s", one.blocks, one.recovered, one.cut, one.others))
        for one in outcome.restarts
    ]
    return lines


def held_table(outcome: Outcome) -> list[str]:
    """Return what is held after the first fault, in the middle and in the end."""
    lines = ["| who | when | slots | descriptors | memory |", "| --- | --- |" + " ---: |" * 3]
    for who in dict.fromkeys(one.who for one in outcome.held):
        mine = [one for one in outcome.held if one.who == who]
        for one in (mine[0], mine[len(mine) // 2], mine[-1]):
            when = f"after {one.time_s - outcome.begun_s:.0f} s"
            memory = f"{one.memory_bytes >> 20:,} MiB"
            lines.append(_row((who, when, one.slots, one.descriptors, memory)))
    return lines


def markdown(outcome: Outcome, about: dict[str, str]) -> str:
    """Return the page of a result."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    troubles = outcome.troubles()
    served = ", ".join(f"{name} {count:,}" for name, count in outcome.served.items())
    parts = [
        f"# Soak of {about['date'][:10]}: two vLLM over their tiers, with faults\n",
        facts,
        "",
        (
            f"{len(outcome.struck)} faults in {outcome.minutes:.1f} minutes, {len(outcome.asked):,}"
            f" requests, {outcome.wrong} with other tokens than vLLM alone, {len(outcome.failed)}"
            f" failed. Blocks that levels served to the two engines: {served}.\n"
        ),
        *([f"**{one}**\n" for one in troubles]),
        ABOUT_FILES if [*outcome.served] == ["files"] else ABOUT_STAGE,
        *waits_table(outcome),
        "",
        ABOUT_FAULTS,
        *faults_table(outcome),
        "",
        *([ABOUT_RESTARTS, *restarts_table(outcome), ""] if outcome.restarts else []),
        ABOUT_HELD,
        *held_table(outcome),
        "",
    ]
    return "\n".join(parts)


def html(outcome: Outcome, about: dict[str, str]) -> str:
    """Return a page with plots of waits, recoveries and held resources."""
    go = plotly()
    waits = figure("seconds", "wait, ms")
    for engine, colour in zip(
        dict.fromkeys(a.engine for a in outcome.asked), COLOURS, strict=False
    ):
        mine = [one for one in outcome.asked if one.engine == engine]
        xs, ys = [a.begun_s - outcome.begun_s for a in mine], [1e3 * a.took_s for a in mine]
        waits.add_trace(
            go.Scatter(name=engine, x=xs, y=ys, mode="markers", marker={"size": 3, "color": colour})
        )
    for one in outcome.struck:
        begin, end = one.begun_s - outcome.begun_s, one.over_s - outcome.begun_s
        waits.add_vrect(x0=begin, x1=end, fillcolor="#d6578c", opacity=0.25, line_width=0)
    again = figure("ms until the level served both engines again", "")
    names = [f"{one.level}: {one.victim} {one.what}" for one in outcome.struck]
    times = [1e3 * one.recovery_s for one in outcome.struck]
    again.add_trace(go.Scatter(x=times, y=names, mode="markers", marker={"color": COLOURS[0]}))
    again.update_xaxes(rangemode="tozero")
    again.update_layout(height=120 + 22 * len(set(names)))
    memory, descriptors = figure("seconds", "MiB"), figure("seconds", "descriptors")
    for who, colour in zip(dict.fromkeys(one.who for one in outcome.held), COLOURS, strict=False):
        mine_held = [one for one in outcome.held if one.who == who]
        xs = [one.time_s - outcome.begun_s for one in mine_held]
        line = {"color": colour}
        ys = [one.memory_bytes / (1 << 20) for one in mine_held]
        memory.add_trace(go.Scatter(name=who, x=xs, y=ys, line=line))
        counts = [one.descriptors for one in mine_held]
        descriptors.add_trace(go.Scatter(name=who, x=xs, y=counts, line=line))
    plots = [
        Plot("Wait of each request", waits, "The shaded times are faults."),
        Plot("Time until a level serves again", again),
        Plot("Memory while no request is in flight", memory, "Proportional set size."),
        Plot("Descriptors while no request is in flight", descriptors),
    ]
    facts = [f"{name}: {value}" for name, value in about.items()]
    return page("Soak of real parts", facts, plots)
