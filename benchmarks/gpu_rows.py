"""Rows of ``make gpu`` with a model: the time to the first token, and steps beside copies.

Each takes a shape and a device. ``python -m benchmarks.gpu --dry`` runs them on a CPU with a tiny
shape.
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

from benchmarks.gpu_model import BLOCK, DRY, REAL, Decoder, Shape
from benchmarks.machine import medium
from benchmarks.row import Row
from kvladder.arena import Arena, Slot
from kvladder.gpu.copy.copier import Copier, CopyJob, Direction, JobId
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages
from kvladder.gpu.copy.streams import StreamCopier

LONG_TOKENS = 30_000
"""Prompts of this length or more are computed only once, because that takes seconds."""
ROUNDS = 3
PINNED_BYTES = 1 << 30
CONTEXT_BLOCKS = 8
"""Blocks of context of each sequence that generates: this model gathers them, so few."""
LOADED_BLOCKS = 16
"""Blocks that each step loads, if it loads any: 32 MiB."""
DRY_BLOCKS = 4
FLUSH_S = 120.0
ANY_BYTES = 1 << 40
"""More bytes than any page has: the kernel copies all."""
LAYOUTS = {"BLHNC": True, "LBHNC": False}


def from_host(*, dry: bool = False) -> Iterable[Row]:
    """Measure first tokens from host, whole and by layer, in both layouts."""
    shape, device = _where(dry)
    with torch.inference_mode():
        for layout, together in LAYOUTS.items():
            prompts = shape.prompts if together or dry else shape.prompts[:-1]
            blocks = max(prompts) // BLOCK
            model = Decoder(shape, device, blocks=blocks, together=together)
            with _copying(model) as copier:
                for tokens in prompts:
                    yield from _from_host(model, copier, tokens, layout)


def from_files(*, dry: bool = False) -> Iterable[Row]:
    """Measure first tokens from files, in the layout that keeps a block together."""
    shape, device = _where(dry)
    prompts = shape.prompts if dry else shape.prompts[:-1]
    with torch.inference_mode():
        model = Decoder(shape, device, blocks=max(prompts) // BLOCK, together=True)
        for tokens in prompts:
            yield _from_files(model, tokens)


def generating(*, dry: bool = False) -> Iterable[Row]:
    """Measure steps of a CUDA graph alone, and with copies beside them, each way of copying."""
    shape, device = _where(dry)
    context = DRY_BLOCKS if dry else CONTEXT_BLOCKS
    busy = shape.batch * context
    with torch.inference_mode():
        for layout, together in LAYOUTS.items():
            model = Decoder(shape, device, blocks=2 * busy, together=together)
            ids = torch.arange(busy, device=device).view(shape.batch, context)
            step = _step(model, ids)
            with _copying(model) as copier:
                for way in _ways(copier):
                    yield from _generating(model, step, copier, f"{way}, {layout}")
            del model, step  # before the next one takes as much memory


def _where(dry: bool) -> tuple[Shape, torch.device]:
    if dry:
        return DRY, torch.device("cpu")
    return REAL, torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _copying(model: Decoder) -> Generator[Copier]:
    """Yield a copier between the model's KV cache and the same number of slots."""
    arena = Arena.create(model.blocks, model.shape.block_bytes)
    copier = copier_for(BlockPages.of(model.tensors, blocks=model.blocks), arena)
    try:
        while not copier.settled:
            sleep(0.01)
        assert arena.admitted == arena.slots, "slots are not registered: the log has the reason"
        yield copier
    finally:
        copier.close()
        arena.close()


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds until the device has done the work of a call."""
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
    """Compute a prompt, save it, and load all but its last block, whole and by layer."""
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
    bus_s += median(
        _timed(model.device, lambda: model.prefill(table, tokens - BLOCK, tokens))
        for _ in range(ROUNDS)
    )
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
            note="limit: one copy of as many pinned bytes, then the last block; peer: computing",
        )


def _from_files(model: Decoder, tokens: int) -> Row:
    """Do the same from files, with a cache that recovered them at its start."""
    import kvladder
    from kvladder.connectors.inline import InlineConnector

    table = random.Random(tokens).sample(range(model.blocks), tokens // BLOCK)
    layout = kvladder.Layout(
        block_tokens=BLOCK, block_bytes=model.shape.block_bytes, fields={"model": "benchmark"}
    )
    size = len(table) * model.shape.block_bytes
    slots = -(-model.shape.block_bytes // 4096) * 4096 * (len(table) + 8)
    with TemporaryDirectory(prefix="kvladder-") as folder:
        held_by = medium(Path(folder))
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

                    def load(connector: Any = connector, keys: Any = keys) -> None:
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
        note=f"{size / seconds[0] / 1e9:.2f} GB/s; {held_by}; set TMPDIR to use another",
    )


def _flush(cache: Any) -> None:
    end_s = perf_counter() + FLUSH_S
    while not cache.idle() and perf_counter() < end_s:
        sleep(0.01)


def _bus_s(device: torch.device, size: int) -> float:
    """Estimate the seconds to copy pinned bytes to the device, from a copy of part of them."""
    part, pin = min(size, PINNED_BYTES), device.type == "cuda"
    source = torch.ones(part, dtype=torch.uint8, pin_memory=pin)
    target = torch.ones(part, dtype=torch.uint8, device=device)
    copies = [_timed(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(4)]
    return median(copies[1:]) * size / part


def _require_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Require equal results after loaded and after computed blocks, except for rounding."""
    apart = float(((found - wanted).square().sum() / wanted.square().sum()).sqrt())
    assert apart < 0.05, f"a forward pass read other blocks: {apart:.2f} apart"


