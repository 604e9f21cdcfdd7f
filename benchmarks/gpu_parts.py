"""The parts of ``make gpu``; each runs on a machine with torch and a CUDA device."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.row import Row
from kvladder.arena import Arena, Slot, memory_available
from kvladder.gpu.copy.copier import CopyJob, Direction, JobId
from kvladder.gpu.copy.cuda import CudaDevice
from kvladder.gpu.copy.device import Device
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.gpu.copy.registration import Registration
from kvladder.gpu.copy.streams import StreamCopier

ROOT = Path(__file__).parents[1]
CUDA: Any = torch.cuda  # its annotations are incomplete
BLOCKS, SLOTS, LAYERS = 64, 64, 8
LONG_CYCLES = 200_000_000
"""Cycles of an idle kernel that takes about a tenth of a second."""
ROUNDS = 7
SMALL_COUNT = 64
"""Number of blocks with small pages that are copied together."""
SIZES = {"16 KiB": 16 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
COUNTS = (1, 16, 256, 4096)
COPIED_MAX = 4 << 30
"""Most bytes of one job; more of them take long to make and show nothing else."""
SUITE_S = 120
SUITE = ("gpu", "connectors")
"""Folders with tests that need a device. Other files there need vLLM to be read at all."""
DIRECTIONS: tuple[Direction, ...] = ("offload", "onboard")
Tensors = dict[str, torch.Tensor]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=_device())


def _layouts() -> Iterator[tuple[str, list[Tensors]]]:
    """Yield each layout as groups of tensors."""
    kv = _zeros(LAYERS, BLOCKS, 2, 16, 128)
    yield "LBHNC", [{f"layer{i}": kv[i] for i in range(LAYERS)}]
    together = _zeros(BLOCKS, LAYERS, 2, 16, 128)
    yield "BLHNC", [{f"layer{i}": together[:, i] for i in range(LAYERS)}]
    yield "MLA", [{f"layer{i}": _zeros(BLOCKS, 64, 576) for i in range(LAYERS)}]
    bytes_ = _zeros(LAYERS, BLOCKS, 2, 16, 128, dtype=torch.uint8)
    yield "fp8", [{f"layer{i}": bytes_[i].view(torch.float8_e4m3fn) for i in range(LAYERS)}]
    state = {"state": _zeros(BLOCKS, 5000, dtype=torch.uint8)}
    yield "hybrid", [{"attention": _zeros(BLOCKS, 2, 16, 128)}, state]


@contextmanager
def copying(
    groups: list[Tensors],
    *,
    slots: int = SLOTS,
    slot_bytes: int | None = None,
    staged: bool = False,
) -> Generator[tuple[StreamCopier, Arena, dict[int, RankShare]]]:
    """Yield a copier between tensors and an arena with registered slots."""
    parts = {
        number: RankShare(BlockPages.of(tensors, blocks=next(iter(tensors.values())).shape[0]))
        for number, tensors in enumerate(groups)
    }
    widest = max(part.pages.block_bytes for part in parts.values())
    arena = Arena.create(slots, slot_bytes or -(-widest // 4096) * 4096)
    device = CudaDevice(_device())
    if staged:
        device.batched = False
    copier = StreamCopier(parts, arena, device)
    try:
        while not copier.settled:
            device.pause(0.01)
        assert arena.admitted == arena.slots, "slots are not registered: the log has the reason"
        yield copier, arena, parts
    finally:
        copier.close()
        arena.close()


def _finish(copier: StreamCopier, job: CopyJob) -> None:
    copier.wait([job.id])
    for finished in copier.poll():
        assert finished.ok, finished.error


# ---- tests


def order() -> Iterable[Row]:
    """Test that saves and loads run after a late kernel, and a forward pass after loads."""
    for name, groups in _layouts():
        for way in ("batched", "staged", "kernel"):
            with copying(groups, staged=way == "staged") as (copier, arena, parts):
                if why := _unlike(copier.device, way):
                    print(f"  {name}, {way}: skipped, {why}", flush=True)
                    continue
                copier.device.small_bytes = 1 << 40 if way == "kernel" else 0
                for group, part in parts.items():
                    for by_layer in (False, True):
                        _in_order(copier, arena, part, group, by_layer=by_layer)
            print(f"  {name}, {way}: in order", flush=True)
    return ()


def _unlike(device: Device, way: str) -> str:
    """Return the reason why a device does not copy in this way; "" if it does."""
    if way == "batched" and not device.batched:
        return "there is no cuda-bindings, or the driver is older than CUDA 12.8"
    if way == "kernel" and not device.small_bytes:
        return "there is no triton, or the kernel failed"
    return ""


def _in_order(
    copier: StreamCopier, arena: Arena, part: RankShare, group: int, *, by_layer: bool
) -> None:
    """Save behind a long kernel, and load the blocks back over another kernel's writes."""
    views = [page.view for page in part.pages.pages]
    wanted = [torch.randint(0, 256, view.shape, dtype=torch.uint8, device="cuda") for view in views]
    half = BLOCKS // 2
    saved, loaded = tuple(range(half)), tuple(range(half, BLOCKS))
    slots = tuple(map(Slot, reversed(range(half))))
    for view in views:
        view.fill_(0xEE)
    torch.cuda.synchronize()
    CUDA._sleep(LONG_CYCLES)
    for view, content in zip(views, wanted, strict=True):
        view.copy_(content)
    save = CopyJob(JobId(1), "offload", saved, slots, group)
    copier.submit(save)
    copier.fence([save.id])  # the writes below come after the save
    for view in views:
        view.fill_(0xDD)
    _finish(copier, save)
    for index, slot in enumerate(slots):
        stored = b"".join(content[index].cpu().numpy().tobytes() for content in wanted)
        assert bytes(arena.view(slot)[: len(stored)]) == stored, f"slot {slot}"
    CUDA._sleep(LONG_CYCLES)
    for view in views:
        view.fill_(0xCC)
    load = CopyJob(JobId(2), "onboard", loaded, slots, group)
    copier.submit(load, by_layer=by_layer)
    if by_layer:
        for layer in part.pages.layers:
            copier.fence([load.id], layer.names[0])
            layer.view[half:].sum()  # reads as early as the fence allows
    copier.fence([load.id])
    read = [view[half:].clone() for view in views]
    _finish(copier, load)
    for found, content in zip(read, wanted, strict=True):
        assert torch.equal(found, content[:half]), "a forward pass read what was not loaded"


