"""Calls to CUDA's libraries, which are simulated here: arguments, order of choice, refusals."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvladder.arena import Arena
from kvladder.errors import LayoutError
from kvladder.gpu.copy import cuda
from kvladder.gpu.copy.cuda import CudaDevice, copier_for, numa_node
from kvladder.gpu.copy.device import CopyRuns
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.gpu.copy.registration import Registration

CPU = torch.device("cpu")
NO_CONTEXT = 201


class Driver:
    """The driver's library: copies at once, and records the calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answer = 0
        self.entered = threading.local()
        """The context of each thread, which a new one has none of."""

        self.host_pointers = 1
        self.version = 12080

    def cuDeviceGetAttribute(self, found: Any, which: int, device: int) -> int:
        assert (which, device) == (91, 40)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.host_pointers
        return self.answer

    def cuDriverGetVersion(self, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        for found, size in ((free, 3 << 30), (total, 8 << 30)):
            ctypes.cast(found, ctypes.POINTER(ctypes.c_size_t))[0] = size
        return self.answer

    def cuDeviceGet(self, found: Any, number: int) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 40 + number
        return self.answer

    def cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))[0] = 100 + device.value
        return self.answer

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.entered.context = context.value
        return self.answer

    def _registering(self, *asked: Any) -> int:
        if getattr(self.entered, "context", None) is None:
            return NO_CONTEXT
        self.asked.append(asked)
        return self.answer

    def cuMemcpyAsync(self, *arguments: Any) -> int:
        target, source, size, stream = (argument.value for argument in arguments)
        self.asked.append(("copy", size, stream))
        ctypes.memmove(target, source, size)
        return self.answer

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:
        return self._registering("register", address.value, size.value, flags)

    def cuMemHostUnregister(self, address: Any) -> int:
        return self._registering("unregister", address.value)

    def cuGetErrorString(self, error: int, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_char_p))[0] = (
            b"too much" if error == 2 else b"no"
        )
        return 0


