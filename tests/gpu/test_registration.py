"""Registering the arena with a simulated device: piece by piece, within limits, and reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvladder.arena import Arena, Slot
from kvladder.device.opening import open_device
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.gpu.copy.registration import SPARE_BYTES, Registration, table_bytes
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.plan import CachePlan
from tests.gpu.simulated import SLOT_BYTES, SLOTS, Start, dense, lbhnc
from tests.kit.played import PlayedDevice


def pieces(arena: Arena, device: PlayedDevice, slots: int) -> Registration:
    return Registration(device, arena, piece_bytes=slots * arena.slot_bytes)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(9, 4096)
    yield arena
    arena.check()
    arena.close()


def test_a_run_of_bytes_ends_where_a_registered_piece_does(start: Start) -> None:
    engine = start(dense, piece_bytes=3 * SLOT_BYTES)
    places = [(0, block) for block in range(SLOTS)]
    engine.forward(0.1, [], places)
    engine.save(0, range(SLOTS), [*map(Slot, range(SLOTS))])
    engine.settle()
    assert len(engine.stored) == SLOTS
    engine.load(0, [*map(Slot, range(SLOTS))], range(SLOTS), sync=True)
    engine.settle()
    assert engine.wrong == []
    assert engine.device.calls.count("copy") == 2


def test_a_slot_is_handed_out_only_once_its_piece_is_registered(arena: Arena) -> None:
    device = PlayedDevice()
    registration = pieces(arena, device, 4)
    assert (arena.admitted, arena.free, arena.lease(1)) == (0, 0, None)
    for ready in (4, 8, 9):
        device.advance(0.0)
        assert (arena.admitted, arena.free) == (ready, ready)
        arena.check()
        assert device.registered == ready * 4096
    registration.close()
    registration.close()
    assert device.registered == 0
    assert arena.free == 9


def test_slots_leased_during_the_registration_stay_leased(arena: Arena) -> None:
    [first, *_] = held = arena.lease(3) or []
    device = PlayedDevice()
    registration = pieces(arena, device, 4)
    assert arena.free == 0
    arena.release([first])
    device.advance(0.0)
    arena.check()
    arena.release(held[1:])
    device.work_in_background()
    assert sorted(arena.lease(9) or []) == [*range(9)]
    arena.release([*map(Slot, range(9))])
    registration.close()


@pytest.mark.parametrize("most", [0, 2, 5])
def test_slots_that_cannot_be_registered_are_never_handed_out(
    most: int, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    device = PlayedDevice(registered_max=most * SLOT_BYTES)
    engine = start(lbhnc, device, piece_bytes=SLOT_BYTES)
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{SLOTS - most} slots stay unused: out of memory (2)" in record.message
    assert "make arena.size smaller" in record.message
    assert device.calls == ["register"] * (most + 1), "what follows would be refused, too"
    assert (engine.arena.admitted, engine.arena.free) == (most, most)
    assert engine.copier.settled
    engine.forward(0.1, [], [(0, 0)])
    for slot in range(most):
        engine.save(0, [0], [Slot(slot)])
    engine.settle()
    assert len(engine.stored) == most
    assert (engine.wrong, device.host_waits) == ([], [])


def test_a_job_with_a_slot_whose_registration_was_refused_fails(start: Start) -> None:
    engine = start(lbhnc, PlayedDevice(registered_max=2 * SLOT_BYTES), piece_bytes=SLOT_BYTES)
    engine.forward(0.5, [], [(0, 0), (0, 1)])
    engine.copier.submit(CopyJob(JobId(99), "offload", (0, 1), (Slot(1), Slot(2))))
    engine.copier.fence([JobId(99)])
    [finished] = engine.copier.poll()
    assert finished.error == "slot 2 is not registered with the device; it has registered 2"
    assert {"copy", "gather"}.isdisjoint(engine.device.calls)


@pytest.mark.parametrize("direction", ["offload", "onboard"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "staged"])
def test_a_job_with_a_slot_that_is_not_registered_fails_and_the_host_does_not_wait(
    direction: Any, batched: bool, start: Start
) -> None:
    """The slot may have been leased before the device was there, by another user of the arena."""
    engine = start(lbhnc, PlayedDevice(batched=batched), ready=False, piece_bytes=4 * SLOT_BYTES)
    engine.device.step_background()
    assert (engine.arena.admitted, engine.copier.settled) == (4, False)
    engine.forward(0.5, [], [(0, 0), (0, 1)])
    engine.copier.submit(CopyJob(JobId(99), direction, (0, 1), (Slot(3), Slot(4))))
    engine.copier.fence([JobId(99)])
    [finished] = engine.copier.poll()
    assert (finished.id, finished.ok) == (99, False)
    assert finished.error == "slot 4 is not registered with the device; it has registered 4"
    assert engine.device.host_waits == []
    assert {"copy", "gather"}.isdisjoint(engine.device.calls)


def test_a_device_without_memory_for_page_tables_registers_no_more(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has planned its memory before, and does not know of this use."""

    class Filling(PlayedDevice):
        def register(self, address: int, size: int) -> str:
            self.played.memory.room[1] -= table_bytes(size)
            return super().register(address, size)

    for spare, registered in ((0, 0), (table_bytes(4 * 4096), 4)):
        caplog.clear()
        device = Filling(room=SPARE_BYTES + spare)
        registration = pieces(arena, device, 4)
        device.work_in_background()
        assert (registration.ready, arena.admitted) == (registered, registered)
        assert "64 MiB of device memory are free, page tables for the next slots" in caplog.text
        registration.close()


