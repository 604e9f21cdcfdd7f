"""``torch.cuda`` of a played machine, and what torch makes on its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.kit.played.machine import Event, Machine
from tests.kit.played.machine import Stream as Line
from tests.kit.played.memory import Memory
from tests.kit.played.tensors import Operations, PlayedTensor, is_cuda

TORCH: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided")
}
"""Torch's own functions that make tensors."""
TO = torch.Tensor.to


class StreamType:
    """``torch.cuda.Stream`` as a type: it makes streams, and knows the range of priorities."""

    def __init__(self, make: Callable[..., Line]) -> None:
        self._make = make

    def __call__(self, *arguments: Any, **options: Any) -> Line:
        return self._make(*arguments, **options)

    def priority_range(self) -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return 0, -5


class Runtime:
    """The functions of ``torch.cuda`` that kvladder, vLLM and tests call."""

    def __init__(self, machine: Machine, memory: Memory, operations: Operations) -> None:
        self._machine, self._memory, self._operations = machine, memory, operations

    def number(self, device: Any) -> int:
        """Return the number of a device; None stands for the selected one."""
        if device is None:
            return self._machine.thread.device
        found = device if isinstance(device, int) else self._operations.device_of(device)
        if not 0 <= found < self._machine.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return found

    def Stream(self, device: Any = None, priority: int = 0) -> Line:
        return self._machine.new_stream(self.number(device), priority)

    def Event(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return Event(self._machine, enable_timing, blocking)

    def current_stream(self, device: Any = None) -> Line:
        return self._machine.current_stream(self.number(device))

    def default_stream(self, device: Any = None) -> Line:
        return self._machine._defaults[self.number(device)]

    def set_stream(self, stream: Line) -> None:
        assert stream.device.index is not None
        self.set_device(stream.device)
        self._machine.thread.streams[stream.device.index] = stream

    @contextmanager
    def stream(self, stream: Line | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        thread, there = self._machine.thread, stream.device.index
        assert there is not None
        selected, before = thread.device, self._machine.current_stream(there)
        self.set_stream(stream)
        try:
            yield
        finally:
            thread.streams[there] = before
            self.set_device(selected)

    @contextmanager
    def use(self, device: Any) -> Iterator[None]:
        """``torch.cuda.device``; at the end it creates no context on the device before."""
        thread = self._machine.thread
        before = thread.device
        self.set_device(device)
        try:
            yield
        finally:
            thread.device = before
            if before in self._machine.contexts:
                thread.context = before

    def set_device(self, device: Any) -> None:
        """Select a device; torch makes no call if it is selected already, as device 0 at first."""
        number = self.number(device)
        if number != self._machine.thread.device:
            self._machine.thread.device = number
            self._machine.use(number)

    def current_device(self) -> int:
        return self._machine.thread.device

    def synchronize(self, device: Any = None) -> None:
        number = self.number(device)
        for line in list(self._machine._all()):
            if line.device.index == number:
                self._machine.wait_for(line.moment(), "device")

    def device_count(self) -> int:
        return self._machine.devices

    def get_device_name(self, device: Any = None) -> str:
        name: str = self.get_device_properties(device).name
        return name

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        room = self._memory.room[self.number(device)]
        return room, room

    def get_device_properties(self, device: Any = None) -> Any:
        number = self.number(device)
        return SimpleNamespace(
            name="played", pci_domain_id=0, pci_bus_id=0xA0 + number, pci_device_id=0,
            major=9, minor=0, multi_processor_count=132,
        )  # fmt: skip

    # ---- what is set in torch while the machine is there

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        names = (
            "Event", "current_stream", "default_stream", "set_stream", "stream",
            "set_device", "current_device", "synchronize", "device_count", "mem_get_info",
            "get_device_properties", "get_device_name",
        )  # fmt: skip
        for name in names:
            yield torch.cuda, name, getattr(self, name)
        yield torch.cuda, "Stream", StreamType(self.Stream)
        yield torch.cuda, "device", self.use
        for name in TORCH:
            yield torch, name, self._factory(TORCH[name])
        yield torch.Tensor, "pin_memory", self._pin_memory()
        yield (
            torch.Tensor,
            "is_pinned",
            lambda tensor, device=None: self._operations.is_pinned(tensor),
        )
        yield (
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: self._operations.record_stream(tensor, stream),
        )
        yield torch.Tensor, "to", self._to(TO)
        yield torch.Tensor, "cuda", self._cuda()

    def _factory(self, made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function that makes tensors on played devices, too, and pinned ones."""
        operations = self._operations

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            pins = kwargs.pop("pin_memory", False)
            if not is_cuda(kwargs.get("device")):
                there = made(*args, **kwargs)
                return operations.pinned(there) if pins else there
            device = operations.device_of(kwargs.pop("device"))
            if made.__name__ in {"empty", "empty_strided"}:
                like = made(*args, device="meta", **kwargs)
                return operations.empty(like.shape, like.dtype, device)
            there = made(*args, **kwargs)
            filled = operations.empty(there.shape, there.dtype, device)
            if made.__name__ == "tensor":
                operations.copy(filled, there, device)
            else:  # a kernel writes numbers that it got by value
                operations.kernel(device, filled, [], lambda to, _: to.copy_(there))
            return filled

        return make

    def _pin_memory(self) -> Callable[..., torch.Tensor]:
        operations = self._operations

        def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
            return tensor if operations.is_pinned(tensor) else operations.pinned(tensor)

        return pin_memory

    def _to(self, to: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        operations = self._operations

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            where = next((value for value in given if is_cuda(value)), None)
            if isinstance(tensor, PlayedTensor) or where is None:
                return to(tensor, *args, **kwargs)
            dtype = next((value for value in given if isinstance(value, torch.dtype)), None)
            return operations.moved(tensor, where, dtype)

        return moved

    def _cuda(self) -> Callable[..., torch.Tensor]:
        operations = self._operations

        def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> Any:
            return operations.moved(tensor, torch.device("cuda", self.number(device)), None)

        return cuda
