"""Copies on CUDA devices, with batches by the driver and staging by torch; chooses the copier."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
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
from kvladder.gpu.copy.kernel import SMALL_BYTES, Mover, mover, table_of
from kvladder.gpu.copy.pages import Page, Parts, by_group
from kvladder.gpu.copy.streams import StreamCopier

logger = logging.getLogger("kvladder")

IN_STREAM_ORDER, ANY_TIME = 1, 3
"""Order in which a batch's sources are read (CUmemcpySrcAccessOrder)."""
REGISTER_FLAGS = 1 | 2
"""Portable and mapped: every context and every kernel may use the memory."""
BATCH_SINCE = 12080
"""CUDA version that introduced copies in batches; its calling rules are used."""
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
        self._mover: Mover | None = None
        self._batch = batched_by_driver()
        self._vllm = None if self._batch else batched_by_vllm()
        self.batched = bool(self._batch or self._vllm)
        if not self.batched:
            logger.info(
                "copies are not batched: that needs cuda-bindings and a driver for CUDA 12.8"
            )

    def new_stream(self) -> Stream:
        return self._cuda.Stream(self._device)

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
        with self._cuda.stream(stream):  # also sets the device's context
            if self._batch is not None:
                self._in_one_call(self._batch, batch, stream.cuda_stream)
            elif self._vllm is not None:
                runs = (batch.sources, batch.targets, batch.sizes)
                tensors = [torch.as_tensor(np.ascontiguousarray(a).view(np.int64)) for a in runs]
                self._vllm(*tensors, batch.steady)
            else:
                to = ctypes.c_void_p(stream.cuda_stream)
                for target, source, size in zip(*(a.tolist() for a in batch[:3]), strict=True):
                    run = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
                    self._check(self._driver.cuMemcpyAsync(*run, to))

    def _in_one_call(self, call: _Call, batch: CopyRuns, stream: int) -> None:
        arrays = [np.ascontiguousarray(array, np.uint64) for array in batch[:3]]
        attributes = _Attributes(order=ANY_TIME if batch.steady else IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = call(
            *(array.ctypes.data for array in arrays),
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
        move = mover()
        if move is None:
            logger.info("small pages are copied without a kernel: install triton for faster copies")
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
        except Exception as error:  # noqa: BLE001 - a compiler fails in ways of its own
            logger.warning("small pages are copied without a kernel, because it failed: %r", error)
            return
        self._mover, self.small_bytes = move, SMALL_BYTES

    def move(self, stream: Stream, batch: CopyRuns) -> torch.Tensor:
        assert self._mover is not None, "expected a call of prepare"
        table, unit = table_of(batch)
        table = table.pin_memory()
        with self._cuda.stream(stream):
            self._mover(table, unit)
        return table

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
        with self._cuda.device(self._device):
            self._enter()
            self._driver.cuMemHostUnregister(ctypes.c_void_p(address))

    def bind(self) -> None:
        self._cuda.set_device(self._device)
        self._enter()

    def _enter(self) -> None:
        """Make the device's context current in the calling thread, as calls of the driver need.

        The runtime would do so in its first call that uses the device. But torch makes no such call
        for device 0, which is every new thread's default.
        """
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._driver.cuDeviceGet(ctypes.byref(device), self._device.index or 0))
        self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check(self._driver.cuCtxSetCurrent(context))

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
    if device.type == "cuda" and torch.version.hip is None:
        return StreamCopier(parts, arena, CudaDevice(device))
    raise LayoutError(f"KV tensors on {device}", hint="expected cpu, or cuda on an NVIDIA GPU")
