"""Rows of ``make gpu`` with a model: the time to a first token, and generating beside saves.

``python -m benchmarks.gpu --dry`` runs them on a CPU, at a tiny size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import torch

import kvladder
from benchmarks.gpu_model import BLOCK, DRY, REAL, Decoder, Shape
from benchmarks.row import Row
from kvladder.arena import Arena, Slot
from kvladder.connectors.inline import InlineConnector
from kvladder.gpu.copy.copier import Copier, CopyJob, Direction, JobId
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages

LONG_TOKENS = 30_000
"""Prompts of at least this length are computed only once, because that takes seconds."""
ROUNDS = 3
PINNED_BYTES = 1 << 30
CONTEXT_BLOCKS = 128
"""Blocks of each sequence that generates."""
DRY_BLOCKS = 4
FLUSH_S = 120.0
LAYOUTS = {"BLHNC": True, "LBHNC": False}


def first_token(*, dry: bool = False) -> Iterable[Row]:
    """Measure loads from host memory, whole and by layer, in both layouts; and from files."""
    shape, device = _where(dry)
    with torch.inference_mode():
        for layout, together in LAYOUTS.items():
            blocks = max(shape.prompts) // BLOCK
            model = Decoder(shape, device, blocks=blocks, together=together)
            with _copying(model) as copier:
                for tokens in shape.prompts:
                    yield from _from_host(model, copier, tokens, layout)
            if together:
                for tokens in shape.prompts:
                    yield _from_files(model, tokens)


def decoding(*, dry: bool = False) -> Iterable[Row]:
    """Measure generation with saves at the rate at which blocks fill, and without, in turns."""
    shape, device = _where(dry)
    context = DRY_BLOCKS if dry else CONTEXT_BLOCKS
    blocks = shape.batch * context
    with torch.inference_mode():
        model = Decoder(shape, device, blocks=blocks, together=True)
        ids = torch.arange(blocks, device=device).view(shape.batch, context)
        taken: dict[bool, list[float]] = {False: [], True: []}
        with _copying(model) as copier:
            for number in range(2 * (ROUNDS + 1)):
                saves = bool(number % 2)
                seconds = _generate(model, copier if saves else None, ids)
                if number > 1:  # the first of each warms up
                    taken[saves].append(seconds)
    off, on = (shape.batch * shape.steps / median(taken[saves]) for saves in (False, True))
    note = f"{shape.batch} sequences of {context * BLOCK} tokens; limit: without saves"
    goal = "" if dry else "ratio >= 0.99"
    yield Row(
        name="generating beside saves", unit="token/s", limit=off, ours=on, goal=goal, note=note
    )


def _where(dry: bool) -> tuple[Shape, torch.device]:
    if dry:
        return DRY, torch.device("cpu")
    return REAL, torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _copying(model: Decoder) -> Generator[Copier]:
    """Yield a copier between the model's KV cache and an arena of the same size."""
    arena = Arena.create(model.blocks, model.shape.block_bytes)
    copier = copier_for(BlockPages.of(model.tensors, blocks=model.blocks), arena)
    try:
        while arena.admitted < arena.slots:
            sleep(0.01)
        yield copier
    finally:
        copier.close()
        arena.close()


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds until the device has done a call's work."""
    cuda: Any = torch.cuda  # its annotations are incomplete
    sync: Callable[[], None] = cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    begun_s = perf_counter()
    call()
    sync()
    return perf_counter() - begun_s


_ids = count(1)


def _job(direction: Direction, blocks: Sequence[int]) -> CopyJob:
    slots = tuple(map(Slot, range(len(blocks))))
    return CopyJob(JobId(next(_ids)), direction, tuple(blocks), slots)


