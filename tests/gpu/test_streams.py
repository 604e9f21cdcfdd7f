"""Copies on a simulated device: their order against compute, the host's waits, and faults.

An engine runs in virtual time: its forward passes write blocks for a while and read others, and
check the bytes they read. Each possible fault of a copier is planted, and found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvladder.arena import Slot
from kvladder.gpu.copy import cuda, streams
from kvladder.gpu.copy.device import CopyRuns, Event, Stream
from kvladder.gpu.copy.streams import StreamCopier
from tests.gpu.simulated import (
    BLOCKS,
    LAYERS,
    LAYOUTS,
    SEEDS,
    SLOT_BYTES,
    Start,
    Tensors,
    lbhnc,
    run,
)
from tests.kit.played import Operation, PlayedDevice
from tests.kit.played.machine import Stream as Line

WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "staged": {"batched": False},
    "kernel": {"small": SLOT_BYTES},
}


@pytest.mark.product("way", "layout")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_block_stays_whole_whatever_the_engine_does(
    layout: Callable[[], list[Tensors]],
    way: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With odd seeds, a step hands over one slice, and the next steps the others."""
    monkeypatch.setattr(streams, "KERNEL_RUNS_MIN", 1)
    monkeypatch.setattr(cuda, "TABLES", 2)
    for seed in SEEDS:
        device = PlayedDevice(**WAYS[way], run_s=1e-4 * (seed % 2))
        engine = run(start, layout, device, seed, step_s=1e-5)
        assert ("move" in engine.device.calls) == (way == "kernel")
        assert engine.wrong == []
        assert not engine.jobs
        assert engine.device.host_waits == []


# ---- faults that are put in, and found


class SavesBeforeCompute(PlayedDevice):
    """Saves do not wait for the forward pass that fills their blocks."""

    def after(self, stream: Stream, event: Event) -> None:
        if stream is not self.lines[1]:
            super().after(stream, event)


class LoadsBeforeCompute(PlayedDevice):
    """Loads do not wait for the forward pass that still uses their blocks."""

    def after(self, stream: Stream, event: Event) -> None:
        if stream not in self.lines[2:]:
            super().after(stream, event)


class NoFence(PlayedDevice):
    """The forward pass waits for no copy."""

    def after(self, stream: Stream, event: Event) -> None:
        if stream is not None:
            super().after(stream, event)


class SavesAnyTime(PlayedDevice):
    """A driver that may read the bytes of a save before its turn."""

    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        super().copy(stream, batch._replace(steady=True))


class EndsBefore(PlayedDevice):
    """A copy's end is marked before its last part."""

    def mark(self, stream: Stream = None) -> Event:
        last = None
        if isinstance(stream, Line) and stream.todo and isinstance(stream.todo[-1], Operation):
            last = stream.todo.pop()
        event = super().mark(stream)
        if last is not None:
            stream.todo.append(last)
        return event


