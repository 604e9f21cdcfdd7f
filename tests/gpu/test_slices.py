"""Jobs in slices, on a simulated device: short loads first, and a bound on the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvladder.arena import Slot
from kvladder.gpu.copy import streams
from kvladder.gpu.copy.addresses import SliceLimits
from kvladder.gpu.copy.copier import CopyJob, Direction, JobId, Lane, lane_of
from kvladder.gpu.copy.streams import StreamCopier
from tests.gpu.simulated import BLOCKS, LAYERS, SEEDS, Engine, Start, Tensors, blhnc, lbhnc, run
from tests.kit.played import PlayedDevice
from tests.kit.played.machine import CALL_S

BLOCK = LAYERS * 512
"""Bytes of a block."""


def job(number: int, direction: Direction, blocks: Sequence[int]) -> CopyJob:
    """Return a job between blocks and the slots of the same numbers."""
    return CopyJob(JobId(number), direction, tuple(blocks), tuple(map(Slot, blocks)))


# ---- short loads


class OneLane(StreamCopier):
    """A faulty copier: all loads queue in one stream."""

    def _lane(self, job: CopyJob, block_bytes: int, *, urgent: bool) -> Lane:
        del block_bytes, urgent
        return "offload" if job.direction == "offload" else "onboard"


def until_short(start: Start, copies: type[StreamCopier], **options: Any) -> float:
    """Return how long a load of one block takes behind one of seven."""
    engine = start(lbhnc, PlayedDevice(), copies=copies, **options)
    begun_s = engine.device.time_s
    engine.copier.submit(job(1, "onboard", range(7)))
    engine.copier.submit(job(2, "onboard", [7]))
    while 2 not in (ended := [finished.id for finished in engine.copier.poll()]):
        engine.device.advance(1e-5)
    took_s = engine.device.time_s - begun_s
    engine.device.settle()
    assert len(ended) + len(engine.copier.poll()) <= 2
    return took_s


def test_a_short_load_waits_for_at_most_one_slice_of_a_long_one(start: Start) -> None:
    slice_s = CALL_S + BLOCK * 1e-9
    assert until_short(start, StreamCopier, slice_bytes=BLOCK) < 2.5 * slice_s
    assert until_short(start, OneLane, slice_bytes=BLOCK) > 7.5 * slice_s, "this test can fail"


def test_a_load_that_a_forward_pass_waits_for_overtakes_whatever_its_size(start: Start) -> None:
    for urgent in (True, False):
        engine = start(lbhnc, PlayedDevice(), slice_bytes=BLOCK)
        engine.copier.submit(job(1, "onboard", range(6)))
        engine.copier.submit(job(2, "onboard", range(6, 8)), urgent=urgent)
        order: list[int] = []
        while len(order) < 2:
            engine.device.advance(1e-5)
            order += [finished.id for finished in engine.copier.poll()]
        assert order == ([2, 1] if urgent else [1, 2])


def test_only_loads_are_short() -> None:
    size = 1 << 20
    for count, urgent, lane in (
        (64, False, "urgent"),
        (256, False, "onboard"),
        (256, True, "urgent"),
    ):
        places = tuple(range(count))
        load = CopyJob(JobId(1), "onboard", places, tuple(map(Slot, places)))
        assert lane_of(load, size, urgent=urgent) == lane
        save = CopyJob(JobId(1), "offload", places, tuple(map(Slot, places)))
        assert lane_of(save, size, urgent=urgent) == "offload"


# ---- the host's time


RUN_S = 1e-4
"""Time of the host for each run; a slice of one block takes three times as long."""
STEP_S = 3 * LAYERS * RUN_S + 1e-6
"""The budget of a step: two slices, and room for a third that takes longer."""


def slow(start: Start, layout: Callable[[], list[Tensors]] = lbhnc, **options: Any) -> Engine:
    """Return an engine that hands over two slices of one block in a step."""
    device = PlayedDevice(run_s=RUN_S, **options)
    return start(layout, device, slice_bytes=BLOCK, step_s=STEP_S)


def calls(engine: Engine) -> int:
    return engine.device.calls.count("copy")


def next_step(engine: Engine) -> list[int]:
    """Poll in the next step; return the jobs that ended."""
    engine.device.run_on(streams.STEPS_S * STEP_S)
    return [finished.id for finished in engine.copier.poll()]


def test_a_step_hands_over_slices_for_a_limited_time_and_the_next_ones_the_rest(
    start: Start,
) -> None:
    engine = slow(start)
    engine.copier.submit(job(1, "onboard", range(7)))
    begun_s = engine.device.time_s
    assert calls(engine) == 2
    for _ in range(5):  # in the same step
        assert engine.copier.poll() == []
        engine.copier.submit(job(2 + _, "offload", [7]))
    assert calls(engine) == 2
    assert engine.device.time_s == begun_s
    told: list[int] = []
    for count in (4, 6, 8, 10, 12):
        begun_s = engine.device.time_s + streams.STEPS_S * STEP_S
        told += next_step(engine)
        assert calls(engine) == count
        assert engine.device.time_s - begun_s <= STEP_S
    engine.device.settle()
    told += next_step(engine)
    assert sorted(told) == [1, 2, 3, 4, 5, 6]
    assert engine.device.host_waits == []


def test_a_step_hands_over_at_least_one_slice(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(run_s=RUN_S), slice_bytes=BLOCK, step_s=1e-9)
    engine.copier.submit(job(1, "onboard", range(3)))
    for count in (1, 2, 3):
        assert calls(engine) == count
        next_step(engine)


def test_saves_and_long_loads_take_turns_and_short_loads_come_first(start: Start) -> None:
    engine = slow(start)
    engine.copier.submit(job(1, "onboard", range(4)))
    engine.copier.submit(job(2, "offload", range(4, 8)))
    order: list[int] = []

    class Noting(PlayedDevice):
        def copy(self, stream: Any, batch: Any) -> None:
            order.append(self.lines.index(stream))
            super().copy(stream, batch)

    engine.device.__class__ = Noting
    next_step(engine)
    engine.copier.submit(CopyJob(JobId(3), "onboard", (9,), (Slot(7),)))
    next_step(engine)
    next_step(engine)
    assert order == [1, 2, 3, 1, 2, 1]


def test_an_idle_engine_hands_over_all_that_there_is(start: Start) -> None:
    engine = slow(start)
    engine.copier.submit(job(1, "onboard", range(7)))
    engine.copier.rest(1.0)
    assert calls(engine) == 7
    assert [finished.id for finished in engine.copier.poll()] == [1]


@pytest.mark.parametrize("ends", ["wait", "drain", "close"])
def test_a_wait_hands_over_the_rest(ends: str, start: Start) -> None:
    engine = slow(start)
    engine.copier.submit(job(1, "onboard", range(5)))
    assert calls(engine) == 2
    if ends == "wait":
        engine.copier.wait([JobId(1)])
    else:
        getattr(engine.copier, ends)()
    assert calls(engine) == 5
    assert [(one.id, one.ok) for one in engine.copier.poll()] == [(1, True)]


# ---- fences


class FenceOfTheBegun(StreamCopier):
    """A faulty copier: a fence is only for the slices that were handed over before."""

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for copy in self._named(set(ids)):
                if copy.done is not None:
                    patch.setattr(copy, "whole", True)
            super().fence(ids, layer)


class OverAtFirstSlice(StreamCopier):
    """A faulty copier: the end of a job is the event of its first slice."""

    def _hand(self, copy: Any) -> None:
        first = copy.done
        super()._hand(copy)
        copy.done = first or copy.done


class LaterFirst(StreamCopier):
    """A faulty copier: it orders only the first slice of a job after the engine's work."""

    def _hand(self, copy: Any) -> None:
        super()._hand(copy)
        copy.begun = copy.done
        self._streams = {**self._streams, copy.lane: self.device.new_stream()}


