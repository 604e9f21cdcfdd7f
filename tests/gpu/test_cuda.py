"""Calls to CUDA's libraries, on the played machine: arguments, order of choice, refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvladder.arena import Arena, Slot
from kvladder.errors import LayoutError
from kvladder.gpu.copy import cuda
from kvladder.gpu.copy.cuda import copier_for, numa_node
from kvladder.gpu.copy.device import CopyRuns
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.gpu.copy.registration import Registration
from tests.kit.played import Operation, Played, PlayedDevice, plain

CPU = torch.device("cpu")
NO_CONTEXT = 201


@pytest.fixture
def memory() -> Iterator[Arena]:
    arena = Arena.create(2, 4096)
    yield arena
    arena.close()


def batch(
    device: PlayedDevice, memory: Arena, *, steady: bool
) -> tuple[CopyRuns, Callable[[], None]]:
    """Three runs from the device to registered memory, and a check that they were copied."""
    source = device.own(torch.arange(1, 101, dtype=torch.uint8))
    device.register(memory.address, memory.size_bytes)
    device.played.driver.calls.clear()
    at = np.array([0, 40, 90], np.uint64)
    sizes = np.array([8, 16, 1], np.uint64)
    base = np.uint64(memory.address), np.uint64(source.data_ptr())

    def check() -> None:
        device.settle()
        target, held = memory.view(Slot(0)), plain(source).numpy()
        for start, size in ((0, 8), (40, 16), (90, 1)):
            assert bytes(target[start : start + size]) == bytes(held[start : start + size])
        assert np.count_nonzero(np.frombuffer(target, np.uint8)) == 25
        device.played.check()

    return CopyRuns(base[0] + at, base[1] + at, sizes, steady), check


@pytest.mark.parametrize("steady", [True, False])
def test_a_batch_is_one_call_of_the_driver(steady: bool, memory: Arena) -> None:
    device = PlayedDevice()
    stream = device.new_stream()
    work, check = batch(device, memory, steady=steady)
    device.copy(stream, work)
    check()
    assert device.batched
    assert device.played.driver.calls == ["copy"]
    device.played.driver.refusal = 2
    with pytest.raises(RuntimeError, match=r"driver returned an error: out of memory \(2\)"):
        device.copy(stream, work)
    assert ctypes.sizeof(cuda._Attributes) == 24


def test_without_the_drivers_batched_copies_vllms_are_used(memory: Arena) -> None:
    device = PlayedDevice(Played(batched="vllm"))
    work, check = batch(device, memory, steady=True)
    device.copy(device.new_stream(), work)
    check()
    assert device.batched
    assert device.played.driver.calls == []


def test_without_batched_copies_each_run_is_a_call_and_the_description_says_so(
    memory: Arena,
) -> None:
    device = PlayedDevice(batched=False)
    assert "driver for CUDA 12.7" in device.describe()
    assert "one by one: batches need cuda-bindings and a driver for CUDA 12.8" in device.describe()
    assert (device.batched, device.runs_max) == (False, cuda.SINGLE_RUNS_MAX)
    stream = device.new_stream()
    work, check = batch(device, memory, steady=False)
    device.copy(stream, work)
    check()
    assert device.played.driver.calls == ["copy"] * 3
    device.copy(stream, work._replace(sizes=work.sizes[:0]))
    assert len(device.played.driver.calls) == 3
    device.played.driver.refusal = 1
    with pytest.raises(RuntimeError, match="the driver returned an error"):
        device.copy(stream, work)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_this_machine_has_no_batched_copies() -> None:
    assert cuda.batched_by_driver() is None
    assert cuda.batched_by_vllm() is None


def test_a_refused_registration_leaves_no_error_in_the_driver(memory: Arena) -> None:
    device = PlayedDevice(register_max=4096)
    device.bind()
    assert device.register(memory.address, 8192) == "out of memory (2)"
    assert device.register(memory.address, 4096) == ""
    device.told(None, Operation(0.1, lambda: None, lambda: None))  # raises no error
    device.unregister(memory.address)
    assert device.registered == 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_new_thread_enters_the_devices_context_before_it_asks_the_driver(
    number: int, memory: Arena
) -> None:
    """Also on the first device: torch makes no context current there, since one exists already."""
    device = PlayedDevice(Played(device=number))
    said: list[str] = []

    def registers() -> Iterator[None]:
        said.append(device.register(memory.address, 4096))
        device.bind()
        said.append(device.register(memory.address, 4096))
        yield

    def unregisters() -> Iterator[None]:
        device.unregister(memory.address)
        yield

    device.background(registers())()
    assert said == [f"invalid device context ({NO_CONTEXT})", ""]
    device.background(unregisters())()
    assert device.registered == 0
    device.played.check()


def test_a_device_without_a_context_registers_nothing_and_logs_it(
    memory: Arena, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PlayedDevice()
    monkeypatch.setattr(device.played.driver, "cuDevicePrimaryCtxRetain", lambda *_: 2)
    registration = Registration(device, memory)
    registration._join()
    assert "2 slots stay unused" in caplog.text
    assert "out of memory" in caplog.text
    assert memory.free == 0
    registration.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_device_with_other_addresses_for_host_memory_gets_single_copies_and_no_kernel(
    known: bool, memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On WSL2, a batch or a kernel with the host's addresses ends the engine; a copy translates."""
    played = Played(small=1 << 20, same_pointers=False)
    if not known:
        monkeypatch.setattr(played.driver, "cuDeviceGetAttribute", lambda *_: 1)
    device = PlayedDevice(played)
    device.prepare()
    assert (device.batched, device.small_bytes) == (False, 0)
    work, check = batch(device, memory, steady=False)
    device.copy(device.new_stream(), work)
    check()
    assert played.driver.calls == ["copy"] * 3
    assert device.describe() == (
        "cuda:1 (played, driver for CUDA 12.8) are made one by one, because the device does not use"
        " the host's addresses; small pages are copied likewise: it would need the host's addresses"
    )


