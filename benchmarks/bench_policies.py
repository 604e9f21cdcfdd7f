"""Eviction policies over traces: ours, the best of fourteen peers' policies, and Belady's bound.

The figure is the share of blocks that are found in prefixes. The limit is Belady's: which blocks go
is known in advance. The peers' policies are simulated (``benchmarks/policies/peers.hpp``); ours is
called as a level calls it, block by block as theirs are (in C, see ``_level.c``), and once with
whole prompts, where both it and LRU evict for all blocks of a prompt at once. ``KVLADDER_TRACES``
names a folder of traces in Mooncake's format; six more are generated. ``KVLADDER_SIZES`` sets the
sizes, in percent of the blocks that a trace has. Rows of an admission count the blocks written to
files below host. Each goal says whether it is met.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from time import perf_counter

from benchmarks.policies.admission import two_levels
from benchmarks.policies.hints import ENDS, EVERY, served_with_hints
from benchmarks.policies.level import Level, keys_of, outcome_of, served, unbounded
from benchmarks.policies.native import NativeLevel
from benchmarks.policies.peers import BELADY, Outcome, peers
from benchmarks.policies.traces import Trace, traces
from benchmarks.row import Row
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.admission import AdaptiveAdmission
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.panel import NATIVE

SIZES = [float(one) for one in os.environ.get("KVLADDER_SIZES", "0.5,1,2,5,10,25,50").split(",")]
"""Percent of the blocks of a trace."""
AGENTS_SIZE = 5.0
LRU = "LRU"
LEVELS = ((2, 10), (5, 25), (5, 50))
"""Sizes of host and of files below it, in percent of the blocks of a trace."""
PROMPT, ROUNDS = 256, 4000
"""Blocks of each prompt, and number of prompts, where costs are measured."""


@dataclass
class ToLRU:
    """A figure of each cell, by name, as a part of LRU's there."""

    ours: dict[str, float] = field(default_factory=dict[str, float])
    best: dict[str, float] = field(default_factory=dict[str, float])
    """Of the peer that is best in this cell by this figure, as one would choose afterwards."""
    bound: dict[str, float] = field(default_factory=dict[str, float])
    """Of Belady's choices."""

    def add(
        self,
        cell: str,
        figure: Callable[[Outcome], float],
        ours: Outcome,
        others: Mapping[str, Outcome],
        bound: Outcome,
        best: Callable[[Iterable[float]], float] = min,
    ) -> None:
        """Add a cell, unless the figure of LRU is 0 there."""
        if lru := figure(others[LRU]):
            self.ours[cell] = figure(ours) / lru
            self.best[cell] = best(map(figure, others.values())) / lru
            self.bound[cell] = figure(bound) / lru

    def row(self, name: str, goal: str, *, is_met: bool, note: str) -> Row:
        """Return a row of the means."""
        ours, best, bound = (mean(one.values()) for one in (self.ours, self.best, self.bound))
        return Row(
            name=f"policies, {name}, to LRU, mean",
            unit="ratio",
            limit=bound,
            peer=best,
            ours=ours,
            ratio=ours / best,
            goal=judged(goal, is_met=is_met),
            note=f"peer: the best of fourteen in each cell, chosen afterwards; limit: Belady{note}",
        )