@pytest.mark.parametrize("layout", [lbhnc, blhnc])
@pytest.mark.parametrize("fault", [FenceOfTheBegun, OverAtFirstSlice, LaterFirst])
def test_a_fence_or_an_end_before_the_last_slice_is_found(
    fault: type[StreamCopier], layout: Callable[[], list[Tensors]], start: Start
) -> None:
    def wrong(seed: int) -> bool:
        engine = run(start, layout, PlayedDevice(run_s=1e-4), seed, fault, step_s=1e-5)
        return bool(engine.wrong)

    assert any(map(wrong, SEEDS))


def test_a_fence_hands_over_all_slices_of_its_jobs_and_no_others(start: Start) -> None:
    engine = slow(start)
    engine.copier.submit(job(1, "onboard", range(4)))
    engine.copier.submit(job(2, "onboard", range(4, 8)))
    assert calls(engine) == 2
    engine.copier.fence([JobId(2), JobId(77)])
    assert calls(engine) == 2 + 4
    assert engine.device.host_waits == []


def test_a_fence_for_a_layer_hands_over_that_layer_alone(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(run_s=RUN_S), slice_bytes=2 * 512, step_s=1e-9, turn_bytes=1)
    engine.copier.submit(job(1, "onboard", range(6)), by_layer=True)
    assert calls(engine) == 1
    for number in range(LAYERS):
        engine.copier.fence([JobId(1)], f"layer{number}")
        assert calls(engine) == 3 * (number + 1)
    engine.device.settle()
    [finished] = engine.copier.poll()
    assert finished.ok


# ---- failures


def test_a_wrong_block_in_a_later_slice_fails_the_job_when_the_earlier_ones_have_ended(
    start: Start,
) -> None:
    engine = slow(start)
    wrong = CopyJob(JobId(1), "onboard", (0, 1, 2, BLOCKS), tuple(map(Slot, range(4))))
    engine.copier.submit(wrong)
    assert next_step(engine) == []
    engine.device.settle()
    [finished] = engine.copier.poll()
    assert finished.error == f"block {BLOCKS} of {BLOCKS} does not exist"
    at_once = CopyJob(JobId(2), "offload", (-1,), (Slot(0),))
    engine.copier.submit(at_once)
    engine.device.run_on(1.0)
    [finished] = engine.copier.poll()
    assert finished.error == f"block -1 of {BLOCKS} does not exist"


def test_a_device_that_fails_between_slices_fails_the_job_once(start: Start) -> None:
    engine = slow(start)
    engine.copier.submit(job(1, "onboard", range(5)))
    engine.device.machine.failing = "an illegal memory access"
    assert next_step(engine) == [1]
    assert next_step(engine) == []
    assert calls(engine) == 3


def test_slices_use_the_same_memory_for_their_runs(start: Start) -> None:
    engine = start(lbhnc)
    group = engine.copier._groups[0]
    slices = group.whole(job(1, "onboard", range(8)), SliceLimits(2 * BLOCK, 6))
    ends: list[int] = []
    for part in slices:
        assert len(part.runs.sizes) == 6
        assert all(np.shares_memory(array, group._buffers) for array in part.runs[:3])
        ends += part.runs.targets.tolist()
    assert len({*ends}) == 8 * LAYERS
    [few, *_] = group.whole(job(1, "onboard", range(8)), SliceLimits(1 << 40, 2 * LAYERS + 1))
    assert len(few.runs.sizes) == 2 * LAYERS