class PlayedStream(SimpleNamespace):
    """A stream of torch, with its device and priority."""

    def __init__(self, device: torch.device, priority: int) -> None:
        super().__init__(device=device, priority=priority, cuda_stream=77)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class Torch:
    """torch.cuda: streams, the current device, and nothing else."""

    Stream = PlayedStream

    def __init__(self) -> None:
        self.current: list[Any] = []

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    device = stream

    def get_device_name(self, device: Any) -> str:
        assert device == CPU
        return "NVIDIA H100 MIG 1g.10gb"

    def set_device(self, device: Any) -> None:
        """The first device is every thread's: torch does nothing then."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    played = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: played)
    monkeypatch.setattr(cuda, "batched_by_driver", lambda: None)
    monkeypatch.setattr(cuda, "batched_by_vllm", lambda: None)
    return played


def opened() -> CudaDevice:
    device = CudaDevice(CPU)
    device._cuda = Torch()
    return device


STREAM = SimpleNamespace(cuda_stream=77)


def batch(*, steady: bool) -> tuple[CopyRuns, Callable[[], None]]:
    """Three runs to copy, and a check that they were."""
    source = np.arange(100, dtype=np.uint8)
    target = np.zeros(100, np.uint8)
    at = np.array([0, 40, 90], np.uint64)
    sizes = np.array([8, 16, 1], np.uint64)
    base = np.uint64(target.ctypes.data), np.uint64(source.ctypes.data)

    def check() -> None:
        for start, size in ((0, 8), (40, 16), (90, 1)):
            assert (target[start : start + size] == source[start : start + size]).all()
        assert np.count_nonzero(target) == 24

    return CopyRuns(base[0] + at, base[1] + at, sizes, steady), check


@pytest.mark.parametrize(("steady", "order"), [(True, 3), (False, 1)])
def test_a_batch_is_one_call_of_the_driver(
    steady: bool, order: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, ...]] = []
    numbers = ctypes.POINTER(ctypes.c_uint64)

    def call(*arguments: int) -> int:
        targets, sources, sizes, count, attributes, first, attribute_count, failed, stream = (
            arguments
        )
        runs = [ctypes.cast(place, numbers)[:count] for place in (targets, sources, sizes)]
        for target, source, size in zip(*runs, strict=True):
            ctypes.memmove(target, source, size)
        told.append((
            count,
            ctypes.c_uint.from_address(attributes).value,
            ctypes.c_size_t.from_address(first).value,
            attribute_count,
            stream,
        ))  # fmt: skip
        ctypes.c_size_t.from_address(failed).value = 1
        return driver.answer

    function = cuda._BATCH(call)
    monkeypatch.setattr(cuda, "batched_by_driver", lambda: function)
    device = opened()
    work, check = batch(steady=steady)
    device.copy(STREAM, work)
    check()
    assert device.batched
    assert told == [(3, order, 0, 1, 77)]
    driver.answer = 2
    with pytest.raises(RuntimeError, match=r"driver returned an error: too much \(2\)"):
        device.copy(STREAM, work)
    assert ctypes.sizeof(cuda._Attributes) == 24


def test_without_the_drivers_batched_copies_vllms_are_used(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def operation(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool
    ) -> None:
        assert any_order
        assert {sources.dtype, targets.dtype, sizes.dtype} == {torch.int64}
        runs = (targets.tolist(), sources.tolist(), sizes.tolist())
        for target, source, size in zip(*runs, strict=True):
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(cuda, "batched_by_vllm", lambda: operation)
    work, check = batch(steady=True)
    device = opened()
    device.copy(STREAM, work)
    check()
    assert device.batched
    assert driver.asked == []


def test_without_batched_copies_each_run_is_a_call_and_the_description_says_so(
    driver: Driver,
) -> None:
    driver.version = 12040
    device = opened()
    assert "driver for CUDA 12.4" in device.describe()
    assert "one by one: batches need cuda-bindings and a driver for CUDA 12.8" in device.describe()
    assert (device.batched, device.runs_max) == (False, cuda.SINGLE_RUNS_MAX)
    work, check = batch(steady=False)
    device.copy(STREAM, work)
    check()
    assert driver.asked == [("copy", 8, 77), ("copy", 16, 77), ("copy", 1, 77)]
    device.copy(STREAM, work._replace(sizes=work.sizes[:0]))
    assert len(driver.asked) == 3
    driver.answer = 1
    with pytest.raises(RuntimeError, match="the driver returned an error"):
        device.copy(STREAM, work)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_this_machine_has_no_batched_copies() -> None:
    assert cuda.batched_by_driver() is None
    assert cuda.batched_by_vllm() is None


def test_a_refused_registration_leaves_no_error_in_the_driver(driver: Driver) -> None:
    device = opened()
    device.bind()
    assert device.register(4096, 8192) == ""
    driver.answer = 2
    assert device.register(4096, 8192) == "too much (2)"
    driver.answer = 0
    device.unregister(4096)
    assert driver.asked == [("register", 4096, 8192, 3)] * 2 + [("unregister", 4096)]


def test_a_new_thread_enters_the_devices_context_before_it_asks_the_driver(driver: Driver) -> None:
    """Also on the first device: torch makes no context current there, since one exists already."""
    device = opened()
    refused: list[str] = []

    def work() -> None:
        refused.append(device.register(4096, 8192))
        device.bind()
        refused.append(device.register(4096, 8192))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert refused == [f"no ({NO_CONTEXT})", ""]
    device.unregister(4096)  # here, too
    assert [what for what, *_ in driver.asked] == ["register", "unregister"]


def test_a_device_without_a_context_registers_nothing_and_logs_it(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    device, arena = opened(), Arena.create(2, 4096)
    driver.answer = 2
    registration = Registration(device, arena)
    registration._join()
    assert "2 slots stay unused" in caplog.text
    assert "too much" in caplog.text
    assert arena.free == 0
    registration.close()
    arena.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_device_with_other_addresses_for_host_memory_gets_single_copies_and_no_kernel(
    known: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On WSL2, a batch or a kernel with the host's addresses ends the engine; a copy translates."""
    unused = cuda._BATCH(lambda *_: 1)
    monkeypatch.setattr(cuda, "batched_by_driver", lambda: unused)
    assert opened().batched
    if known:
        driver.host_pointers = 0
    else:
        monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda *_: 1)
    device = opened()
    device.prepare()
    assert (device.batched, device.small_bytes) == (False, 0)
    work, check = batch(steady=True)
    device.copy(STREAM, work)
    check()
    assert [what for what, *_ in driver.asked] == ["copy"] * 3
    assert device.describe() == (
        "cpu (NVIDIA H100 MIG 1g.10gb, driver for CUDA 12.8) are made one by one, because the"
        " device does not use the host's addresses; small pages are copied likewise: it would need"
        " the host's addresses"
    )