class OneBuffer(StreamCopier):
    """Both directions stage in the same memory."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

        class Same(dict[str, torch.Tensor]):
            def get(self, key: str, default: Any = None) -> Any:
                del key
                return super().get("any", default)

            def __setitem__(self, key: str, value: torch.Tensor) -> None:
                super().__setitem__("any", value)

        self._staging = Same()  # type: ignore[assignment]


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "staged"])
@pytest.mark.parametrize("fault", [SavesBeforeCompute, LoadsBeforeCompute, NoFence, EndsBefore])
def test_a_copy_out_of_order_is_found(
    fault: type[PlayedDevice], batched: bool, start: Start
) -> None:
    assert any(run(start, lbhnc, fault(batched=batched), seed).wrong for seed in SEEDS)


def test_saves_that_are_read_too_early_are_found(start: Start) -> None:
    assert any(run(start, lbhnc, SavesAnyTime(), seed).wrong for seed in SEEDS)


def test_a_staging_buffer_for_both_directions_is_found(start: Start) -> None:
    device = lambda: PlayedDevice(batched=False)  # noqa: E731
    assert any(run(start, lbhnc, device(), seed, copies=OneBuffer).wrong for seed in SEEDS)


# ---- the host


def test_a_job_of_any_size_is_one_call(start: Start) -> None:
    engine = start(lbhnc)
    engine.forward(0.1, [], [(0, block) for block in range(BLOCKS)])
    engine.save(0, range(8), [*map(Slot, range(8))])
    assert engine.device.calls.count("copy") == 1
    staged = start(lbhnc, PlayedDevice(batched=False), staging_bytes=1 << 20)
    staged.forward(0.1, [], [(0, block) for block in range(BLOCKS)])
    staged.save(0, range(8), [*map(Slot, range(8))])
    assert [call for call in staged.device.calls if call != "register"] == ["gather", "copy"]


def test_neighbours_on_both_sides_are_one_run(start: Start) -> None:
    size = SLOT_BYTES
    batches: list[CopyRuns] = []

    class Noting(PlayedDevice):
        def copy(self, stream: Stream, batch: CopyRuns) -> None:
            batches.append(batch)
            super().copy(stream, batch)

    dense = lambda: [{"kv": torch.zeros(BLOCKS, size, dtype=torch.uint8)}]  # noqa: E731
    engine = start(dense, Noting())
    engine.forward(0.1, [], [(0, block) for block in range(BLOCKS)])
    engine.save(0, [1, 2, 3, 6, 5], [*map(Slot, [0, 1, 2, 4, 5])])
    engine.settle()
    assert batches[0].sizes.tolist() == [3 * size, size, size]
    assert engine.wrong == []


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "staged"])
def test_only_a_wait_blocks_the_host(batched: bool, start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(batched=batched))
    engine.forward(0.5, [], [(0, block) for block in range(BLOCKS)])
    engine.save(0, range(4), [*map(Slot, range(4))])
    engine.forward(0.5, [], [(0, 0)])
    engine.poll()
    assert (engine.device.time_s, engine.device.host_waits) == (0.0, [])
    engine.settle()
    engine.load(0, [Slot(0)], [7], sync=True)
    engine.forward(0.5, [(0, 7)], [])
    assert engine.device.host_waits == []
    engine.settle()
    assert engine.wrong == []


@pytest.mark.parametrize("saved", [1, 4], ids=["the load ends last", "the save ends last"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_fence_is_for_each_of_several_jobs(start: Start, saved: int, swapped: bool) -> None:
    engine = start()
    engine.forward(1e-3, [], [(0, block) for block in range(BLOCKS)])
    engine.save(0, range(4), [Slot(n) for n in range(4)])
    engine.settle()
    loaded = 5 - saved
    jobs = [
        engine.save(0, range(4, 4 + saved), [Slot(n) for n in range(4, 4 + saved)]),
        engine.load(0, [Slot(n) for n in range(loaded)], range(loaded), sync=False),
    ]
    over: list[int] = []
    engine.copier.fence(jobs[::-1] if swapped else jobs)
    begin = lambda: over.extend(one.id for one in engine.poll())  # noqa: E731
    engine.device.told(None, Operation(1e-4, begin, lambda: None))
    engine.settle()
    assert over == jobs


def test_a_load_waits_only_for_earlier_forward_passes(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(batched=False))
    engine.forward(0.1, [], [(0, 0)])
    engine.save(0, [0], [Slot(0)])
    engine.settle()
    begun_s = engine.device.time_s
    load = engine.load(0, [Slot(0)], [1], sync=False)
    engine.forward(0.5, [], [(0, 2)])  # a long one, and a save after it
    engine.save(0, [2], [Slot(1)])
    engine.copier.wait([load])
    assert engine.device.time_s - begun_s < 0.02
    assert [finished.id for finished in engine.poll()] == [load]


class PageableIds(PlayedDevice):
    """A faulty copier: its ids are in ordinary memory."""

    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64)


class OneByOne(PlayedDevice):
    """A faulty copier: each block is a call of its own."""

    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        for at in range(len(batch.sizes)):
            one = slice(at, at + 1)
            targets, sources, sizes = (array[one] for array in batch[:3])
            super().copy(stream, CopyRuns(targets, sources, sizes, batch.steady))


def test_ids_in_ordinary_memory_are_found(start: Start) -> None:
    engine = start(lbhnc, PageableIds(batched=False))
    engine.forward(0.5, [], [(0, 0)])
    engine.save(0, [0], [Slot(0)])
    [(why, seconds)] = engine.device.host_waits
    assert why == "memory that is not registered"
    assert seconds >= 0.5


def test_a_call_for_each_block_is_found(start: Start) -> None:
    engine = start(lbhnc, OneByOne())
    engine.forward(0.1, [], [(0, block) for block in range(8)])
    engine.save(0, range(8), [*map(Slot, range(8))])
    assert engine.device.calls.count("copy") == 8 * LAYERS


# ---- failures


def test_a_job_that_the_device_refuses_fails_and_the_next_one_works(start: Start) -> None:
    engine = start(lbhnc)
    engine.forward(0.1, [], [(0, 0)])
    engine.device.played.driver.refusal = 1
    engine.save(0, [0], [Slot(0)])
    engine.save(0, [0], [Slot(1)])
    engine.device.settle()
    ended = engine.poll()
    assert [finished.ok for finished in ended] == [False, True]
    assert "invalid argument" in ended[0].error
    assert engine.wrong == []


def test_a_device_that_fails_ends_all_jobs_and_no_call_raises(start: Start) -> None:
    engine = start(lbhnc)
    engine.forward(0.1, [], [(0, 0)])
    first = engine.save(0, [0], [Slot(0)])
    engine.device.machine.failing = "an illegal memory access"
    engine.save(0, [0], [Slot(1)])
    engine.copier.wait([first])
    engine.copier.rest(1.0)
    ended = engine.poll()
    assert {finished.ok for finished in ended} == {False}
    assert len(ended) == 2
    assert "illegal memory access" in ended[0].error


def test_a_partly_begun_job_keeps_its_blocks_until_it_ends(start: Start) -> None:
    class Second(PlayedDevice):
        def gather(self, *arguments: Any, **options: Any) -> None:
            if self.calls.count("gather"):
                raise RuntimeError("no more")
            super().gather(*arguments, **options)

    engine = start(lbhnc, Second(batched=False), staging_bytes=1)
    engine.forward(0.5, [], [(0, 0), (0, 1)])
    engine.save(0, [0, 1], [Slot(0), Slot(1)])
    assert engine.poll() == []
    engine.device.settle()
    [finished] = engine.poll()
    assert (finished.ok, finished.bytes) == (False, 0)
    assert "no more" in finished.error


@pytest.mark.parametrize(("blocks", "works"), [(4.5, True), (1.5, True), (0.5, False)])
def test_the_staging_buffer_is_as_large_as_free_memory_allows(
    blocks: float, works: bool, start: Start
) -> None:
    device = PlayedDevice(batched=False, room=10**9)
    engine = start(lbhnc, device)
    device.played.memory.room[1] = int(blocks * engine.parts[0].pages.block_bytes)
    engine.forward(0.1, [], [(0, block) for block in range(8)])
    engine.save(0, range(8), [*map(Slot, range(8))])
    engine.device.settle()
    [finished] = engine.poll()
    assert finished.ok is works
    assert works or "OutOfMemory" in finished.error
    assert engine.wrong == []


def test_copies_in_flight_end_before_the_engine_sleeps(start: Start) -> None:
    for drains in (True, False):
        engine = start(lbhnc)
        engine.forward(0.5, [], [(0, 0)])
        engine.save(0, [0], [Slot(0)])
        if drains:
            engine.copier.drain()
            assert [finished.ok for finished in engine.poll()] == [True]
        engine.device.played.memory.unmap(engine.parts[0].pages.pages[0].view)
        if drains:
            engine.device.advance(1.0)
        else:
            with pytest.raises(AssertionError, match="unmapped"):
                engine.device.advance(1.0)
        engine.device.played.memory.unmapped.clear()


def test_a_fork_leaves_the_device_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(lbhnc)
    registered = engine.device.registered
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        engine.copier.close()
    assert engine.device.registered == registered
