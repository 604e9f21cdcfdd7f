"""Measures what hints of agents bring: hits and the time to the first token, beside LRU.

Agents call tools and come back; between their turns other agents and single requests come, more
than host memory holds. The limit is Belady's optimum of the same size, which knows all requests.

First the hits of the real levels, sessions and executor of hints without an engine, for many
agents, in simulated time, so that each run gives the same. Then times of real vLLM servers, with
few agents. They get the same requests, one after the other, each server in turn: one with kvladder
and the order of eviction ``prioritized-lru``, and one with ``adaptive`` and the hints of
``examples/agent.py``. Their own prefix caches are emptied after each request, so that all hits are
kvladder's. One stack has host alone. The other has files below it that hold everything: there a
prefetch saves the time in which blocks come up. All agents send one cache salt, and ``limits`` let
its pins fill host, as those of the bare levels do: by default they may take a quarter of it. All
times are of one machine and one run: compare them side by side.

``KVLADDER_AGENTS`` is the number of agents at vLLM, 0 for none. ``KVLADDER_AGENTS_FILES=0`` leaves
the second stack out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from benchmarks.clients.inputs import BLOCK_TOKENS, MODEL, make_model
from benchmarks.clients.servers import BenchServer, end
from benchmarks.row import Row
from examples.agent import Agent, Engine, action
from kvladder.hints import HintExecutor
from kvladder.keys import KeyScheme
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.belady import belady
from kvladder.policy.eviction import EvictionPolicy, PrioritizedLRU
from kvladder.policy.fetch_cost import ANYTHING
from kvladder.testing.redisserver import free_ports
from kvladder.testing.sim import SimLoop
from kvladder.testing.stacks import SimCache
from tests.patience import until
from tests.vllm.harness import connector
from tests.vllm.server import TOKEN

AGENTS: Final = int(os.environ.get("KVLADDER_AGENTS", "12"))
FILES: Final = os.environ.get("KVLADDER_AGENTS_FILES", "1") != "0"
MANY: Final = 240
AT_ONCE: Final = 6
"""Number of agents that are at work at any time, among many."""
FEW_AT_ONCE: Final = 3
"""The same at vLLM."""
TURNS: Final = (3, 7)
ANSWER: Final = 8
OVER: Final = 4
"""Tokens of each prompt beyond whole blocks: answer included, they are less than a block."""
SYSTEM: Final = 3 * BLOCK_TOKENS
"""Tokens of the system prompt that agents share."""
TASK, RESULT, SINGLE = (6, 14), (2, 6), (8, 20)
"""Blocks of a task, of a tool's result, and of a single request."""
TOOL_S, SINGLE_S = 30.0, 6.0
"""Mean times that a tool takes, and between two single requests: they order the requests."""
BLOCKS: Final = 128
"""Blocks of host memory, for many agents."""
FEW_BLOCKS: Final = 64
PIN_S: Final = 3 * TOOL_S
"""Time for which agents pin; one call of a tool in twenty takes longer."""
PINNED_S: Final = 3600.0
"""The same at vLLM, longer than the run: the requests follow each other without their pauses."""
LRU, HINTED = "lru", "hints"
GOAL: Final = "ratio >= 0.5 of the way from LRU to Belady"


class Turn(NamedTuple):
    """A request: an agent's next turn, or a single request with a number below zero."""

    agent: int
    words: list[int]
    """New tokens at the end of the prompt: a task, a tool's result, or the whole prompt."""
    is_last: bool
    time_s: float