def _from_host(model: Decoder, copier: Copier, tokens: int, layout: str) -> Iterator[Row]:
    """Compute a prompt, save it, and load all but its last block: whole, and by layer."""
    table = random.Random(tokens).sample(range(model.blocks), tokens // BLOCK)
    wanted: list[torch.Tensor] = []
    rounds = ROUNDS if tokens < LONG_TOKENS else 1

    def compute() -> None:
        wanted[:] = [model.prefill(table, 0, tokens)]

    computing_s = median(_timed(model.device, compute) for _ in range(rounds))
    save = _job("offload", table)
    copier.submit(save)
    copier.wait([save.id])
    bus_s = _bus_s(model.device, tokens // BLOCK * model.shape.block_bytes)
    for by_layer in (False, True):

        def load(by_layer: bool = by_layer) -> None:
            job = _job("onboard", table[:-1])
            copier.submit(job, by_layer=by_layer)
            if not by_layer:
                copier.fence([job.id])

            def wait(layer: str) -> None:
                if by_layer:
                    copier.fence([job.id], layer)

            last = model.prefill(table, tokens - BLOCK, tokens, wait)
            copier.wait([job.id])
            _require_close(last, wanted[0])

        for kv in model.kv:
            kv.zero_()
        loading_s = median(_timed(model.device, load) for _ in range(ROUNDS))
        assert all(finished.ok for finished in copier.poll()), "a copy failed"
        way = "by layer" if by_layer else "whole"
        yield Row(
            name=f"first token of {tokens} tokens from host, {way}, {layout}",
            unit="ms",
            limit=1e3 * bus_s,
            peer=1e3 * computing_s,
            ours=1e3 * loading_s,
            goal="" if model.shape is DRY else "ratio <= 1.1",
            note="limit: one copy of as many pinned bytes; peer: computing",
        )


def _from_files(model: Decoder, tokens: int) -> Row:
    """Return the row for the same from files, by a cache that recovers them at its start."""
    table = random.Random(tokens).sample(range(model.blocks), tokens // BLOCK)
    layout = kvladder.Layout(
        block_tokens=BLOCK, block_bytes=model.shape.block_bytes, fields={"model": "benchmark"}
    )
    size = len(table) * model.shape.block_bytes
    slots = -(-model.shape.block_bytes // 4096) * 4096 * (len(table) + 8)
    with TemporaryDirectory(prefix="kvladder-") as folder:
        stack = {
            "arena": {"size": f"{slots + (8 << 20)} B"},
            "fetch": {"deadline": "10 m"},
            "tiers": [
                {"name": "host", "type": "host"},
                {
                    "name": "files",
                    "type": "files",
                    "path": str(Path(folder) / "kv"),
                    "capacity": f"{2 * slots + (64 << 20)} B",
                    "when": "commit",
                    "queue": "100 %",
                },
            ],
        }
        seconds: list[float] = []
        for loads in (False, True):
            with kvladder.open_cache(stack, layout=layout) as cache:
                connector = InlineConnector(cache, model.tensors)
                keys = connector.keys(range(tokens))
                if loads:

                    def load(connector: InlineConnector = connector, keys: Any = keys) -> None:
                        match = connector.match(keys[:-1])
                        match.wait()
                        assert match.blocks == len(keys) - 1, f"{match.blocks} came"
                        connector.wait(connector.load(match, blocks=table[:-1]))
                        model.prefill(table, tokens - BLOCK, tokens)

                    seconds.append(_timed(model.device, load))
                else:
                    connector.wait(connector.save(keys, blocks=table))
                    _flush(cache)
                connector.close()
    return Row(
        name=f"first token of {tokens} tokens from files",
        unit="ms",
        ours=1e3 * seconds[0],
        note=f"{size / seconds[0] / 1e9:.2f} GB/s, the page cache warm or not as it is",
    )


def _flush(cache: Any) -> None:
    end_s = perf_counter() + FLUSH_S
    while not cache.idle() and perf_counter() < end_s:
        sleep(0.01)


def _bus_s(device: torch.device, size: int) -> float:
    """Return the seconds for one copy of pinned bytes to the device; measured on a part of them."""
    part, pin = min(size, PINNED_BYTES), device.type == "cuda"
    source = torch.ones(part, dtype=torch.uint8, pin_memory=pin)
    target = torch.ones(part, dtype=torch.uint8, device=device)
    copies = [_timed(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(4)]
    return median(copies[1:]) * size / part


def _require_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that the result after loaded blocks equals that after computed ones, but rounding."""
    apart = float(((found - wanted).square().sum() / wanted.square().sum()).sqrt())
    assert apart < 0.05, f"a forward pass read other blocks: {apart:.2f} apart"


def _generate(model: Decoder, copier: Copier | None, ids: torch.Tensor) -> float:
    """Return the seconds of one round's steps; each step may submit a save of some blocks."""
    shape = model.shape
    per_step = max(1, shape.batch // BLOCK)
    filled = cycle(range(model.blocks))
    x = model.embedded[: shape.batch]

    def steps() -> None:
        nonlocal x
        for step in range(shape.steps):
            x = model.decode(x, ids, ids.shape[1] * BLOCK - shape.steps + step)
            if copier is not None:
                blocks = [*islice(filled, per_step)]
                slots = tuple(map(Slot, blocks))
                copier.submit(CopyJob(JobId(next(_ids)), "offload", tuple(blocks), slots))
                copier.poll()

    seconds = _timed(model.device, steps)
    if copier is not None:
        copier.drain()
        assert all(finished.ok for finished in copier.poll()), "a copy failed"
    return seconds
