"""Traces of requests: those of a folder, in Mooncake's format, and generated ones.

Mooncake's format is JSON lines with ``hash_ids``, one for each block of 512 tokens; an id stands
for its whole prefix. The generators have fixed seeds.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import log
from pathlib import Path
from random import Random
from typing import NamedTuple

Prompt = list[int]
FOLDER = Path(os.environ.get("KVLADDER_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
"""Folder of recorded traces; it may be missing."""


class Trace(NamedTuple):
    """Requests in the order of their times; each is a list of blocks, numbered from 0."""

    name: str
    prompts: list[Prompt]
    is_agent: bool
    times_s: Sequence[float] = ()
    """Time of each request; empty if the trace has none."""
    sessions: Sequence[int] = ()
    """Session of each request; empty if the trace does not say it."""

    @property
    def blocks(self) -> int:
        """Number of blocks that are asked for."""
        return sum(map(len, self.prompts))

    @property
    def unique(self) -> int:
        """Number of different blocks."""
        return len({block for prompt in self.prompts for block in prompt})


def traces(folder: Path = FOLDER) -> Iterator[Trace]:
    """Yield the traces of a folder, if it is there, and then the generated ones."""
    for path in sorted(folder.glob("*.jsonl*")) if folder.is_dir() else ():
        yield read(path)
    for number, (name, make) in enumerate(GENERATORS.items(), 101):
        if name == "agents":
            yield agent_trace(Random(number))
        else:
            yield Trace(name, renumbered(make(Random(number))), is_agent=False)


def read(path: Path) -> Trace:
    """Return the trace in a file; lines that are no request are an error that names the line."""
    prompts: list[Prompt] = []
    times_s: list[float] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                request = json.loads(line)
                prompts.append([int(one) for one in request["hash_ids"]])
                if "timestamp" in request:
                    times_s.append(float(request["timestamp"]) / 1000)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: no request: {error!r}") from error
    name = path.name.partition(".")[0]
    if len(times_s) != len(prompts):
        times_s = []
    return Trace(name, renumbered(prompts), name.startswith("agent"), times_s)


def renumbered(prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts with their blocks numbered in the order of appearance."""
    number: dict[int, int] = {}
    return [[number.setdefault(block, len(number)) for block in prompt] for prompt in prompts]


class _Blocks:
    """Gives out blocks that were never used."""

    def __init__(self) -> None:
        self._next = count()

    def new(self, blocks: int) -> Prompt:
        return [next(self._next) for _ in range(blocks)]


Timed = list[tuple[float, int, Prompt]]
"""Time in seconds, session and blocks of requests."""


def agents(random: Random, hours: float = 0.7, rate: float = 300) -> list[Prompt]:
    """Return the prompts of ``agent_requests``."""
    return [prompt for _, _, prompt in agent_requests(random, hours, rate)]


def agent_trace(random: Random) -> Trace:
    """Return the trace of agents with the times and the sessions of its requests."""
    times_s, sessions, prompts = zip(*agent_requests(random), strict=True)
    return Trace("agents", renumbered([*prompts]), True, times_s, sessions)