def registering() -> Iterable[Row]:
    """Register 8 and 32 GiB, up to half of the memory, and test what the driver refuses."""
    device = CudaDevice(_device())
    for gib in (8, 32):
        if gib << 30 > memory_available() // 2:
            print(f"  {gib} GiB: skipped, there is too little memory", flush=True)
            continue
        begun_s = perf_counter()
        arena = Arena.create(gib * 256, 4 << 20)
        made_s = perf_counter() - begun_s
        begun_s = perf_counter()
        registration = Registration(device, arena)
        while not registration.over:
            device.pause(0.01)
        assert arena.admitted == arena.slots, "slots are not registered: the log has the reason"
        registered_s = perf_counter() - begun_s
        refused = device.register(arena.address, 4096)
        assert refused, "memory was registered twice"
        assert int(torch.ones(8, device="cuda").sum()) == 8, "an error was left behind"
        registration.close()
        arena.close()
        note = f"arena made in {made_s:.1f} s"
        yield Row(name=f"register {gib} GiB", unit="GiB/s", ours=gib / registered_s, note=note)


def freed() -> Iterable[Row]:
    """Free the KV tensors' memory after ``drain`` during a save; test that the save succeeds."""
    groups: list[Tensors] = [{"kv": _zeros(BLOCKS, 1 << 20, dtype=torch.uint8)}]
    with copying(groups) as (copier, _, parts):
        groups[0]["kv"].fill_(7)
        CUDA._sleep(LONG_CYCLES)
        copier.submit(
            CopyJob(JobId(1), "offload", tuple(range(BLOCKS)), tuple(map(Slot, range(BLOCKS))))
        )
        copier.drain()
        [finished] = copier.poll()
        assert finished.ok, finished.error
        groups.clear()
        parts.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    return ()


