"""Loads layer by layer, and small pages by a kernel, on a simulated device; with faults put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvladder.arena import Slot
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.gpu.copy.device import CopyRuns, Stream
from kvladder.gpu.copy.streams import KERNEL_RUNS_MIN, StreamCopier
from tests.gpu.simulated import LAYERS, SEEDS, SLOT_BYTES, Engine, Start, Tensors, blhnc, lbhnc, run
from tests.kit.played import PlayedDevice, Violation
from tests.kit.played.machine import BYTE_S

# ---- by layer


class OneLayer(StreamCopier):
    """Waits for another layer than that which is named: for none, or for the one before it."""

    before = False

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        if layer == "layer0" and not self.before:
            return
        if layer is not None and self.before:
            layer = f"layer{max(0, int(layer[-1]) - 1)}"
        super().fence(ids, layer)


class LayerBefore(OneLayer):
    before = True


class OverAtFirst(StreamCopier):
    """A faulty copier: a job ends with its first layer, which frees its slots too early."""

    def _hand(self, copy: Any) -> None:
        super()._hand(copy)
        copy.done = next(iter(copy.came.values()), copy.done)


LAYERED = [lbhnc, blhnc]


@pytest.mark.parametrize("layout", LAYERED)
def test_a_forward_pass_begins_once_its_first_layer_is_loaded(
    layout: Callable[[], list[Tensors]], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.kit.played.machine.CALL_S", 0.0)
    taken: dict[bool, float] = {}
    layer_s = 0.0
    for by_layer in (True, False):
        engine = filled(start(layout, turn_bytes=1))
        begun_s = engine.device.time_s
        layer_s = 4 * BYTE_S * engine.parts[0].pages.block_bytes / LAYERS
        if by_layer:
            engine.by_layer(0, [*map(Slot, range(4))], range(4, 8), LAYERS * layer_s)
        else:
            engine.load(0, [*map(Slot, range(4))], range(4, 8), sync=True)
            engine.forward(LAYERS * layer_s, [(0, block) for block in range(4, 8)], [])
        assert engine.device.host_waits == []
        end = engine.device.mark()
        engine.settle()
        assert engine.wrong == []
        taken[by_layer] = end.at_s - begun_s
    assert taken[True] == pytest.approx((LAYERS + 1) * layer_s)  # the copies are hidden
    assert taken[False] > 1.4 * taken[True]


def filled(engine: Engine) -> Engine:
    """Return an engine with blocks in its first four slots."""
    engine.forward(0.1, [], [(0, block) for block in range(4)])
    engine.save(0, range(4), [*map(Slot, range(4))])
    engine.settle()
    return engine


@pytest.mark.parametrize("layout", LAYERED)
@pytest.mark.parametrize("copies", [OneLayer, LayerBefore])
def test_a_layer_that_does_not_wait_for_its_own_bytes_is_found(
    copies: type[StreamCopier], layout: Callable[[], list[Tensors]], start: Start
) -> None:
    assert any(run(start, layout, PlayedDevice(), seed, copies).wrong for seed in SEEDS)


@pytest.mark.parametrize("copies", [StreamCopier, OverAtFirst])
def test_slots_are_in_use_until_the_last_layer_is_loaded(
    copies: type[StreamCopier], start: Start
) -> None:
    engine = filled(start(lbhnc, copies=copies, turn_bytes=1))
    load = engine.by_layer(0, [Slot(0)], [4], 1.0)
    while [finished.id for finished in engine.poll()] != [load]:
        engine.device.advance(1e-5)
    del engine.stored[Slot(0)]
    engine.arena.view(Slot(0))[:] = bytes(SLOT_BYTES)  # it is free: a tier fills it
    engine.device.settle()
    assert bool(engine.wrong) == (copies is OverAtFirst)


def test_layers_that_are_small_are_copied_together(start: Start) -> None:
    engine = filled(start(lbhnc))
    told = engine.device.calls.count("copy")
    page = engine.parts[0].pages.layers[0].size_bytes
    engine.copier._turn_bytes = 2 * 4 * page
    engine.by_layer(0, [*map(Slot, range(4))], range(4, 8), 0.1)
    assert engine.device.calls.count("copy") == told + 2
    engine.settle()
    assert engine.wrong == []


def test_a_load_that_fails_at_one_layer_fails_before_its_forward_pass_is_announced(
    start: Start,
) -> None:
    class Third(PlayedDevice):
        left = 10**6

        def copy(self, stream: Stream, batch: CopyRuns) -> None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no more")
            super().copy(stream, batch)

    device = Third()
    engine = filled(start(lbhnc, device, turn_bytes=1))
    device.left = 1
    job = CopyJob(JobId(99), "onboard", (5,), (Slot(0),))
    engine.copier.submit(job, by_layer=True)
    engine.copier.fence([job.id], "layer0")
    [finished] = engine.copier.poll()
    assert (finished.id, finished.ok) == (job.id, False)
    assert "no more" in finished.error


# ---- small pages, by a kernel


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves any number of runs."""
    monkeypatch.setattr("kvladder.gpu.copy.streams.KERNEL_RUNS_MIN", 1)