def agent_requests(random: Random, hours: float = 0.7, rate: float = 300) -> Timed:
    """Return requests of coding agents: tool loops over a growing context, pauses, forks."""
    blocks, requests, numbers = _Blocks(), Timed(), count()
    systems = [blocks.new(random.randint(15, 35)) for _ in range(5)]

    def session(then_s: float, context: Prompt, depth: int) -> None:
        context, number = [*context], next(numbers)
        turns = 1 if random.random() < 0.5 else 2 + int(random.expovariate(0.3))
        for _ in range(turns):
            for _ in range(1 + int(random.expovariate(1 / 8))):
                context += blocks.new(int(random.lognormvariate(log(1.2), 0.9)))
                tail = blocks.new(random.randint(0, 1))  # the last block is seldom full
                requests.append((then_s, number, [*context, *tail]))
                if not depth and random.random() < 0.03:
                    session(then_s + 2, systems[-1], 1)
                then_s += 2 + random.lognormvariate(log(4.0), 1.3)
                if len(context) > 300:  # compaction
                    context = context[:20] + blocks.new(15)
            if random.random() < 0.08:  # an edit of an earlier turn
                context = context[: len(context) // 2]
            then_s += random.lognormvariate(log(90), 1.9)

    then_s = 0.0
    while (then_s := then_s + random.expovariate(rate / 3600)) < hours * 3600:
        system = random.choices(systems[:-1], [5, 3, 2, 1])[0]
        session(then_s, system + blocks.new(random.randint(2, 20)), 0)
    kept = [request for request in requests if request[0] < hours * 3600]
    return sorted(kept, key=lambda request: request[0])


def chats(random: Random, users: int = 1500, requests: int = 14_000) -> list[Prompt]:
    """Chats that grow; some users come often, and all share one short system prompt."""
    blocks = _Blocks()
    system = blocks.new(3)
    history: dict[int, Prompt] = {}
    found: list[Prompt] = []
    weights = [1 / (1 + user) ** 0.7 for user in range(users)]
    for user in random.choices(range(users), weights, k=requests):
        if user not in history or random.random() < 0.12 or len(history[user]) > 120:
            history[user] = [*system]
        history[user] += blocks.new(1 + int(random.expovariate(0.5)))
        found.append([*history[user]])
    return found


def documents(random: Random, requests: int = 9000, documents: int = 1600) -> list[Prompt]:
    """Questions about long documents; which ones are popular drifts."""
    blocks = _Blocks()
    texts = [blocks.new(max(6, int(random.gauss(50, 18)))) for _ in range(documents)]
    order = [*range(documents)]
    weights = [1 / (1 + rank) ** 0.85 for rank in range(documents)]
    found: list[Prompt] = []
    for at in range(requests):
        if at % 40 == 0:
            for _ in range(8):
                one, other = random.randrange(documents), random.randrange(documents)
                order[one], order[other] = order[other], order[one]
        text = texts[order[random.choices(range(documents), weights)[0]]]
        found.append(text + blocks.new(random.randint(1, 3)))
    return found


def loops(random: Random, requests: int = 8000, prompts: int = 1200) -> list[Prompt]:
    """A batch job that walks the same prompts again and again, with chats in between."""
    blocks = _Blocks()
    walked = [blocks.new(random.randint(25, 45)) for _ in range(prompts)]
    open_: list[Prompt] = []
    found: list[Prompt] = []
    walk = 0
    for _ in range(requests):
        if random.random() < 0.65:
            found.append(walked[walk % prompts] + blocks.new(1))
            walk += 1
        else:
            if open_ and random.random() < 0.55:
                chat = open_[random.randrange(max(0, len(open_) - 50), len(open_))]
                chat += blocks.new(2)
            else:
                chat = blocks.new(7)
                open_.append(chat)
            found.append([*chat])
    return found


def scans(random: Random, requests: int = 9000) -> list[Prompt]:
    """Tools with a few prompts that recur for ever, among prompts that never come again."""
    blocks = _Blocks()
    tools = [blocks.new(random.randint(4, 30)) for _ in range(400)]
    weights = [1 / (1 + rank) for rank in range(len(tools))]
    found: list[Prompt] = []
    for _ in range(requests):
        if random.random() < 0.6:
            found.append(random.choices(tools, weights)[0] + blocks.new(1))
        else:
            found.append(blocks.new(random.randint(5, 60)))
    return found


def shifts(random: Random) -> list[Prompt]:
    """A third each of agents, documents and loops: what serves best changes twice."""
    parts = [agents(random, 0.35), documents(random, 3500, 900), loops(random, 3500, 700)]
    found: list[Prompt] = []
    for part in parts:
        first = 1 + max((block for prompt in found for block in prompt), default=0)
        found += [[block + first for block in prompt] for prompt in part]
    return found


GENERATORS: dict[str, Callable[[Random], list[Prompt]]] = {
    "agents": agents, "chats": chats, "documents": documents, "loops": loops, "scans": scans,
    "shifts": shifts,
}  # fmt: skip