def suite() -> Iterable[Row]:
    """Run the tests that need a device: pools over tiers, and the engine of transformers."""
    paths = (path for room in SUITE for path in sorted((ROOT / "tests" / room).glob("test_*.py")))
    files = [str(path) for path in paths if "pytest.mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    subprocess.run(command, cwd=ROOT, check=True, timeout=SUITE_S)
    return ()


# ---- rows


def copies() -> Iterable[Row]:
    """Measure blocks each way against one pinned copy of the same bytes, and vLLM's operation."""
    theirs = _vllm()
    for name, size in SIZES.items():
        for count in COUNTS:
            if size * count > COPIED_MAX:
                continue
            if 4 * size * count > min(memory_available(), torch.cuda.mem_get_info()[0]):
                print(f"  {count} blocks of {name}: skipped, there is too little memory")
                continue
            yield from _copies(name, size, count, theirs)


def _copies(name: str, size: int, count: int, theirs: Callable[..., None] | None) -> Iterator[Row]:
    kv = torch.ones(2 * count, size, dtype=torch.uint8, device="cuda")
    pinned = torch.ones(count * size, dtype=torch.uint8, pin_memory=True)
    flat = torch.ones(count * size, dtype=torch.uint8, device="cuda")
    blocks = tuple(random.sample(range(0, 2 * count, 2), count))  # no two are neighbours
    with copying([{"kv": kv}], slots=2 * count, slot_bytes=size) as (copier, arena, _):
        slots = tuple(map(Slot, random.sample(range(0, 2 * count, 2), count)))
        ends = [
            torch.tensor([kv.data_ptr() + block * size for block in blocks]),
            torch.tensor([arena.address + slot * size for slot in slots]),
        ]
        for number, direction in enumerate(DIRECTIONS):
            out = direction == "offload"

            def ours(direction: Direction = direction, number: int = number) -> None:
                job = CopyJob(JobId(number), direction, blocks, slots)
                copier.submit(job)
                copier.fence([job.id])

            def limit(out: bool = out) -> None:
                source, target = (flat, pinned) if out else (pinned, flat)
                target.copy_(source, non_blocking=True)

            def peer(out: bool = out) -> None:
                assert theirs is not None
                sources, targets = ends if out else ends[::-1]
                theirs(sources, targets, torch.full((count,), size), not out)

            limit_s, ours_s = seconds_of(limit), seconds_of(ours)
            while copier.poll():
                copier.drain()
            gigabytes = count * size / 1e9
            goal = {"64 KiB": "ratio >= 0.8"}.get(name, "ratio >= 0.95" if size >= 1 << 20 else "")
            yield Row(
                name=f"{direction} {count} x {name}",
                unit="GB/s",
                limit=gigabytes / limit_s,
                peer=None if theirs is None else gigabytes / seconds_of(peer),
                ours=gigabytes / ours_s,
                goal=goal if count >= 256 else "",
                note="limit: one pinned copy",
            )


def _vllm() -> Callable[..., None] | None:
    """Return the batched operation of vLLM, if that is installed."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return None
    operation: Callable[..., None] = _custom_ops.swap_blocks_batch
    return operation


def seconds_of(call: Callable[[], None]) -> float:
    """Return the device's median seconds for the work of a call, by events around it."""
    taken: list[float] = []
    for _ in range(ROUNDS + 1):
        begun, ended = (CUDA.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        taken.append(begun.elapsed_time(ended) / 1e3)
    return median(taken[1:])


def kernel() -> Iterable[Row]:
    """Compare loads of small pages by the kernel and by copy engines: when is it slower?"""
    for kib in (1, 4, 8, 16, 28, 48):
        size, layers = kib << 10, 32
        kv = torch.ones(layers, 2 * SMALL_COUNT, size, dtype=torch.uint8, device="cuda")
        tensors = {f"layer{n}": kv[n] for n in range(layers)}
        blocks = tuple(random.sample(range(2 * SMALL_COUNT), SMALL_COUNT))
        with copying([tensors], slots=SMALL_COUNT) as (copier, _, _parts):
            slots = tuple(map(Slot, random.sample(range(SMALL_COUNT), SMALL_COUNT)))
            job = CopyJob(JobId(1), "onboard", blocks, slots)

            def copy(copier: StreamCopier = copier, job: CopyJob = job) -> None:
                copier.submit(job)
                copier.fence([job.id])

            taken: list[float] = []
            for small_bytes in (0, size):
                copier.device.small_bytes = small_bytes
                taken.append(seconds_of(copy))
            copier.drain()
            assert all(finished.ok for finished in copier.poll()), "a copy failed"
            gigabytes = layers * SMALL_COUNT * size / 1e9
            yield Row(
                name=f"small pages onboard {layers * SMALL_COUNT} of {kib} KiB",
                unit="GB/s",
                peer=gigabytes / taken[0],
                ours=gigabytes / taken[1],
                goal="ratio >= 1" if kib < 28 else "",
                note="peer: the same by copy engines",
            )


def latency() -> Iterable[Row]:
    """Measure one block's load, alone and beside a long kernel and a save that waits for it."""
    kv: Any = torch.ones(BLOCKS, 1 << 20, dtype=torch.uint8, device="cuda")
    with copying([{"kv": kv}], slots=2 * BLOCKS) as (copier, arena, _):
        ctypes.memset(arena.address, 1, arena.size_bytes)
        taken: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * ROUNDS):
            behind = bool(number % 2)
            load = CopyJob(JobId(2 * number), "onboard", (0,), (Slot(BLOCKS),))
            torch.cuda.synchronize()
            begun_s = perf_counter()
            copier.submit(load)  # as an engine does before a step's forward pass
            if behind:
                CUDA._sleep(LONG_CYCLES)
                slots = tuple(map(Slot, range(1, BLOCKS)))
                save = CopyJob(JobId(2 * number + 1), "offload", tuple(range(1, BLOCKS)), slots)
                copier.submit(save)
            told_s = perf_counter() - begun_s
            _finish(copier, load)
            taken[behind].append(perf_counter() - begun_s)
            assert told_s < 0.05, "the host waited for the forward pass"
            copier.drain()
            copier.poll()
    yield Row(
        name="load of 1 MiB beside a long kernel and a save",
        unit="us",
        limit=1e6 * median(taken[False]),
        ours=1e6 * median(taken[True]),
        goal="ratio <= 2",
        note="limit: the load alone; until the host sees its end",
    )
