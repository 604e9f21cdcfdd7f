"""Loads layer by layer, and small pages by a kernel, on a simulated device; with faults put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvladder.arena import Slot
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.gpu.copy.device import CopyRuns, Stream
from kvladder.gpu.copy.streams import StreamCopier
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

    def _mark_end(self, launched: Any) -> None:
        super()._mark_end(launched)
        launched.done = next(iter(launched.came.values()), launched.done)


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


def test_a_kernel_moves_a_job_of_registered_memory_in_one_launch(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(small=SLOT_BYTES))
    filled(engine)
    assert [call for call in engine.device.calls if call != "register"] == ["move"]
    for refuses in (True, False):
        device = PlayedDevice(small=SLOT_BYTES, register_max=0 if refuses else 1 << 40)
        engine = filled(start(lbhnc, device, ready=refuses))
        assert [call for call in device.calls if call != "register"] == ["copy"]


def test_pages_that_are_large_are_copied(start: Start) -> None:
    device = PlayedDevice(small=100)
    filled(start(lbhnc, device))
    assert "move" not in device.calls


class Careless(StreamCopier):
    """A kernel for all small runs, registered or not; or one that does not keep its runs alive."""

    forgets = False

    def _small(self, job: CopyJob, batch: CopyRuns) -> bool:
        return True

    def _copy(self, stream: Stream, batch: CopyRuns, launched: Any) -> None:
        super()._copy(stream, batch, launched)
        if self.forgets:
            launched.held.clear()


class Forgetful(Careless):
    forgets = True


def test_a_kernel_on_memory_that_is_not_registered_is_found(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(small=SLOT_BYTES, register_max=0), copies=Careless)
    with pytest.raises(Violation, match="not registered"):
        filled(engine)


def test_runs_that_are_freed_before_the_kernel_reads_them_are_found(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(small=SLOT_BYTES), copies=Forgetful)
    with pytest.raises(Violation, match="was freed"):
        filled(engine)
