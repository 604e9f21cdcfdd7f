"""What ``policy: adaptive`` costs where blocks have bytes: requests that load and save, beside LRU.

Two caches of the same size serve the same prompts in turns: look up, load what is there, save the
rest. Every request asks for 64 blocks, half of them new, so hits are the same with both policies
but for chance. The peer is the cache with LRU. Blocks of 64 KiB are the smallest that models have;
with larger ones the copies weigh more.

The note has the time in the policy itself. Telling it one request of 64 blocks takes some 78 us: 67
in its shadows (1 us a block), 11 for the places of the blocks; saved and evicted blocks take 30 us
more. The level's own steps are the same with both.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.row import Row
from kvladder import Layout, open_cache
from kvladder.config.registry import register
from kvladder.connectors.inline import InlineConnector
from kvladder.keys import BlockKey
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.panel import NATIVE

TOKENS = 16
PROMPT = 64
"""Blocks of a prompt."""
HOST = 512
"""Blocks of host memory."""
TALKS = 8
"""Prompts whose first half comes again; they fit, so both policies keep them."""
ROUNDS = 41
WARM = 4
"""Rounds before the ones that count."""
REQUESTS = 12
"""Requests of a round, with one policy and then with the other."""
NAMES = {"lru": "prioritized-lru", "adaptive": "timed"}
POLICIES = tuple(NAMES)


class Timed(Adaptive):
    """The policy, with the seconds that its calls for keys have taken in all instances."""

    spent_s = 0.0

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        with _added():
            super().requested(keys, request)

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        with _added():
            super().inserted(handles, keys, request)

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        with _added():
            super().dropped(handles, evicted=evicted)


@contextmanager
def _added() -> Generator[None]:
    began_s = perf_counter()
    yield
    Timed.spent_s += perf_counter() - began_s


def rows() -> Iterator[Row]:
    """Measure blocks of two sizes."""
    register("policies", "timed", Timed)
    for kib in (64, 512):
        Timed.spent_s = 0.0
        lru_s, adaptive_s, ratio = _side_by_side(kib << 10)
        own_us = Timed.spent_s * 1e6 / (ROUNDS + WARM) / REQUESTS
        yield Row(
            name=f"adaptive, a request of {PROMPT} blocks of {kib} KiB, half of them loaded",
            unit="ms",
            peer=lru_s * 1e3,
            ours=adaptive_s * 1e3,
            ratio=ratio,
            goal=f"ratio <= 1.03: {'met' if ratio <= 1.03 else 'missed'}",
            note="peer: LRU, in turns; ratio: median of rounds; loops in "
            + ("C" if NATIVE else "Python")
            + f"; in the policy itself {own_us:.0f} us",
        )


def _side_by_side(block_bytes: int) -> tuple[float, float, float]:
    """Return seconds of a request with LRU and with adaptive, and the median ratio of rounds."""
    pages = torch.zeros(2 * PROMPT, block_bytes, dtype=torch.uint8)
    random, taken = Random(4), {policy: list[float]() for policy in POLICIES}
    with ExitStack() as stack:
        connectors = {policy: stack.enter_context(_Opened(policy, pages)) for policy in POLICIES}
        for number in range(-WARM, ROUNDS):
            prompts = [_prompt(random) for _ in range(REQUESTS)]
            for policy in POLICIES[:: 1 if number % 2 else -1]:
                began_s = perf_counter()
                for prompt in prompts:
                    _serve(connectors[policy], prompt)
                if number >= 0:
                    taken[policy].append((perf_counter() - began_s) / REQUESTS)
    ratios = [ours / peer for peer, ours in zip(taken["lru"], taken["adaptive"], strict=True)]
    return median(taken["lru"]), median(taken["adaptive"]), median(ratios)


class _Opened:
    """A cache with one policy, and its connector; both are closed at the end."""

    def __init__(self, policy: str, pages: torch.Tensor) -> None:
        self._pages = pages
        self._source: dict[str, Any] = {
            "arena": {"size": HOST * pages[0].nbytes},
            "tiers": [{"type": "host", "policy": NAMES[policy]}],
        }

    def __enter__(self) -> InlineConnector:
        layout = Layout(TOKENS, self._pages[0].nbytes, {"model": "bench"})
        self._cache = open_cache(self._source, layout=layout)
        self._connector = InlineConnector(self._cache, self._pages)
        return self._connector

    def __exit__(self, *raised: object) -> None:
        self._connector.close()
        self._cache.close()


def _prompt(random: Random) -> list[int]:
    """Return tokens that begin like an earlier prompt and end like none."""
    half = PROMPT // 2 * TOKENS
    return [random.randrange(TALKS)] * half + [random.randrange(1 << 30) for _ in range(half)]


def _serve(connector: InlineConnector, prompt: list[int]) -> None:
    keys = connector.keys(prompt)
    match = connector.match(keys)
    match.wait()
    known = match.blocks
    connector.wait(connector.load(match, blocks=range(known)))
    connector.wait(connector.save(keys[known:], blocks=range(known, len(keys))))