def loaded(engine: Engine) -> list[str]:
    """Return the calls of a device for a load of four blocks, which came right."""
    begun = len(engine.device.calls)
    engine.load(0, [*map(Slot, range(4))], range(4, 8), sync=True)
    calls = engine.device.calls[begun:]
    engine.settle()
    assert (engine.wrong, engine.device.host_waits) == ([], [])
    return calls


@pytest.mark.usefixtures("few")
def test_a_kernel_loads_small_pages_and_copy_engines_save_them(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(small=SLOT_BYTES))
    filled(engine)
    assert [call for call in engine.device.calls if call != "register"] == ["copy"]
    assert loaded(engine) == ["move"]


@pytest.mark.usefixtures("few")
def test_pages_that_are_large_are_copied(start: Start) -> None:
    assert loaded(filled(start(lbhnc, PlayedDevice(small=100)))) == ["copy"]


def test_too_few_runs_for_a_launch_are_copied(start: Start) -> None:
    engine = filled(start(lbhnc, PlayedDevice(small=SLOT_BYTES)))
    assert 4 * LAYERS < KERNEL_RUNS_MIN
    assert loaded(engine) == ["copy"]
    engine.forward(0.1, [], [(0, block) for block in range(6)])
    engine.save(0, range(6), [*map(Slot, range(6))])
    engine.settle()
    engine.load(0, [*map(Slot, range(6))], range(4, 10), sync=True)
    assert engine.device.calls[-1] == "move"
    engine.settle()
    assert engine.wrong == []


@pytest.mark.usefixtures("few")
def test_without_a_free_table_of_runs_a_slice_is_copied(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvladder.gpu.copy.cuda.TABLES", 3)
    size = LAYERS * 512
    engine = filled(start(lbhnc, PlayedDevice(small=SLOT_BYTES), slice_bytes=size))
    assert loaded(engine) == ["move"] * 3 + ["copy"]
    engine.forward(0.1, [], [(0, block) for block in range(4)])
    assert loaded(filled(engine)) == ["move"] * 3 + ["copy"], "the tables are free again"


class Careless(StreamCopier):
    """A faulty copier: it does not ask whether slots are registered."""

    def _require_registered(self, slot: int) -> None:
        del slot


@pytest.mark.usefixtures("few")
def test_a_copy_of_memory_that_is_not_registered_is_found(start: Start) -> None:
    device = PlayedDevice(small=SLOT_BYTES, register_max=0)
    device.bind()
    device.prepare()
    engine = start(lbhnc, device, copies=Careless)
    engine.copier.submit(CopyJob(JobId(1), "onboard", (5,), (Slot(0),)))
    with pytest.raises(Violation, match="memory that is not registered"):
        device.settle()
    device = PlayedDevice(register_max=0)
    engine = start(lbhnc, device, copies=Careless)
    engine.forward(0.5, [], [(0, 0)])
    engine.save(0, [0], [Slot(0)])
    [(why, seconds)] = device.host_waits
    assert why == "memory that is not registered"
    assert seconds >= 0.5
