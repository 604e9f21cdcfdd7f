"""Compares fixed and rebalanced memory of pools with two windows, under a load that changes.

There is no model and there are no bytes. Requests begin, are computed in parts, and continue one
token at a time; if there is no room, the youngest is preempted. Only counts are measured, so the
results do not depend on the machine. Requests are short at first, when a window needs as much
memory as full attention. Then they are long, and at last short again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.row import Row
from kvladder.device.cache import DeviceCache
from kvladder.device.opening import open_device
from kvladder.errors import OutOfBlocks
from kvladder.gpu.requests.requests import Request
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.plan import CachePlan

CONTEXT, BLOCK, STEP = 512, 4, 64
GENERATED = 30
MEMORY = "2 MiB"
WINDOWS = (None, *[64] * 5)
"""Windows of the layers, as in Gemma 3; None is full attention."""


class Mix(NamedTuple):
    """A kind of requests that is served for a while."""

    tokens: tuple[int, int]
    """Minimum and maximum number of tokens of a prompt."""
    at_once: int
    requests: int
    texts: int
    """Number of different first halves of prompts; 0 if all prompts differ."""


CHANGING = (Mix((30, 60), 30, 300, 0), Mix((300, 480), 13, 100, 0), Mix((30, 60), 30, 300, 0))
SHARED = (Mix((60, 120), 8, 600, 48), Mix((300, 480), 4, 150, 6), Mix((60, 120), 8, 600, 48))


class Found(NamedTuple):
    """The counts after a load was served."""

    preempted: int
    cached: int
    """Number of prompt tokens found in the cache, and so not computed."""
    prompts: int
    """Number of all prompt tokens."""


@dataclass
class _Running:
    request: Request
    left: int
    """Number of tokens that it still generates."""


def opened(*, rebalance: bool) -> DeviceCache:
    """Open pools of a model with these windows, without tiers."""
    layers = [Layer(f"{at}.kv", 2, 8, "float32", window) for at, window in enumerate(WINDOWS)]
    plan = CachePlan(layers, block_tokens=BLOCK, max_tokens=CONTEXT, step=STEP)
    source = {"gpu": {"memory": MEMORY, "rebalance": rebalance}}
    return open_device(source, plan, fields={"model": "bench"})


def serve(cache: DeviceCache, mixes: Sequence[Mix]) -> Found:
    """Serve all requests of each mix in turn, until all have ended."""
    load = Load(cache)
    for mix in mixes:
        load.serve(mix)
    return Found(load.preempted, load.cached, load.prompts)


class Load:
    """An engine that only asks for blocks."""

    def __init__(self, cache: DeviceCache) -> None:
        self.preempted = self.cached = self.prompts = 0
        self._cache, self._requests = cache, cache.requests
        self._draw = random.Random(1)
        self._running: list[_Running] = []
        self._waiting: list[tuple[list[int], int]] = []

    def serve(self, mix: Mix) -> None:
        """Serve all requests of a mix."""
        self._waiting = [(tokens, GENERATED) for tokens in self._prompts(mix)]
        self.prompts += sum(len(tokens) for tokens, _ in self._waiting)
        while self._waiting or self._running:
            self._cache.poll()
            self._admit(mix.at_once)
            for one in list(self._running):
                if one in self._running:
                    self._go_on(one)

    def _prompts(self, mix: Mix) -> Iterator[list[int]]:
        for _ in range(mix.requests):
            text = (
                random.Random(f"{mix.tokens} {self._draw.randrange(mix.texts)}")
                if mix.texts
                else self._draw
            )
            count = text.randint(*mix.tokens)
            first = [text.randrange(1000) for _ in range(count // 2)]
            yield [*first, *(self._draw.randrange(1000) for _ in range(count - len(first)))]

    def _admit(self, most: int) -> None:
        while self._waiting and len(self._running) < most:
            tokens, left = self._waiting[-1]
            try:
                request = self._requests.begin(tokens, room=STEP)
            except OutOfBlocks:
                return
            self._waiting.pop()
            self._requests.copied(request)
            self._running.append(_Running(request, left))
            if left == GENERATED:
                self.cached += request.cached

    def _go_on(self, one: _Running) -> None:
        """Compute the next part of its prompt or its next token; preempt the youngest if needed."""
        request, end = one.request, one.request.computed + STEP
        while one in self._running:
            try:
                if request.computed == len(request.tokens):
                    self._requests.append(request, [self._draw.randrange(1000)])
                    self._requests.copied(request)
                    one.left -= 1
                self._requests.extend(request, min(end, len(request.tokens)))
            except OutOfBlocks:
                self._preempt(self._running.pop())
                continue
            self._requests.commit(request, min(end, len(request.tokens)))
            if not one.left:
                self._running.remove(one)
                self._requests.release(request)
            return

    def _preempt(self, one: _Running) -> None:
        self.preempted += 1
        self._waiting.append((list(one.request.tokens), one.left))
        self._requests.release(one.request)


def rows() -> Iterable[Row]:
    """Measure preemptions and cached prompt tokens, without and with rebalancing."""
    for name, mixes in (("short, long, short", CHANGING), ("the same with beginnings", SHARED)):
        found: list[Found] = []
        moved = 0
        for rebalance in (False, True):
            with opened(rebalance=rebalance) as cache:
                found.append(serve(cache, mixes))
                moved = cache.stats().get("rebalance", {}).get("moved", 0)
        fixed, balanced = found
        note = f"the peer is a division by need at the start; {moved} regions of 64 moved"
        if fixed.preempted:
            yield Row(
                name=f"rebalancing, {name}: preemptions",
                unit="requests",
                peer=fixed.preempted,
                ours=balanced.preempted,
                goal="ratio <= 0.5",
                note=note,
            )
        if fixed.cached:
            yield Row(
                name=f"rebalancing, {name}: prompts found",
                unit="%",
                peer=100 * fixed.cached / fixed.prompts,
                ours=100 * balanced.cached / balanced.prompts,
                note=note,
            )
