"""Copies on CUDA devices, with batches by the driver and staging by torch; chooses the copier."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from math import gcd
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kvladder.arena import Arena
from kvladder.errors import LayoutError
from kvladder.gpu.copy.copier import Copier
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.device import CopyRuns, Device, Event, Stream
from kvladder.gpu.copy.kernel import SMALL_BYTES, TABLES, Mover, Table, mover
from kvladder.gpu.copy.pages import Page, Parts, by_group
from kvladder.gpu.copy.streams import StreamCopier

IN_STREAM_ORDER, ANY_TIME = 1, 3
"""Order in which a batch's sources are read (CUmemcpySrcAccessOrder)."""
REGISTER_FLAGS = 1 | 2
"""Portable and mapped: every context and every kernel may use the memory."""
BATCH_SINCE = 12080
"""CUDA version that introduced copies in batches; its calling rules are used."""
USES_HOST_POINTERS = 91
"""Attribute of devices that use the host's addresses of registered memory as they are."""
RUNS_MAX = 1024
"""Largest number of runs in one call of the driver: each takes 0.4 to 0.7 us on an H100."""
SINGLE_RUNS_MAX = 256
"""The same if each run is a call of its own."""
_Call = Callable[..., int]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the places are hints that matter only for managed memory."""

    _fields_ = (
        ("order", ctypes.c_uint),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    *[ctypes.c_void_p] * 3,  # targets, sources, sizes
    ctypes.c_size_t,  # how many
    *[ctypes.c_void_p] * 2,  # attributes, and the index of the first copy for each
    ctypes.c_size_t,  # how many
    *[ctypes.c_void_p] * 2,  # output for the index of a failed copy, the stream
)


@cache
def driver() -> Any:
    """Return the driver's library, which torch has loaded.

    A call of the driver reports an error only by its return value. The runtime would also keep it
    as its last error, and the engine's next kernel would raise it.
    """
    return ctypes.CDLL("libcuda.so.1")


def batched_by_driver() -> _Call | None:
    """Return ``cuMemcpyBatchAsync``; None without cuda-bindings or if the driver lacks it."""
    try:
        bindings: Any = import_module("cuda.bindings.driver")
    except ImportError:
        return None
    error, address, *_ = bindings.cuGetProcAddress(b"cuMemcpyBatchAsync", BATCH_SINCE, 0)
    found = error == bindings.CUresult.CUDA_SUCCESS and int(address or 0)
    return _BATCH(found) if found else None


def batched_by_vllm() -> _Call | None:
    """Return vLLM's own operation for copies in batches; None outside vLLM's processes."""
    found: Any = getattr(torch.ops._C_cache_ops, "swap_blocks_batch", None)
    return found  # type: ignore[no-any-return]


class CudaDevice(Device):
    """A CUDA device of torch.

    Parameters
    ----------
    device:
        Must include the index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda  # its annotations are incomplete
        self._driver = driver()
        self._context: ctypes.c_void_p | None = None
        self._mover: Mover | None = None
        self._without_kernel = "the kernel is not compiled yet"
        self._tables: list[Table] = []
        self._batch: _Call | None = None
        self._vllm: _Call | None = None
        self._host_pointers = bool(self._attribute(USES_HOST_POINTERS))
        if self._host_pointers:
            self._batch = batched_by_driver()
            self._vllm = None if self._batch else batched_by_vllm()
        self.batched = bool(self._batch or self._vllm)
        self.runs_max = RUNS_MAX if self.batched else SINGLE_RUNS_MAX

    def _number(self) -> int:
        """Return the driver's number of the device."""
        device = ctypes.c_int()
        self._check(self._driver.cuDeviceGet(ctypes.byref(device), self._device.index or 0))
        return device.value

    def _attribute(self, which: int) -> int:
        """Return an attribute of the device; 0 if the driver does not know it."""
        found = ctypes.c_int()
        error = self._driver.cuDeviceGetAttribute(ctypes.byref(found), which, self._number())
        return 0 if error else found.value

    def describe(self) -> str:
        version = ctypes.c_int()
        self._driver.cuDriverGetVersion(ctypes.byref(version))
        major, minor = version.value // 1000, version.value % 1000 // 10
        name = self._cuda.get_device_name(self._device)
        node = numa_node(self._device)
        where = "" if node is None else f", NUMA node {node}"
        if not self._host_pointers:
            how = "one by one, because the device does not use the host's addresses"
        elif self._batch is not None:
            how = "in batches by the driver"
        elif self._vllm is not None:
            how = "in batches by vLLM"
        else:
            how = "one by one: batches need cuda-bindings and a driver for CUDA 12.8"
        small = f"copied likewise: {self._without_kernel}"
        if self._mover is not None:
            small = "loaded by a kernel"
        about = f"{self._device} ({name}, driver for CUDA {major}.{minor}{where})"
        return f"{about} are made {how}; small pages are {small}"

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def new_stream(self, *, urgent: bool = False) -> Stream:
        least, greatest = self._cuda.Stream.priority_range()
        return self._cuda.Stream(self._device, priority=greatest if urgent else least)

    def _stream(self, stream: Stream) -> Any:
        return self._cuda.current_stream(self._device) if stream is None else stream

    def mark(self, stream: Stream = None) -> Event:
        event = self._cuda.Event(enable_timing=stream is not None)
        self._stream(stream).record_event(event)
        return event

    def after(self, stream: Stream, event: Event) -> None:
        self._stream(stream).wait_event(event)

    def is_over(self, event: Event) -> bool:
        return bool(event.query())

    def wait(self, event: Event) -> None:
        event.synchronize()

    def seconds(self, begun: Event, ended: Event) -> float:
        return float(begun.elapsed_time(ended)) / 1e3

    def now(self) -> float:
        return perf_counter()

    def pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        count = len(batch.sizes)
        if not count:
            return
        if self._vllm is not None:
            runs = (batch.sources, batch.targets, batch.sizes)
            tensors = [torch.as_tensor(np.ascontiguousarray(a).view(np.int64)) for a in runs]
            with self._cuda.stream(stream):
                self._vllm(*tensors, batch.steady)
            return
        with self._entered():  # torch's context for a stream takes ten times as long
            if self._batch is not None:
                self._in_one_call(self._batch, batch, stream.cuda_stream)
                return
            to = ctypes.c_void_p(stream.cuda_stream)
            for target, source, size in zip(*(a.tolist() for a in batch[:3]), strict=True):
                run = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
                self._check(self._driver.cuMemcpyAsync(*run, to))

    def _in_one_call(self, call: _Call, batch: CopyRuns, stream: int) -> None:
        arrays = [np.ascontiguousarray(array, np.uint64) for array in batch[:3]]
        attributes = _Attributes(order=ANY_TIME if batch.steady else IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = call(
            *(array.__array_interface__["data"][0] for array in arrays),  # quicker than .ctypes
            len(arrays[0]),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        self._check(error)

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"the driver returned an error: {self._text(error)}")

    def _text(self, error: int) -> str:
        found = ctypes.c_char_p()
        self._driver.cuGetErrorString(error, ctypes.byref(found))
        return f"{(found.value or b'?').decode()} ({error})"

    def prepare(self) -> None:
        if not self._host_pointers:
            self._without_kernel = "it would need the host's addresses"
            return
        move = mover()
        if move is None:
            self._without_kernel = "install triton for faster copies"
            return
        # Each element size has its own kernel; compile all now, so that no copy waits for it.
        try:
            stream = self.new_stream()
            words = torch.zeros(2, dtype=torch.int64).pin_memory()
            ends = [words[1:].data_ptr(), words.data_ptr(), 8]
            table = torch.tensor(ends).view(3, 1).pin_memory()
            try:
                with self._cuda.stream(stream):
                    for unit in (1, 2, 4, 8):
                        move(table, unit)
            finally:  # kernels that have begun use this memory
                stream.synchronize()
            self._tables = [Table(self.move_runs_max, self._device) for _ in range(TABLES)]
        except Exception as error:  # noqa: BLE001 - a compiler fails in ways of its own
            self._without_kernel = f"the kernel failed: {error!r}"
            return
        self._mover, self.small_bytes = move, SMALL_BYTES

    def move(self, stream: Stream, batch: CopyRuns) -> bool:
        assert self._mover is not None, "expected a call of prepare"
        table = self._table() if len(batch.sizes) <= self.move_runs_max else None
        if table is None:
            return False
        with self._cuda.stream(stream):
            try:
                self._mover(*table.load(batch))
            finally:  # whatever was begun still reads the table
                table.use_until(self.mark(stream))
        return True

    def _table(self) -> Table | None:
        """Return a table that no kernel in flight uses; None if there is none."""
        for table in self._tables:
            if table.used is None or self.is_over(table.used):
                return table
        return None

    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64).pin_memory()

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def gather(
        self,
        stream: Stream,
        pages: Sequence[Page],
        ids: torch.Tensor,
        rows: torch.Tensor,
        *,
        out: bool,
    ) -> None:
        with self._cuda.stream(stream), torch.inference_mode():
            index = ids.to(self._device, non_blocking=True)
            for page in pages:
                mine, theirs = _wide(page, rows)
                if out:
                    theirs.copy_(mine.index_select(0, index))
                else:
                    mine.index_copy_(0, index, theirs)

    def register(self, address: int, size: int) -> str:
        memory = ctypes.c_void_p(address), ctypes.c_size_t(size)
        error = self._driver.cuMemHostRegister_v2(*memory, REGISTER_FLAGS)
        return self._text(error) if error else ""

    def unregister(self, address: int) -> None:
        with self._entered():
            self._driver.cuMemHostUnregister(ctypes.c_void_p(address))

    def bind(self) -> None:
        """Make the device's context current in the calling thread, as calls of the driver need.

        The runtime would do so in its first call that uses the device. But torch makes no such call
        for device 0, which is every new thread's default.
        """
        self._cuda.set_device(self._device)
        self._check(self._driver.cuCtxSetCurrent(self._primary()))

    def _primary(self) -> ctypes.c_void_p:
        """Return the device's context, which torch uses too."""
        if self._context is None:
            device, context = ctypes.c_int(self._number()), ctypes.c_void_p()
            self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            self._context = context
        return self._context

    @contextmanager
    def _entered(self) -> Generator[None]:
        """Make the device's context current in the calling thread, and the one before at the end.

        The thread may use another device, or none.
        """
        self._check(self._driver.cuCtxPushCurrent_v2(self._primary()))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        def work() -> None:
            for _ in steps:
                pass

        thread = threading.Thread(target=work, name="kvladder-register", daemon=True)
        thread.start()
        return thread.join


