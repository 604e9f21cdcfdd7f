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
from tests.kit.played import Played, PlayedDevice

CPU = torch.device("cpu")
NO_CONTEXT = 201


class Driver:
    """The driver's library: copies at once, and records the calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answer = 0
        self.entered = threading.local()
        """The context of each thread, which a new one has none of."""

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


class Torch:
    """torch.cuda: the current device, and nothing else."""

    def __init__(self) -> None:
        self.current: list[Any] = []

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    device = stream

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


def test_without_batched_copies_each_run_is_a_call_and_a_log_line_says_so(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="kvladder"):
        device = opened()
    assert "a driver for CUDA 12.8" in caplog.text
    assert not device.batched
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
    driver.answer = 2
    device, arena = opened(), Arena.create(2, 4096)
    registration = Registration(device, arena)
    registration._join()
    assert "cannot be registered" in caplog.text
    assert "too much" in caplog.text
    assert arena.free == 2
    registration.close()
    arena.close()


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


def test_devices_that_cannot_be_copied_from_are_named() -> None:
    arena = Arena.create(1, 4096)
    meta = BlockPages.of({"a": torch.zeros(2, 8, device="meta")}, blocks=2)
    here = BlockPages.of({"a": torch.zeros(2, 8)}, blocks=2)
    with pytest.raises(LayoutError, match="KV tensors on meta"):
        copier_for(meta, arena)
    with pytest.raises(LayoutError, match="KV tensors on cpu, meta"):
        copier_for({0: RankShare(meta), 1: RankShare(here)}, arena)
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

    said: list[str] = []  # pytest's own log would keep the error, and its frames' memory
    monkeypatch.setattr(cuda.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(played.driver, "mover", lambda: fails)
    device = PlayedDevice(played)
    device.bind()
    device.prepare()
    device.settle()
    played.check()
    assert device.small_bytes == 0
    assert "a compiler's error" in said[0]