def test_page_tables_take_an_entry_for_each_page() -> None:
    gib = 1 << 30
    assert table_bytes(500 * gib) == 1000 << 20  # about 1 GiB for 500 GiB in small pages
    assert table_bytes(500 * gib, 1.0) == 500 * 512 * 8
    assert table_bytes(gib, 0.5) == (256 + (gib >> 13)) * 8
    assert table_bytes(5000) == 16


def test_memory_for_page_tables_of_the_arena_is_left_free_on_cuda() -> None:
    """The tensors are in main memory, so that the division of a CUDA device can be made here."""
    stack = {"arena": {"size": "8 MiB"}, "tiers": [{"name": "host", "type": "host"}]}

    def zeros(name: str, count: int, size: int) -> torch.Tensor:
        return torch.zeros(count, size, dtype=torch.uint8)

    sizes = {"cpu": 0, "cuda": 0}
    for where in [*sizes]:
        plan = CachePlan([Layer("0", 4, 16, "float32")], block_tokens=4, max_tokens=32)
        given: dict[str, Any] = {"fields": {}, "free_bytes": 1_000_000, "allocate": zeros}
        with open_device(stack, plan, device=where, **given) as cache:
            sizes[where] = cache.division.memory
            told = "page tables of the registered arena: up to 16 KiB beside the pools"
            assert (told in cache.describe()) == (where == "cuda")
    assert sizes == {"cpu": 900_000, "cuda": int(0.9 * (1_000_000 - (8 << 20) // 4096 * 8))}


def test_the_arena_knows_its_share_in_huge_pages(arena: Arena) -> None:
    other = Arena.attach(arena.handle)
    assert other.huge_share == arena.huge_share
    assert 0.0 <= arena.huge_share <= 1.0
    other.close()


def test_a_piece_holds_whole_slots_up_to_the_maximum_size(arena: Arena) -> None:
    device = PlayedDevice(register_max=4 * 4096)
    registration = Registration(device, arena, piece_bytes=4 * 4096 + 5)
    device.work_in_background()
    assert device.calls == ["register"] * 3
    assert device.registered == arena.slots * 4096
    registration.close()
    whole = Registration(device, arena)  # one call for all of it is refused
    device.work_in_background()
    assert device.registered == 0
    whole.close()


def test_progress_is_logged_in_a_few_lines_and_then_the_result(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    device = PlayedDevice()
    with caplog.at_level("INFO", logger="kvladder"):
        registration = pieces(arena, device, 1)
        device.work_in_background()
    registration.close()
    *progress, result = [record.message for record in caplog.records]
    assert [line.split(" after")[0].rpartition(": ")[2] for line in progress] == [
        "33 %", "55 %", "77 %",
    ]  # fmt: skip
    about = (
        "copies on cuda:1 (played, driver for CUDA 12.8) are made in batches by the driver; small"
    )
    assert result.startswith(about)
    assert "36 KiB of the arena registered in 0.0 s, with page tables of up to 72 B" in result
    assert result.endswith("% in huge pages")


def test_registering_names_its_device(arena: Arena) -> None:
    class Unbound(PlayedDevice):
        def bind(self) -> None:
            """Stay in the thread that binds."""

    for device, registered in ((PlayedDevice(), 9 * 4096), (Unbound(), 0)):
        registration = pieces(arena, device, 4)
        device.work_in_background()
        assert device.registered == registered
        registration.close()
        device.played.check()


def test_a_refusal_that_leaves_an_error_behind_is_found(start: Start) -> None:
    class ByRuntime(PlayedDevice):
        def register(self, address: int, size: int) -> str:
            self.machine.pending = super().register(address, size)
            return self.machine.pending

    engine = start(lbhnc, ByRuntime(register_max=0))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward(0.1, [], [(0, 0)])
    quiet = start(lbhnc, PlayedDevice(register_max=0))
    quiet.forward(0.1, [], [(0, 0)])
    quiet.settle()


def test_closing_stops_a_registration_in_progress(arena: Arena) -> None:
    device = PlayedDevice()
    registration = pieces(arena, device, 2)
    device.advance(0.0)
    registration.close()
    assert device.registered == 0
    assert device.calls == ["register"]
    assert arena.free == 9
