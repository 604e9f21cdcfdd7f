"""Faults planted in the copier and in ``CudaDevice``, each found on the played machine.

A fault replaces text in one function. A scenario that passes without it must fail with it. Faults
of vLLM's worker half are in ``tests/connectors/test_vllm_played.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from kvladder.arena import Arena, Slot
from kvladder.gpu.copy import addresses, cuda, kernel, streams
from kvladder.gpu.copy.addresses import AddressGroup
from kvladder.gpu.copy.cuda import CudaDevice
from kvladder.gpu.copy.kernel import Table
from kvladder.gpu.copy.registration import Registration
from kvladder.gpu.copy.streams import StreamCopier
from tests.gpu.simulated import (
    BLOCKS,
    SEEDS,
    SLOT_BYTES,
    SLOTS,
    Engine,
    Start,
    Tensors,
    dense,
    forget,
    lbhnc,
    run,
)
from tests.kit.planting import Fault, plant
from tests.kit.played import Played, PlayedDevice, plain
from tests.kit.played.machine import CALL_S

ALL_SLOTS = [*map(Slot, range(SLOTS))]
Scenario = Callable[[Start], None]


def right(engine: Engine) -> None:
    assert engine.wrong == []
    assert engine.failed == []
    assert engine.device.host_waits == []
    engine.device.played.check()


# ---- scenarios


def odd() -> list[Tensors]:
    """Pages of sizes that are multiples of 8, at places that are not."""
    sizes = {"first": 12, "second": 16, "third": 12}
    return [{name: torch.zeros(BLOCKS, size, dtype=torch.uint8) for name, size in sizes.items()}]


def any_work(
    start: Start,
    layout: Callable[[], list[Tensors]] = lbhnc,
    seeds: Sequence[int] = SEEDS,
    **options: Any,
) -> None:
    """An engine does anything, and every block stays whole."""
    for seed in seeds:
        right(run(start, layout, PlayedDevice(**options), seed))


def later(start: Start, *, batched: bool = True) -> None:
    """The same, but a step hands over one slice only."""
    for seed in SEEDS:
        device = PlayedDevice(batched=batched, run_s=1e-4)
        right(run(start, lbhnc, device, seed, step_s=1e-5))


def with_vllms_operation(start: Start) -> None:
    """The driver has no batched copies, but vLLM has."""
    for seed in SEEDS[:3]:
        right(run(start, lbhnc, PlayedDevice(Played(batched="vllm")), seed))


def growing_staging(start: Start) -> None:
    """A job needs more staging memory than the one before, which is still in flight."""
    engine = start(lbhnc, PlayedDevice(batched=False), staging_bytes=1)
    engine.forward(0.1, [], [(0, block) for block in range(BLOCKS)])
    engine.save(0, [0], [Slot(0)])
    engine.copier._staging_bytes = 1 << 20
    engine.save(0, [1, 2, 3], [*map(Slot, (1, 2, 3))])
    engine.settle()
    right(engine)


def closing(start: Start, *, batched: bool = True, run_s: float = 0.0) -> None:
    """The copier closes during a forward pass and a save of its blocks."""
    device = PlayedDevice(batched=batched, run_s=run_s)
    engine = start(lbhnc, device, slice_bytes=3100 if run_s else 1 << 20)
    engine.forward(0.1, [], [(0, block) for block in range(BLOCKS)])
    engine.save(0, range(4), [*map(Slot, range(4))])
    engine.copier.close()
    assert engine.device.registered == 0
    engine.settle()
    assert engine.failed == engine.wrong == []


def closing_elsewhere(start: Start) -> None:
    """A thread that has used no device closes the copier; device 0 is selected there already."""
    engine = start(lbhnc, PlayedDevice(Played(device=0)))

    def work() -> Iterator[None]:
        engine.copier.close()
        yield

    engine.device.background(work())()
    assert engine.device.registered == 0


def two_pieces(start: Start) -> None:
    """Neighbouring blocks lie in slots of several registrations."""
    engine = start(dense, piece_bytes=3 * SLOT_BYTES)
    engine.forward(0.1, [], [(0, block) for block in range(SLOTS)])
    engine.save(0, range(SLOTS), ALL_SLOTS)
    engine.settle()
    right(engine)


def registering(start: Start) -> None:
    """The arena is registered piece by piece, and hands out what is registered."""
    arena, device = Arena.create(9, 4096), PlayedDevice(small=1)
    registration = Registration(device, arena, piece_bytes=4 * 4096)
    try:
        for pieces in range(4):
            assert arena.admitted * arena.slot_bytes <= device.registered, pieces
            device.step_background()
        device.work_in_background()
        assert device.registered == 9 * 4096
        device.played.check()
    finally:
        registration.close()
        arena.close()


def refused_registration(start: Start) -> None:
    """Nothing may be registered, and pages are small."""
    engine = start(lbhnc, PlayedDevice(small=SLOT_BYTES, register_max=0))
    engine.forward(0.1, [], [(0, 0)])
    engine.save(0, [0], [Slot(0)])
    engine.settle()
    [error] = engine.failed
    assert "slot 0 is not registered with the device" in error
    engine.failed.clear()
    right(engine)


def both_directions(start: Start) -> None:
    """A load does not wait for a save before it."""
    engine = start(lbhnc)
    engine.forward(0.1, [], [(0, 0)])
    engine.save(0, [0], [Slot(0)])
    engine.settle()
    engine.save(0, [0], [Slot(1)])
    engine.load(0, [Slot(0)], [1], sync=False)
    saved, loaded = (one.done for one in engine.copier._launched)
    engine.settle()
    assert loaded.at_s - saved.at_s < CALL_S / 2


def overwritten_slots(start: Start) -> None:
    """A tier fills the slots of a load as soon as it is reported, during a forward pass."""
    device = PlayedDevice(small=SLOT_BYTES, run_s=1e-4)
    engine = start(lbhnc, device, slice_bytes=1536, step_s=1e-9)
    engine.forward(0.1, [], [(0, block) for block in range(4)])
    engine.save(0, range(4), ALL_SLOTS[:4])
    engine.settle()
    load = engine.load(0, ALL_SLOTS[:4], range(4, 8), sync=False)
    engine.forward(0.5, [], [(0, 9)])
    while load in engine.jobs:
        device.advance(0.01)
        engine.poll()
    for slot in ALL_SLOTS[:4]:
        del engine.stored[slot]
        engine.arena.view(slot)[:] = bytes(SLOT_BYTES)
    engine.settle()
    right(engine)


def refused_copy(start: Start) -> None:
    """The driver refuses a copy: its job fails."""
    engine = start(lbhnc)
    engine.forward(0.1, [], [(0, 0)])
    engine.device.played.driver.refusal = 1
    engine.save(0, [0], [Slot(0)])
    engine.settle()
    assert len(engine.failed) == 1
    assert "invalid argument" in engine.failed[0]


def moving(start: Start) -> None:
    """The engine sleeps, and its memory is elsewhere afterwards."""
    kv = torch.zeros(BLOCKS, 1024, dtype=torch.uint8)
    engine = start(lambda: [{"kv": kv}])
    storage = kv.untyped_storage()
    engine.copier.drain()
    engine.device.played.memory.unmap(kv)
    kept = storage.clone()  # the old place stays another's
    storage.resize_(0)
    storage.resize_(kept.nbytes() * 64)
    engine.device.own(kv)
    engine.copier.moved()
    engine.forward(0.1, [], [(0, 3)])
    engine.save(0, [3], [Slot(0)])
    engine.settle()
    right(engine)
    assert plain(kv)[3].any()


# ---- faults


staged = partial(any_work, batched=False)
small = partial(any_work, small=SLOT_BYTES)
other_pointers = partial(any_work, same_pointers=False, seeds=SEEDS[:3])
AFTER = "self.device.after(stream, copy.ready)"
END = "copy.done = self.device.mark(stream)"
FAULTS: dict[str, tuple[Scenario, Fault]] = {
    # the copier
    "a save does not wait for the forward pass": (
        any_work,
        Fault(StreamCopier, "_hand", AFTER, f'copy.lane == "offload" or {AFTER}'),
    ),
    "a load does not wait for the forward pass": (
        any_work,
        Fault(StreamCopier, "_hand", AFTER, f'copy.lane != "offload" or {AFTER}'),
    ),
    "a fence does nothing": (
        any_work,
        Fault(StreamCopier, "fence", "self.device.after(None, came)", "pass"),
    ),
    "a fence for a layer waits for another event": (
        any_work,
        Fault(StreamCopier, "fence", "copy.came.get(layer, copy.done)", "copy.begun"),
    ),
    "a layer is marked before its copy": (
        any_work,
        Fault(StreamCopier, "_hand", "(handed.layers, copy.done)", "(handed.layers, copy.begun)"),
    ),
    "a kernel's table is written in flight": (
        small,
        Fault(CudaDevice, "_table", "table.used is None or self.is_over(table.used)", "True"),
    ),
    "closing does not drain": (closing, Fault(StreamCopier, "close", "self.drain()", "pass")),
    "an end is marked on the engine's stream": (
        any_work,
        Fault(StreamCopier, "_hand", END, "copy.done = self.device.mark()"),
    ),
    "an end is marked on the other direction's stream": (
        any_work,
        Fault(
            StreamCopier,
            "_hand",
            END,
            'copy.done = self.device.mark(self._streams["offload" if copy.begun else "onboard"])',
        ),
    ),
    "a job ends with its first slice": (
        later,
        Fault(StreamCopier, "_hand", END, f"copy.done = copy.done or {END.partition(' = ')[2]}"),
    ),
    "a fence leaves slices for later": (
        later,
        Fault(StreamCopier, "fence", "while not copy.whole and", "while False and"),
    ),
    "closing leaves slices for later": (
        partial(closing, run_s=1e-4),
        Fault(StreamCopier, "wait", "while not copy.whole:", "while False:"),
    ),
    "all streams are one": (
        both_directions,
        Fault(
            StreamCopier,
            "__init__",
            'lane: device.new_stream(urgent=lane == "urgent") for lane in reversed(LANES)',
            "lane: one for one in [device.new_stream()] for lane in LANES",
        ),
    ),
    "saves are read at any time": (
        any_work,
        Fault(addresses, "_directed", "steady=False", "steady=True"),
    ),
    "a run crosses two registrations": (
        two_pieces,
        Fault(AddressGroup, "_merged", "apart |= pieces[1:] != pieces[:-1]", "pass"),
    ),
    "a slot is handed out before it is registered": (
        registering,
        Fault(Registration, "__init__", "arena.admit(self, 0)", "arena.admit(self, 1)"),
    ),
    "ids are freed before they are read": (
        staged,
        Fault(StreamCopier, "_stage", "copy.held.append(ids)", "pass"),
    ),
    "staging memory is freed in flight": (
        growing_staging,
        Fault(StreamCopier, "_stage", "copy.held.append(memory)", "pass"),
    ),
    "staging memory is freed before closing drains": (
        partial(closing, batched=False),
        Fault(
            StreamCopier,
            "close",
            "self.drain()\n    self._staging.clear()",
            "self._staging.clear()\n    self.drain()",
        ),
    ),
    "a slot is copied whether it is registered or not": (
        refused_registration,
        Fault(StreamCopier, "_require_registered", "slot >= self._registration.ready", "False"),
    ),
    "memory is unregistered before closing drains": (
        closing,
        Fault(
            StreamCopier,
            "close",
            "self.drain()\n    self._staging.clear()\n    self._registration.close()",
            "self._registration.close()\n    self._staging.clear()\n    self.drain()",
        ),
    ),
    # CudaDevice
    "a batch goes to stream 0": (
        any_work,
        Fault(CudaDevice, "copy", "batch, stream.cuda_stream)", "batch, 0)"),
    ),
    "vLLM's operation gets its ends swapped": (
        with_vllms_operation,
        Fault(
            CudaDevice,
            "copy",
            "(batch.sources, batch.targets, batch.sizes)",
            "(batch.targets, batch.sources, batch.sizes)",
        ),
    ),
    "no stream waits for an event": (
        any_work,
        Fault(CudaDevice, "after", "self._stream(stream).wait_event(event)", "pass"),
    ),
    "events are recorded on the engine's stream": (
        any_work,
        Fault(CudaDevice, "mark", "self._stream(stream)", "self._stream(None)"),
    ),
    "pages are gathered on the engine's stream": (
        staged,
        Fault(CudaDevice, "gather", "self._cuda.stream(stream), ", ""),
    ),
    "a thread does not select its device": (
        registering,
        Fault(CudaDevice, "bind", "self._cuda.set_device(self._device)", "pass"),
    ),
    "the context is that of device 0": (
        registering,
        Fault(CudaDevice, "_number", "self._device.index or 0", "0"),
    ),
    "ids are in pageable memory": (staged, Fault(CudaDevice, "ids", ".pin_memory()", "")),
    "a kernel's table is in pageable memory": (
        small,
        Fault(Table, "__init__", ".pin_memory()", ""),
    ),
    "streams are those of device 0": (
        any_work,
        Fault(CudaDevice, "new_stream", "self._cuda.Stream(self._device,", "self._cuda.Stream(0,"),
    ),
    # ten more, and one
    "the orders of sources are confused": (
        any_work,
        Fault(CudaDevice, "_in_one_call", "if batch.steady", "if not batch.steady"),
    ),
    "an error of the driver is ignored": (
        refused_copy,
        Fault(CudaDevice, "_check", "if error:", "if False:"),
    ),
    "events have no time": (
        any_work,
        Fault(CudaDevice, "mark", "enable_timing=stream is not None", "enable_timing=False"),
    ),
    "unregistering enters no context": (
        closing_elsewhere,
        Fault(CudaDevice, "unregister", "with self._entered():", "if True:"),
    ),
    "registered memory is never unregistered": (
        closing,
        Fault(Registration, "close", "while self._registered:", "while False:"),
    ),
    "the kernel runs on the engine's stream": (
        overwritten_slots,
        Fault(CudaDevice, "move", "with self._cuda.stream(stream):", "if True:"),
    ),
    "pages are read in elements that are too wide": (
        partial(any_work, layout=odd, seeds=SEEDS[:3], batched=False),
        Fault(
            cuda,
            "_wide",
            "page.view.data_ptr(), part.data_ptr(), 8",
            "8",
        ),
    ),
    "the kernel moves elements that are too wide": (
        partial(any_work, layout=odd, seeds=SEEDS[:3], small=SLOT_BYTES),
        Fault(
            kernel,
            "table_of",
            "bits & -bits",
            "8",
        ),
    ),
    "staging memory is on device 0": (
        staged,
        Fault(CudaDevice, "staging", "device=self._device", 'device=torch.device("cuda", 0)'),
    ),
    "addresses are those from before a sleep": (
        moving,
        Fault(StreamCopier, "moved", "self._groups = {", "_ = hasattr(self, '_groups') or {"),
    ),
    "pieces overlap": (
        registering,
        Fault(
            Registration,
            "_steps",
            "self._register(self.ready, end)",
            "self._register(max(0, self.ready - 1), end)",
        ),
    ),
    "the host's addresses are used on any device": (
        other_pointers,
        Fault(CudaDevice, "__init__", "bool(self._attribute(USES_HOST_POINTERS))", "True"),
    ),
    "the kernel is used on a device with other addresses": (
        partial(other_pointers, small=SLOT_BYTES),
        Fault(CudaDevice, "prepare", "if not self._host_pointers:", "if False:"),
    ),
}


def kernel_for_few(patch: pytest.MonkeyPatch) -> None:
    """Let the kernel move any number of runs, with two launches in flight."""
    patch.setattr(streams, "KERNEL_RUNS_MIN", 1)
    patch.setattr(cuda, "TABLES", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, start: Start) -> None:
    engines: list[Engine] = []

    def noted(*arguments: Any, **options: Any) -> Engine:
        engines.append(start(*arguments, **options))
        return engines[-1]

    scenario, fault = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, patch)
        kernel_for_few(patch)
        with pytest.raises((AssertionError, ValueError)):
            scenario(noted)
    for engine in engines:  # what is in flight with a fault cannot end
        engine.device.machine.reset()
        forget(engine)


SCENARIOS = {
    scenario: name
    for name, (scenario, _) in FAULTS.items()
    if scenario not in (any_work, staged, small)  # as in test_streams.py
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=SCENARIOS.values())
def test_without_the_fault_its_scenario_passes(
    scenario: Scenario, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_for_few(monkeypatch)
    scenario(start)