def script(agents: int, at_once: int, seed: int = 3) -> list[Turn]:
    """Return the requests of so many agents, and single ones, in the order of their times.

    Single requests are as frequent for each agent at work as if there were ``AT_ONCE``.
    """
    single_s = SINGLE_S * AT_ONCE / at_once
    draw, number, singles = Random(seed), count(), count(1)
    system = words(draw, SYSTEM)
    events: list[tuple[float, int, int]] = [(0.0, next(number), -1)]
    left: dict[int, int] = {}
    for agent in range(min(at_once, agents)):
        heappush(events, (draw.uniform(0, TOOL_S), next(number), agent))
    begun, turns = min(at_once, agents), list[Turn]()
    while events:
        now_s, _, agent = heappop(events)
        if agent < 0:
            if any(one >= 0 for *_, one in events):
                heappush(events, (now_s + draw.expovariate(1 / single_s), next(number), -1))
            size = draw.randint(*SINGLE) * BLOCK_TOKENS + OVER
            turns.append(Turn(-next(singles), words(draw, size), True, now_s))
            continue
        if agent not in left:
            left[agent] = draw.randint(*TURNS)
            new = system + words(draw, draw.randint(*TASK) * BLOCK_TOKENS + OVER)
        else:
            new = words(draw, draw.randint(*RESULT) * BLOCK_TOKENS - ANSWER)
        left[agent] -= 1
        turns.append(Turn(agent, new, not left[agent], now_s))
        if left[agent]:
            heappush(events, (now_s + draw.expovariate(1 / TOOL_S), next(number), agent))
        elif begun < agents:
            heappush(events, (now_s + draw.uniform(0, TOOL_S), next(number), begun))
            begun += 1
    return turns


def words(draw: Random, size: int) -> list[int]:
    """Return random tokens."""
    return draw.choices(range(10, 8000), k=size)