def test_loads_of_a_forward_pass_have_the_highest_priority_and_saves_the_lowest() -> None:
    device = PlayedDevice(room=3 << 30)
    assert device.new_stream().priority == 0
    assert device.new_stream(urgent=True).priority == -5
    assert device.free_bytes() == 3 << 30
    device.machine.thread.context = None
    with pytest.raises(RuntimeError, match="invalid device context"):
        device.free_bytes()


def test_a_copy_leaves_the_thread_in_the_context_that_it_was_in(memory: Arena) -> None:
    """The engine's thread may use another device."""
    device = PlayedDevice()
    work, check = batch(device, memory, steady=False)
    for context in (0, None):
        device.machine.thread.context = context
        device.copy(device.new_stream(), work)
        assert device.machine.thread.context == context
    check()


def test_a_table_of_runs_is_not_written_while_a_kernel_may_read_it(
    memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is copied to the device at the stream's turn, so it is in use until the end."""
    monkeypatch.setattr(cuda, "TABLES", 2)
    device = PlayedDevice(small=1 << 20)
    device.bind()
    device.prepare()
    assert device.small_bytes
    target = device.own(torch.zeros(4 * 64, dtype=torch.uint8))
    device.register(memory.address, memory.size_bytes)
    memory.view(Slot(0))[:256] = bytes(range(256))
    stream = device.new_stream()

    def move(number: int, runs: int = 1) -> bool:
        at = np.full(runs, 64 * number, np.uint64)
        ends = np.uint64(target.data_ptr()) + at, np.uint64(memory.address) + at
        return device.move(stream, CopyRuns(*ends, np.full(runs, 64, np.uint64), steady=True))

    device.told(stream, Operation(0.5, lambda: None, lambda: None))
    assert [move(number) for number in range(3)] == [True, True, False]
    device.settle()
    assert plain(target).tolist() == [*range(128), *[0] * 128]
    assert move(2)
    device.settle()
    assert plain(target).tolist() == [*range(192), *[0] * 64]
    assert not move(3, runs=device.move_runs_max + 1)
    device.played.check()


def test_pages_are_gathered_into_rows_and_scattered_from_them() -> None:
    device = PlayedDevice()
    kv = torch.randint(0, 255, (2, 6, 34), dtype=torch.uint8)
    pages = device.pages(BlockPages.of({"a": kv[0], "b": kv[1]}, blocks=6))
    there, stream = device.staging(3 * pages.block_bytes), device.new_stream()
    rows = there.view(3, pages.block_bytes)
    places = [4, 0, 3]
    ids = device.ids(places)
    device.gather(stream, pages.pages, ids, rows, out=True)
    device.settle()
    assert torch.equal(plain(rows), torch.cat([kv[0][places], kv[1][places]], dim=1))
    before = kv.clone()
    kv.zero_()
    device.gather(stream, pages.pages, ids, rows, out=False)
    device.settle()
    assert torch.equal(kv[:, places], before[:, places])
    assert not kv[:, [1, 2, 5]].any()
    device.played.check()


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_a_device_is_its_bus_address_s(
    told: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    folder = tmp_path / "bus/pci/devices/0000:a1:00.0"
    folder.mkdir(parents=True)
    if told is not None:
        (folder / "numa_node").write_text(told)
    assert numa_node(torch.device("cuda", 0), tmp_path) == node
    assert numa_node(CPU, tmp_path) is None


def test_devices_that_cannot_be_copied_from_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena.create(1, 4096)
    meta = BlockPages.of({"a": torch.zeros(2, 8, device="meta")}, blocks=2)
    here = BlockPages.of({"a": torch.zeros(2, 8)}, blocks=2)
    with pytest.raises(LayoutError, match="KV tensors on meta"):
        copier_for(meta, arena)
    with pytest.raises(LayoutError, match="KV tensors on cpu, meta"):
        copier_for({0: RankShare(meta), 1: RankShare(here)}, arena)
    on_cuda = PlayedDevice().parts({0: RankShare(here)})
    monkeypatch.setattr(cuda, "driver", lambda: ctypes.CDLL("libcuda-is-not-here.so.1"))
    with pytest.raises(LayoutError, match=r"on cuda:1, without a driver: .*is-not-here.*expected"):
        copier_for(on_cuda, arena)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(LayoutError, match=r"on cuda:1, a device of ROCm 6.2.*an NVIDIA GPU"):
        copier_for(on_cuda, arena)
    arena.close()


def test_a_kernel_that_cannot_be_compiled_leaves_no_memory_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels for other element sizes may have begun."""
    played = Played(small=1)
    move = played.driver.mover()

    def fails(table: torch.Tensor, unit: int) -> None:
        if unit > 1:
            raise ValueError("a compiler's error")
        move(table, unit)

    monkeypatch.setattr(played.driver, "mover", lambda: fails)
    device = PlayedDevice(played)
    device.bind()
    device.prepare()
    device.settle()
    played.check()
    assert device.small_bytes == 0
    assert "a compiler's error" in device.describe()