def numa_node(device: torch.device, root: Path = Path("/sys")) -> int | None:
    """Return the NUMA node of a device; None if there is only one, or it is unknown."""
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda  # its annotations are incomplete
    has = cuda.get_device_properties(device)
    try:
        name = f"{has.pci_domain_id:04x}:{has.pci_bus_id:02x}:{has.pci_device_id:02x}.0"
        node = int((root / "bus/pci/devices" / name / "numa_node").read_text())
    except (AttributeError, OSError):  # an older torch does not give the PCI address
        return None
    return node if node >= 0 else None


def _wide(page: Page, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a page and its columns of the staging rows, in the widest element that fits both."""
    part = rows[:, page.offset : page.offset + page.size_bytes]
    unit = gcd(page.size_bytes, page.stride_bytes, page.view.data_ptr(), part.data_ptr(), 8)
    unit = gcd(unit, rows.stride(0))
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(unit, torch.uint8)
    return page.view.view(dtype), part.view(dtype)


def copier_for(parts: Parts, arena: Arena) -> Copier:
    """Return a copier between these pages and the slots of ``arena``, made for their device.

    The arena must outlive it.

    Raises
    ------
    LayoutError
        The tensors are on several devices, or on one without a copier.
    """
    devices = {part.pages.device for part in by_group(parts).values()}
    if len(devices) > 1:
        raise LayoutError(
            f"KV tensors on {', '.join(sorted(map(str, devices)))}", hint="expected one device"
        )
    (device,) = devices
    if device.type == "cpu":
        return CpuCopier(parts, arena)
    found = f"KV tensors on {device}"
    if device.type != "cuda" or torch.version.hip is not None:
        system = "" if torch.version.hip is None else f", a device of ROCm {torch.version.hip}"
        raise LayoutError(f"{found}{system}", hint="expected cpu, or cuda on an NVIDIA GPU")
    try:
        made = CudaDevice(device)
    except OSError as error:
        hint = "expected libcuda.so.1, which an NVIDIA driver installs"
        raise LayoutError(f"{found}, without a driver: {error}", hint=hint) from error
    return StreamCopier(parts, arena, made)