def blocks_of(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Return the blocks of each prompt that may be cached as numbers, and how many there are."""
    known: dict[bytes, int] = {}
    found: list[list[int]] = []
    for prompt in prompts:
        digest, blocks = hashlib.sha256(), list[int]()
        for at in range(0, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            digest.update(str(prompt[at : at + BLOCK_TOKENS]).encode())
            blocks.append(known.setdefault(digest.digest(), len(known)))
        found.append(blocks)
    return found, len(known)


@dataclass(slots=True)
class Side:
    """One server, the agents that work with it, and what its requests found."""

    server: BenchServer
    is_hinted: bool
    agents: dict[int, Agent] = field(default_factory=dict[int, Agent])
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    answers: list[list[int]] = field(default_factory=list[list[int]])
    hits: list[int] = field(default_factory=list[int])
    """Blocks of each prompt that came from the cache."""
    first_s: list[float] = field(default_factory=list[float])

    def take(self, turn: Turn) -> None:
        """Send the request, with its hints if this side has them; keep what it found."""
        hints = f"http://127.0.0.1:{self.server.hints_port}"
        url = f"http://127.0.0.1:{self.server.port}"
        engine = Engine(url, MODEL, hints=hints, token=TOKEN)
        if turn.agent not in self.agents:
            agent = Agent(engine, turn.words, salt="agents", expects_s=0.0, pin_s=PINNED_S)
            self.agents[turn.agent] = agent
        elif self.is_hinted:
            agent = self.agents[turn.agent]
            agent.call(lambda: turn.words)
            until(lambda: self.server.hints()["in_flight"] == 0, every_s=0.02)
        else:
            agent = self.agents[turn.agent]
            agent.prompt += turn.words
        self.prompts.append([*agent.prompt])
        if self.is_hinted and turn.agent >= 0:
            answer = agent.think(is_last=turn.is_last)
        else:
            answer = engine.ask(agent.prompt, salt="agents", tokens=ANSWER)
            agent.prompt += answer.tokens
        self.answers.append(answer.tokens)
        self.hits.append(answer.cached // BLOCK_TOKENS)
        self.first_s.append(answer.first_s)


def stack(folder: Path, name: str, *, files: bool) -> tuple[dict[str, Any], int]:
    """Return the settings of one side, and the port of its cache."""
    (port,) = free_ports(1)
    policy = "adaptive" if name == HINTED else "prioritized-lru"
    tiers: list[dict[str, Any]] = [{"type": "host", "policy": policy}]
    if files:
        path = str(folder / f"kv-{name}")
        tiers.append({"type": "files", "path": path, "capacity": "2 GiB", "when": "commit"})
    http = {"listen": f"127.0.0.1:{port}", "token": TOKEN}
    return {
        "arena": {"size": FEW_BLOCKS * BLOCK_BYTES},
        "tiers": tiers,
        "http": http,
        "fetch": {"deadline": "1 m"},
        "limits": {"raised": "100 %", "raised_tenant": "100 %"},
    }, port


def served(folder: Path, names: Sequence[str], *, files: bool) -> dict[str, Side]:
    """Start a server for each side, one after the other; all are frozen until they are asked."""
    sides: dict[str, Side] = {}
    try:
        for name in names:
            print(f"starting vLLM, {name}", file=sys.stderr, flush=True)
            settings, port = stack(folder, name, files=files)
            transfer = shlex.quote(json.dumps(connector(settings)))
            server = BenchServer(folder, name, "--kv-transfer-config", transfer)
            server.hints_port = port
            sides[name] = Side(server, name == HINTED)
            server.ready()
            server.freeze()
    except BaseException:
        end({name: side.server for name, side in sides.items()})
        raise
    return sides


def run(
    folder: Path, names: Sequence[str], turns: Sequence[Turn], *, files: bool
) -> dict[str, Side]:
    """Send all requests to all sides, which take turns; return what they found."""
    sides = served(folder, names, files=files)
    try:
        for number, turn in enumerate(turns):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                side = sides[name]
                side.server.thaw()
                try:
                    side.take(turn)
                    side.server.reset()  # once no copy holds its blocks
                finally:
                    side.server.freeze()
    finally:
        end({name: side.server for name, side in sides.items()})
    one, *others = sides.values()
    assert all(one.prompts == other.prompts for other in others), "an answer differs"
    assert all(one.answers == other.answers for other in others), "an answer differs"
    return sides


class Bare:
    """The levels of a cache of ``BLOCKS`` slots without an engine, and its agents."""

    def __init__(self, cache: SimCache, *, is_hinted: bool) -> None:
        self._manager, self._is_hinted, self._sent = cache.manager, is_hinted, count()
        self._hints = HintExecutor.of(cache.manager)
        self._keys = KeyScheme(cache.manager.namespace, block_tokens=BLOCK_TOKENS)
        self.prompts: dict[int, list[int]] = {}

    async def take(self, turn: Turn) -> int:
        """Serve a request; return how many of its blocks were there."""
        manager, prompt = self._manager, self.prompts.setdefault(turn.agent, [])
        session = f"{turn.agent}" if self._is_hinted and turn.agent >= 0 else None
        prompt += turn.words
        keys = self._keys.chain(prompt[:-1], parent=self._keys.root())
        fetch = manager.fetch(keys, saves=ANYTHING, session=session)
        while not fetch.done:  # noqa: ASYNC110 - as an engine asks
            await asyncio.sleep(0.01)
        found = len(fetch.slots)
        fetch.release()
        manager.save(keys, session=session).commit()
        if session is not None:
            manager.sessions.use(session, [keys])
            if turn.is_last:
                manager.end_session(session)
            else:
                pin = action("pin", ttl_s=PIN_S, session=session)
                sent = {"message_id": f"{next(self._sent)}", "actions": [pin]}
                self._hints.apply({"protocol_version": "0.1", **sent})
        prompt += [1] * ANSWER
        return found


def hits(
    turns: Sequence[Turn], policy: EvictionPolicy, *, is_hinted: bool
) -> tuple[int, list[list[int]]]:
    """Return the blocks that a bare cache served in simulated time, and all prompts."""

    async def serve() -> tuple[int, list[list[int]]]:
        cache = await SimCache.open(slots=BLOCKS, policy=policy)
        bare, begun_s = Bare(cache, is_hinted=is_hinted), asyncio.get_running_loop().time()
        found, prompts = 0, list[list[int]]()
        for turn in turns:
            now_s = asyncio.get_running_loop().time() - begun_s
            await asyncio.sleep(max(0.0, turn.time_s - now_s))
            found += await bare.take(turn)
            prompts.append(bare.prompts[turn.agent][:-ANSWER])
        await cache.aclose()
        return found, prompts

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        return runner.run(serve())


def rows() -> Iterator[Row]:
    """Count hits of a bare cache, then measure vLLM with both stacks."""
    turns = script(MANY, AT_ONCE)
    lru, prompts = hits(turns, PrioritizedLRU(), is_hinted=False)
    note = f"{MANY} agents, {AT_ONCE} at once; {len(turns)} requests"
    for policy, is_hinted in (
        (Adaptive(), False),
        (PrioritizedLRU(), True),
        (Adaptive(), True),
    ):
        found, _ = hits(turns, policy, is_hinted=is_hinted)
        name = "adaptive" if isinstance(policy, Adaptive) else "prioritized-lru"
        what = f"{name}, {'hints' if is_hinted else 'no hints'}, no engine"
        yield compared(what, prompts, BLOCKS, lru, found, note)
    if not AGENTS:
        return
    turns = script(AGENTS, FEW_AT_ONCE)
    later = [n for n, turn in enumerate(turns) if turn.agent >= 0 and seen(turns, n)]
    with tempfile.TemporaryDirectory(prefix="kvladder-agents-") as name:
        folder = Path(name)
        make_model(folder / MODEL)
        sides = run(folder, (LRU, HINTED), turns, files=False)
        side = {name: sum(side.hits) for name, side in sides.items()}
        note = f"{AGENTS} agents, {FEW_AT_ONCE} at once; {len(turns)} requests"
        prompts = sides[LRU].prompts
        yield compared("adaptive, hints, vLLM", prompts, FEW_BLOCKS, side[LRU], side[HINTED], note)
        yield from times("host only", sides, later)
        if FILES:
            sides = run(folder, (LRU, HINTED), turns, files=True)
            yield from times("host and files", sides, later)


def compared(
    what: str, prompts: Sequence[Sequence[int]], slots: int, lru: int, ours: int, note: str
) -> Row:
    """Return the row of hits as shares of all blocks; the ratio is the way from LRU to Belady."""
    blocks, unique = blocks_of(prompts)
    asked = sum(map(len, blocks)) / 100
    best = belady(blocks, unique, slots)
    return Row(
        name=f"agents, {what}: hits, peer LRU, limit Belady",
        unit="%",
        limit=best / asked,
        peer=lru / asked,
        ours=ours / asked,
        ratio=(ours - lru) / max(best - lru, 1),
        goal=GOAL,
        note=f"{note}; {unique} blocks, {slots} in host",
    )


def times(where: str, sides: dict[str, Side], later: Sequence[int]) -> Iterator[Row]:
    """Yield the times to the first token of agents' turns after the first, beside LRU."""
    figures: dict[str, Callable[[Sequence[float]], float]] = {"median": median, "mean": fmean}
    for kind, figure in figures.items():
        got = {name: 1e3 * figure([side.first_s[n] for n in later]) for name, side in sides.items()}
        note = f"{len(later)} turns of agents after their first"
        yield Row(
            name=f"agents, {where}: {kind} time to first token, peer LRU",
            unit="ms", peer=got[LRU], ours=got[HINTED], note=note,
        )  # fmt: skip


def seen(turns: Sequence[Turn], number: int) -> bool:
    """Return whether a request is not the first one of its agent."""
    return any(turn.agent == turns[number].agent for turn in turns[:number])


BLOCK_BYTES: Final = 6 * 2 * BLOCK_TOKENS * 384 * 4
"""Six layers of keys and values, 384 float32 each."""