def _step(model: Decoder, ids: torch.Tensor) -> Callable[[], None]:
    """Return a step that computes a token of each sequence: a graph's replay on a device."""
    x = model.embedded[: model.shape.batch].clone()
    at = ids.shape[1] * BLOCK - 1

    def step() -> None:
        x.copy_(model.decode(x, ids, at))

    if model.device.type == "cpu":
        return step
    cuda: Any = torch.cuda  # its annotations are incomplete
    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):  # a graph is captured after the first calls have prepared all
        for _ in range(3):
            step()
    cuda.current_stream().wait_stream(beside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def _ways(copier: Copier) -> Iterator[str]:
    """Yield the ways in which a copier can copy small pages, and make it use each one."""
    if not isinstance(copier, StreamCopier):
        yield "by a thread"
        return
    device = copier.device
    kernel, device.small_bytes = device.small_bytes, 0
    yield "by copy engines"
    if kernel:
        device.small_bytes = ANY_BYTES
        yield "loads by a kernel"
        device.small_bytes = kernel


def _generating(
    model: Decoder, step: Callable[[], None], copier: Copier, way: str
) -> Iterator[Row]:
    """Compare steps with saves, loads and both beside them with steps alone, in turns."""
    shape = model.shape
    filled, loaded = max(1, shape.batch // BLOCK), LOADED_BLOCKS if shape is REAL else 1
    beside = {
        "nothing": (0, 0),
        "saves": (filled, 0),
        "loads": (0, loaded),
        "both": (filled, loaded),
    }
    taken: dict[str, list[float]] = {name: [] for name in beside}
    for turn in range(ROUNDS + 1):
        for name, (saves, loads) in beside.items():
            seconds = _steps(model, step, copier, saves, loads)
            if turn:  # the first one warms up
                taken[name].append(seconds / shape.steps)
    alone = median(taken.pop("nothing"))
    for name, seconds_ in taken.items():
        saves, loads = beside[name]
        yield Row(
            name=f"generating beside {name}, {way}",
            unit="ms/step",
            limit=1e3 * alone,
            ours=1e3 * median(seconds_),
            goal="ratio <= 1.01" if name == "saves" and shape is REAL else "",
            note=f"{shape.batch} sequences; each step saves {saves} and loads {loads} blocks of"
            f" {shape.block_bytes >> 10} KiB; limit: without",
        )


def _steps(
    model: Decoder, step: Callable[[], None], copier: Copier, saves: int, loads: int
) -> float:
    """Return the seconds of a round of steps; each begins copies, as an engine does.

    The sequences' blocks are saved. Loads write to the other half of the blocks.
    """
    half = model.blocks // 2
    written, wanted = cycle(range(half)), cycle(range(half, 2 * half))

    def begin(direction: Direction, some: Iterator[int]) -> None:
        if blocks := tuple(some):
            slots = tuple(map(Slot, blocks))
            copier.submit(CopyJob(JobId(next(_ids)), direction, blocks, slots))

    def steps() -> None:
        for _ in range(model.shape.steps):
            step()
            begin("offload", islice(written, saves))
            begin("onboard", islice(wanted, loads))
            copier.poll()
            _wait(model.device)  # an engine reads the tokens of each step

    seconds = _timed(model.device, steps)
    copier.drain()
    assert all(finished.ok for finished in copier.poll()), "a copy failed"
    return seconds


def _wait(device: torch.device) -> None:
    """Wait for the engine's own stream, not for copies."""
    if device.type == "cuda":
        cuda: Any = torch.cuda  # its annotations are incomplete
        cuda.current_stream().synchronize()