def test_loads_of_a_forward_pass_have_the_highest_priority_and_saves_the_lowest(
    driver: Driver,
) -> None:
    device = opened()
    assert device.new_stream().priority == 0
    assert device.new_stream(urgent=True).priority == -5
    assert device.free_bytes() == 3 << 30
    driver.answer = 2
    with pytest.raises(RuntimeError, match="too much"):
        device.free_bytes()


def test_a_table_of_runs_is_not_written_while_a_kernel_may_read_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is copied to the device at the stream's turn, so it is in use until the end."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(cuda, "mover", lambda: lambda table, unit: told.append((table, unit)))
    monkeypatch.setattr(cuda, "TABLES", 2)
    monkeypatch.setattr(PlayedStream, "synchronize", lambda _: None, raising=False)
    told: list[tuple[torch.Tensor, int]] = []
    over: list[object] = []
    device = opened()
    monkeypatch.setattr(device, "mark", lambda stream: object())
    monkeypatch.setattr(device, "is_over", over.__contains__)
    device.prepare()
    told.clear()
    assert device.small_bytes
    work, _ = batch(steady=True)
    assert [device.move(STREAM, work) for _ in range(3)] == [True, True, False]
    (one, unit), (two, _) = told
    assert unit == 1
    assert one.data_ptr() != two.data_ptr()
    assert one.tolist() == [array.tolist() for array in work[:3]]
    over.append(device._tables[1].used)
    assert device.move(STREAM, work)
    assert told[-1][0].data_ptr() == two.data_ptr()
    many = np.zeros(device.runs_max + 1, np.uint64)
    over += [table.used for table in device._tables]
    assert not device.move(STREAM, CopyRuns(many, many, many, steady=True))


def test_pages_are_gathered_into_rows_and_scattered_from_them(driver: Driver) -> None:
    device = opened()
    kv = torch.randint(0, 255, (2, 6, 34), dtype=torch.uint8)
    pages = BlockPages.of({"a": kv[0], "b": kv[1]}, blocks=6)
    rows = torch.zeros(3, pages.block_bytes, dtype=torch.uint8)
    ids = torch.tensor([4, 0, 3])
    device.gather(STREAM, pages.pages, ids, rows, out=True)
    assert torch.equal(rows, torch.cat([kv[0][ids], kv[1][ids]], dim=1))
    before = kv.clone()
    kv.zero_()
    device.gather(STREAM, pages.pages, ids, rows, out=False)
    assert torch.equal(kv[:, ids], before[:, ids])
    assert not kv[:, [1, 2, 5]].any()


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
    played: Any = SimpleNamespace(device=torch.device("cuda", 0))
    on_cuda = {0: RankShare(played)}
    monkeypatch.setattr(cuda, "driver", lambda: ctypes.CDLL("libcuda-is-not-here.so.1"))
    with pytest.raises(LayoutError, match=r"on cuda:0, without a driver: .*is-not-here.*expected"):
        copier_for(on_cuda, arena)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(LayoutError, match=r"on cuda:0, a device of ROCm 6.2.*an NVIDIA GPU"):
        copier_for(on_cuda, arena)
    arena.close()
