"""Runs a client against both servers in turns, and compares what it got from them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from benchmarks.clients.programs import Program, Summary
from benchmarks.clients.proxy import Exchange, RecordingProxy
from benchmarks.clients.servers import ALONE, OURS

CLIENT_S_MAX = 300.0
SETTLED_TURNS = 2
"""Turns whose requests the limit on the first token does not cover."""
FACTOR, ADDED_S = 1.1, 0.002
"""The limit: at most 1.1 times the time without a cache, plus 2 ms."""


class ClientFailed(Exception):
    """Raised if a client exits with an error or takes too long, with its last lines."""


class Resettable(Protocol):
    """A server, as far as turns use it."""

    port: int

    def reset(self) -> None:
        """Drop the engine's own prefix cache."""
        ...

    def freeze(self) -> None:
        """Stop all processes of the server."""
        ...

    def thaw(self) -> None:
        """Let the processes go on."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a client against one server."""

    summary: Summary
    exchanges: Sequence[Exchange]


@dataclass(slots=True)
class Pairs:
    """Requests with the same prompt from two runs, one after the other."""

    pairs: int = 0
    differ: int = 0
    """Pairs with different answers."""
    late: int = 0
    """Pairs in which the second request's first token is later than the limit allows."""
    unpaired: int = 0

    def __iadd__(self, other: Pairs) -> Pairs:
        self.pairs += other.pairs
        self.differ += other.differ
        self.late += other.late
        self.unpaired += other.unpaired
        return self


Pair = tuple[Exchange, Exchange]


def paired(first: Iterable[Exchange], second: Iterable[Exchange]) -> tuple[list[Pair], int]:
    """Return the pairs of two runs, and the number of requests without one.

    The n-th requests for the same are a pair. Requests with errors stay without one.
    """
    waiting: dict[str, list[Exchange]] = defaultdict(list)
    pairs: list[Pair] = []
    unpaired = 0
    for one in first:
        if one.is_whole:
            waiting[one.asked].append(one)
        else:
            unpaired += 1
    for two in second:
        if two.is_whole and waiting[two.asked]:
            pairs.append((waiting[two.asked].pop(0), two))
        else:
            unpaired += 1
    return pairs, unpaired + sum(map(len, waiting.values()))


def compared(first: Iterable[Exchange], second: Iterable[Exchange]) -> Pairs:
    """Compare two runs."""
    pairs, unpaired = paired(first, second)
    return Pairs(
        pairs=len(pairs),
        differ=sum(one.answer != two.answer for one, two in pairs),
        late=sum(is_late(one.first_s, two.first_s) for one, two in pairs),
        unpaired=unpaired,
    )


def is_late(alone_s: float, ours_s: float) -> bool:
    """Return whether a first token breaks the limit."""
    return ours_s > FACTOR * alone_s + ADDED_S


@dataclass(slots=True)
class Outcome:
    """All turns of one client."""

    title: str
    version: str = ""
    turns: dict[str, list[Turn]] = field(default_factory=lambda: {ALONE: [], OURS: []})
    failure: str = ""

    def answers(self) -> Pairs:
        """Compare the answers of both servers in all turns."""
        found = Pairs()
        for alone, ours in zip(self.turns[ALONE], self.turns[OURS], strict=True):
            found += compared(alone.exchanges, ours.exchanges)
        return found

    def late(self) -> Pairs:
        """Compare both servers after the second turn."""
        found = Pairs()
        after = [self.turns[name][SETTLED_TURNS:] for name in (ALONE, OURS)]
        for alone, ours in zip(*after, strict=True):
            found += compared(alone.exchanges, ours.exchanges)
        return found

    def late_in_the_middle(self) -> Pairs:
        """Compare each request's median times on both servers, after the second turn.

        Other programs on the machine disturb single requests; a median shows what repeats.
        """
        times: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
        after = [self.turns[name][SETTLED_TURNS:] for name in (ALONE, OURS)]
        for alone, ours in zip(*after, strict=True):
            seen: Counter[str] = Counter()
            for one, two in paired(alone.exchanges, ours.exchanges)[0]:
                seen[one.asked] += 1
                of_alone, of_ours = times.setdefault((one.asked, seen[one.asked]), ([], []))
                of_alone.append(one.first_s)
                of_ours.append(two.first_s)
        late = sum(is_late(median(one), median(two)) for one, two in times.values())
        return Pairs(pairs=len(times), late=late)

    def noise(self) -> Pairs:
        """Compare vLLM alone with itself: each turn after the second one with its predecessor."""
        alone = self.turns[ALONE]
        found = Pairs()
        for before, after in zip(alone[SETTLED_TURNS - 1 :], alone[SETTLED_TURNS:], strict=False):
            found += compared(before.exchanges, after.exchanges)
        return found

    def figure(self, side: str, name: str) -> float:
        """Return the median over the turns after the first of one of the client's figures."""
        found: list[float] = [getattr(turn.summary, name) for turn in self.turns[side][1:]]
        return median(found)

    def cached(self, side: str) -> float:
        """Return the share of prompt tokens that came from a cache, after the first turn."""
        exchanges = [one for turn in self.turns[side][1:] for one in turn.exchanges]
        asked = sum(one.prompt_tokens for one in exchanges)
        return sum(one.cached_tokens for one in exchanges) / max(asked, 1)


def run_once(program: Program, server: Resettable, folder: Path, out: str) -> Turn:
    """Run a client once against a server whose own prefix cache is empty.

    Raises
    ------
    ClientFailed
        The client exits with an error, or takes too long.
    """
    server.reset()
    (folder / out).mkdir(parents=True)
    log = folder / out / "log"
    with RecordingProxy(server.port) as proxy:
        command = program.command(proxy.url, out)
        with log.open("w") as written:
            child = subprocess.Popen(
                command,
                cwd=folder,
                env=program.environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
            try:
                code = child.wait(CLIENT_S_MAX)
            except subprocess.TimeoutExpired as error:
                raise ClientFailed(f"did not end in {CLIENT_S_MAX:.0f} s") from error
            finally:
                child.kill()
                child.wait()
        if code != 0:
            raise ClientFailed(f"exited with {code}: {last_words(log)}")
        exchanges = proxy.exchanges()
    listed = json.dumps([asdict(one) for one in exchanges], indent=0)
    (folder / out / "exchanges.json").write_text(listed)
    return Turn(program.read(folder / out), exchanges)


def last_words(log: Path) -> str:
    """Return the last lines of a log that name an error, else its last lines."""
    lines = [line.strip(" │╭╰╮╯─•\t\r") for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if "error" in line.lower()]
    return " / ".join(line[:200] for line in (errors or lines)[-3:])


def in_turns(
    program: Program, servers: Mapping[str, Resettable], folder: Path, turns: int, outcome: Outcome
) -> None:
    """Run a client ``turns`` times against each server; the order changes with each turn.

    All servers are frozen, and only the one that is asked runs.
    """
    for number in range(turns):
        for name in sorted(servers, reverse=number % 2 == 1):
            out = f"out/{program.title.replace(' ', '-')}/{number + 1}-{name}"
            servers[name].thaw()
            try:
                outcome.turns[name].append(run_once(program, servers[name], folder, out))
            finally:
                servers[name].freeze()
