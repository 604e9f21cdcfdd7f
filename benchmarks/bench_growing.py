"""Caches that grow in place against those of transformers, with tensors alone and no model.

Both caches get the same keys and values, a token at a time after a prompt of 4,096 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks.row import Row
from kvladder.connectors.transformers import GrowingCache

LAYERS, HEADS, SIZE = 8, 8, 64
PROMPT, NEW, BEAMS = 4096, 256, 4
CONFIG = LlamaConfig(num_hidden_layers=LAYERS)
NOTE = f"{LAYERS} layers, {HEADS} heads of {SIZE}, float32, {NEW} tokens behind {PROMPT:,}"


def rows() -> Iterator[Row]:
    """Measure bytes moved, bytes held at most, and the time of a token and of beams."""
    growing, token_bytes = GrowingCache(CONFIG), LAYERS * 2 * HEADS * SIZE * 4
    peaks: list[int] = []
    copied = 0
    with torch.inference_mode():
        tell(growing, PROMPT, 1)
        for number in range(NEW):
            before = growing.copied_bytes
            tell(growing, 1, 1)
            copied += (PROMPT + number) * token_bytes  # DynamicCache moves all that it holds
            moved = growing.copied_bytes - before
            peaks.append(growing.bytes + moved // 2)  # keys and values grow one after the other
    yield Row(
        name="growing cache, bytes that move",
        unit="MB",
        peer=copied / 1e6,
        ours=growing.copied_bytes / 1e6,
        note=f"{NOTE}; peer: DynamicCache, which moves all with each token",
    )
    whole = (PROMPT + NEW) * token_bytes
    yield Row(
        name="growing cache, bytes at most",
        unit="MB",
        limit=whole / 1e6,
        peer=(whole + whole // LAYERS // 2) / 1e6,
        ours=max(peaks) / 1e6,
        note="limit: the tokens alone; peer: DynamicCache, which holds a layer's keys twice",
    )
    yield timed("growing cache, a token more", "us", 1, lambda cache: tell(cache, 1, 1), 1e6)
    chance = random.Random(1)
    yield timed(
        f"growing cache, {BEAMS} beams reordered",
        "ms",
        BEAMS,
        lambda cache: cache.reorder_cache(torch.tensor(chance.choices(range(BEAMS), k=BEAMS))),
        1e3,
        "ratio <= 0.5",
    )


def tell(cache: Any, tokens: int, beams: int) -> None:
    """Append ``tokens`` tokens to each layer of a cache."""
    for number in range(LAYERS):
        new = torch.ones(beams, HEADS, tokens, SIZE)
        cache.update(new, new, number)


def timed(
    name: str, unit: str, beams: int, step: Callable[[Any], object], scale: float, goal: str = ""
) -> Row:
    """Return a row of both caches in turns: median times of ``step``, each after a new token."""
    caches: list[Any] = [GrowingCache(CONFIG), DynamicCache(config=CONFIG)]
    taken: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for cache in caches:
            tell(cache, PROMPT, beams)
            cache.reorder_cache(torch.zeros(beams, dtype=torch.long))  # as beams begin
        for _ in range(64):
            for cache, times in zip(caches, taken, strict=True):
                tell(cache, 1, beams)
                begun = perf_counter()
                step(cache)
                times.append(perf_counter() - begun)
    ours, peer = (median(times) * scale for times in taken)
    return Row(name=name, unit=unit, peer=peer, ours=ours, goal=goal, note="peer: DynamicCache")