@dataclass
class Summary:
    """What the rows at the end say of all cells."""

    ratios: dict[str, float] = field(default_factory=dict[str, float])
    to_lru: dict[str, float] = field(default_factory=dict[str, float])
    saved: ToLRU = field(default_factory=ToLRU)
    """Prefill work saved on agents, at the size at which goals are set for them."""
    saved_with_hints: list[float] = field(default_factory=list[float])
    evicted: ToLRU = field(default_factory=ToLRU)
    """Blocks computed again after an eviction."""
    cut: ToLRU = field(default_factory=ToLRU)
    """Requests that an eviction cut short."""
    whole: dict[str, float] = field(default_factory=dict[str, float])
    admitted: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Hits and writes with ``admit: adaptive``, to those with every block."""


def rows() -> Iterator[Row]:
    """Measure every trace at every size; then sum up."""
    summary = Summary()
    for trace in traces():
        yield from _trace(trace, summary)
        yield from _admitted(trace, summary)
    yield from _summed(summary)
    yield from _costs()


def judged(goal: str, *, is_met: bool) -> str:
    """Return a goal with whether it is met."""
    return f"{goal}: {'met' if is_met else 'missed'}"


class Timed(Adaptive):
    """The adaptive policy with a clock around its calls, but for the look-up of handles."""

    spent_s = 0.0

    def _time(self, call: Callable[..., object], *given: object) -> None:
        began_s = perf_counter()
        call(*given)
        self.spent_s += perf_counter() - began_s

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        self._time(self._panel.requested, keys, self._places(keys), False)

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        self._time(self._panel.inserted, handles, keys, request)

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        self._time(self._panel.dropped, handles, evicted)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        self._time(self._panel.push_all, handles, priority)

    def remove_all(self, handles: Sequence[int]) -> None:
        self._time(self._panel.remove_all, handles)


class TimedLevel(Level):
    """A level that adds the time of its walks to that of its policy."""

    def victims(self, count: int) -> list[int]:
        began_s = perf_counter()
        found = super().victims(count)
        assert isinstance(self.policy, Timed)
        self.policy.spent_s += perf_counter() - began_s
        return found


def _costs() -> Iterator[Row]:
    """Measure what an access takes: asked for, pinned or saved, evicted; and the memory."""
    for size in (10_000, 1_000_000):
        random = Random(1)
        keys = [BlockKey(random.randbytes(KEY_BYTES)) for _ in range(3 * size)]
        policy = Timed()
        level = TimedLevel(policy, size, keys)
        for first in range(0, size, PROMPT):
            level.request([*range(first, first + PROMPT)], whole=True)
        policy.spent_s, last = 0.0, len(keys) // PROMPT - 1
        for _ in range(ROUNDS):
            first = PROMPT * int(random.betavariate(0.5, 1.5) * last)
            level.request([*range(first, first + PROMPT)], whole=True)
        access_us = policy.spent_s / (ROUNDS * PROMPT) * 1e6
        yield Row(
            name=f"policies, adaptive, an access, {size:,} blocks",
            unit="us",
            ours=access_us,
            goal=judged("<= 1", is_met=access_us <= 1),
            note=f"{sys.getsizeof(policy) / size:.1f} bytes a block, and 1 for the guard; loops in "
            + ("C" if NATIVE else "Python"),
        )


def _trace(trace: Trace, summary: Summary) -> Iterator[Row]:
    keys, unique, blocks = keys_of(trace), trace.unique, trace.blocks
    sizes = {percent: max(2, int(unique * percent / 100)) for percent in SIZES}
    found, most = peers(trace, [*sizes.values()]), unbounded(trace)
    for percent, size in sizes.items():
        cell, others = f"{trace.name}, {percent:g} %", dict(found[size])
        bound, lru = others.pop(BELADY), others[LRU]
        best = max(others, key=lambda name: others[name].hits)
        level = NativeLevel(size, keys)
        ours = outcome_of(trace, [level.request(prompt) for prompt in trace.prompts])
        ratio = ours.hits / max(1, others[best].hits)
        summary.ratios[cell] = ratio
        summary.to_lru[cell] = ours.hits / max(1, lru.hits)
        if trace.is_agent and percent == AGENTS_SIZE:
            summary.saved.add(cell, lambda one: one.work, ours, others, bound, best=max)
            saved = 0.0
            for told in ((ENDS,), EVERY) if trace.times_s else ((ENDS,),):
                hinted = served_with_hints(NativeLevel(size, keys), trace, told)
                way = (hinted.hits - lru.hits) / max(1, bound.hits - lru.hits)
                yield Row(
                    name=f"policies, {cell}, sessions' hints: {', '.join(told)}",
                    unit="hit ratio",
                    limit=bound.hits / blocks,
                    peer=lru.hits / blocks,
                    ours=hinted.hits / blocks,
                    ratio=way,
                    goal=judged("ratio >= 0.5", is_met=way >= 0.5) if told == EVERY else "",
                    note="peer: LRU without hints; ratio: part of the way from it to the limit; "
                    f"prefill work saved {hinted.work / lru.work:.3f} of LRU's; prefills after "
                    f"evictions {hinted.cut / max(1, lru.cut):.3f} of LRU's",
                )
                saved = hinted.work / lru.work
            summary.saved_with_hints.append(saved)
        summary.evicted.add(cell, lambda one: float(most.hits - one.hits), ours, others, bound)
        summary.cut.add(cell, lambda one: one.cut, ours, others, bound)
        note = f"best peer: {best}; LRU {lru.hits / blocks:.4f}"
        if percent in {min(SIZES), AGENTS_SIZE, max(SIZES)}:
            whole = served(Adaptive(), trace, size, keys, whole=True)
            plain = served(PrioritizedLRU(), trace, size, keys, whole=True)
            summary.whole[cell] = whole.hits / max(1, plain.hits)
            note += f"; whole prompts: {whole.hits / blocks:.4f}, LRU {plain.hits / blocks:.4f}"
        yield Row(
            name=f"policies, {cell}",
            unit="hit ratio",
            limit=bound.hits / blocks,
            peer=others[best].hits / blocks,
            ours=ours.hits / blocks,
            ratio=ratio,
            goal=judged("ratio >= 0.97", is_met=ratio >= 0.97),
            note=note,
        )


def _admitted(trace: Trace, summary: Summary) -> Iterator[Row]:
    """Yield the writes to files below host with ``admit: adaptive``, to those of every block."""
    keys, unique = keys_of(trace), trace.unique
    for near, far in LEVELS:
        host, files = (max(2, unique * percent // 100) for percent in (near, far))
        every = two_levels(trace.prompts, keys, host, files, None)
        ours = two_levels(trace.prompts, keys, host, files, AdaptiveAdmission(files))
        hits = ours.hits / max(1, every.hits)
        summary.admitted.append((hits, ours.writes / max(1, every.writes)))
        yield Row(
            name=f"policies, {trace.name}, admission, host {near} %, files {far} %",
            unit="writes a block",
            peer=every.writes / trace.blocks,
            ours=ours.writes / trace.blocks,
            note=f"hits {ours.hits / trace.blocks:.4f}, {hits:.3f} of those with every block",
        )


def _summed(summary: Summary) -> Iterator[Row]:
    ratios, to_lru = summary.ratios, summary.to_lru
    least, worst = min(ratios, key=ratios.__getitem__), min(to_lru, key=to_lru.__getitem__)
    below = sum(ratio < 0.97 for ratio in ratios.values())
    yield Row(
        name="policies, all cells: to the best peer of each, mean",
        unit="ratio",
        ours=mean(ratios.values()),
        goal=judged(">= 1.03", is_met=mean(ratios.values()) >= 1.03),
    )
    yield Row(
        name="policies, cells below 0.97 of the best peer",
        unit=f"of {len(ratios)}",
        ours=below,
        goal=judged("0", is_met=not below),
        note=f"least {ratios[least]:.3f} at {least}",
    )
    yield Row(
        name="policies, all cells: to LRU, mean",
        unit="ratio",
        ours=mean(to_lru.values()),
        goal=judged(">= 1 in each", is_met=to_lru[worst] >= 0.9995),
        note=f"least {to_lru[worst]:.3f} at {worst}; "
        f"{sum(ratio < 0.9995 for ratio in to_lru.values())} below LRU",
    )
    if summary.admitted:
        hits, writes = (mean(column) for column in zip(*summary.admitted, strict=True))
        yield Row(
            name="policies, admission: writes to those of every block, mean",
            unit="ratio",
            ours=writes,
            goal=judged("<= 0.94, hits >= 0.996", is_met=writes <= 0.94 and hits >= 0.996),
            note=f"hits {hits:.3f}, least {min(summary.admitted)[0]:.3f}",
        )
    evicted, cut = (mean(one.ours.values()) for one in (summary.evicted, summary.cut))
    if summary.saved.ours:
        saved = mean(summary.saved.ours.values())
        each = ", ".join(f"{one:.3f}" for one in summary.saved.ours.values())
        name = f"prefill work saved at {AGENTS_SIZE:g} % on agents"
        yield summary.saved.row(name, ">= 1.10", is_met=saved >= 1.10, note=f"; {each}")
    if summary.saved_with_hints:
        yield Row(
            name="policies, the same, told sessions' hints",
            unit="ratio",
            ours=mean(summary.saved_with_hints),
            note=", ".join(f"{one:.3f}" for one in summary.saved_with_hints),
        )
    again = "blocks computed again after an eviction"
    yield summary.evicted.row(again, "<= 0.5", is_met=evicted <= 0.5, note="")
    agents = ", ".join(f"{name} {summary.cut.ours[name]:.3f}" for name in summary.saved.ours)
    yield summary.cut.row(
        "prefills that an eviction caused", "<= 0.5", is_met=cut <= 0.5, note=f"; {agents}"
    )
    if summary.whole:
        worst = min(summary.whole, key=summary.whole.__getitem__)
        yield Row(
            name="policies, whole prompts at once: to LRU, mean",
            unit="ratio",
            ours=mean(summary.whole.values()),
            note=f"least {summary.whole[worst]:.3f} at {worst}",
        )
