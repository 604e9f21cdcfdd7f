"""Tensors in a played device's memory: operations are queued on the current stream.

They are tensors of torch over ordinary memory that say they are on CUDA. Views are made at once.
Everything else becomes a kernel, which reads and writes memory at the stream's turn. The kernel
keeps no tensor alive, as on a real device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.kit.played.machine import Machine, Stream
from tests.kit.played.memory import Memory, Span
from tests.kit.played.runs import Kernel

VIEWS = {
    "view", "as_strided", "narrow", "select", "transpose", "permute", "reshape", "flatten", "t",
    "unflatten", "squeeze", "unsqueeze", "expand", "chunk", "split", "unbind", "detach", "view_as",
    "contiguous", "movedim", "swapaxes", "__getitem__", "set_", "diagonal", "unfold", "alias",
    "split_with_sizes", "requires_grad_",
}  # fmt: skip
FACTS = {
    "untyped_storage", "storage_offset", "stride", "size", "data_ptr", "numel", "nelement", "dim",
    "ndimension", "element_size", "is_contiguous", "is_floating_point", "is_complex", "type",
    "__len__", "__repr__", "__hash__", "__format__", "__str__", "_is_view", "get_device",
    "is_signed",
}  # fmt: skip
"""Questions about a tensor, not its content."""
READS = {"item", "tolist", "equal", "__bool__", "__int__", "__float__", "__index__", "allclose"}
"""Operations that bring numbers to the host: it waits for the stream."""


def is_cuda(where: object) -> bool:
    """Return whether an argument names a CUDA device."""
    if isinstance(where, str):
        return where.split(":")[0] == "cuda"
    return isinstance(where, torch.device) and where.type == "cuda"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):
        for one in value:
            yield from tensors_in(one)
    elif type(value) is dict:
        yield from tensors_in([*value.values()])


def changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return arguments with something else in place of each tensor, in order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([changed(one, change) for one in value])
    if type(value) is dict:
        return {name: changed(one, change) for name, one in value.items()}
    return value


class _Hole:
    """The place of a tensor among a kernel's arguments, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return arguments with tensors in their places."""
    if isinstance(value, _Hole):
        return tensors[value.number]
    if type(value) in (tuple, list):
        return type(value)([filled(one, tensors) for one in value])
    if type(value) is dict:
        return {name: filled(one, tensors) for name, one in value.items()}
    return value


def plain(value: Any) -> Any:
    """Return an ordinary tensor over the same memory, to read and write it at once."""
    if isinstance(value, PlayedTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    return value


class PlayedTensor(torch.Tensor):
    """A tensor in the memory of a played device."""

    _at: tuple[Operations, int]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tensors_in([*args, kwargs or {}])
        operations, device = next(one._at for one in given if isinstance(one, PlayedTensor))
        return operations.call(func, device, args, dict(kwargs or {}))


class Operations:
    """What torch does with tensors of played devices, and how it makes them."""

    def __init__(self, machine: Machine, memory: Memory) -> None:
        self._machine, self._memory = machine, memory
        self._empty = torch.empty

    # ---- make tensors

    def device_of(self, where: Any) -> int:
        """Return the number of a device that an argument names; by default the selected one."""
        index: int | None = getattr(torch.device(where), "index", None)
        return self._machine.thread.device if index is None else index

    def wrap(self, tensor: torch.Tensor, device: int) -> PlayedTensor:
        with torch._C.DisableTorchFunctionSubclass():
            made = tensor.as_subclass(PlayedTensor)
        made._at = (self, device)
        return made

    def own(self, tensor: torch.Tensor, device: int | None = None) -> PlayedTensor:
        """Return a tensor over the same memory as an ordinary one, which becomes a device's."""
        number = self._machine.device if device is None else device
        self._memory.own(tensor, number)
        return self.wrap(tensor, number)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: int) -> PlayedTensor:
        """Return a tensor of device memory with any content."""
        self._machine.alive()
        self._machine.use(device)
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return self.wrap(self._empty(tuple(shape), dtype=dtype), device)
        stream = self._machine.current_stream(device)
        array = self._memory.take("device", device, count * dtype.itemsize, stream)
        return self.wrap(torch.from_numpy(array).view(dtype).view(tuple(shape)), device)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in page-locked memory."""
        self._machine.alive()
        self._machine.use(self._machine.thread.device)
        size = tensor.numel() * tensor.element_size()
        array = self._memory.take("pinned", -1, size, None)
        made = torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
        return made.copy_(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        there = self._memory.at(tensor.data_ptr())
        return there is not None and there.kind in ("pinned", "registered")

    def moved(self, tensor: torch.Tensor, where: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """Copy a tensor to a device, or to the host."""
        kept = dtype or tensor.dtype
        if not is_cuda(where):
            self.wait("a copy to the host")
            there: torch.Tensor = plain(tensor)
            return there.clone().to(kept)
        device = self.device_of(where)
        if isinstance(tensor, PlayedTensor) and tensor._at[1] == device and kept == tensor.dtype:
            return tensor
        made = self.empty(tensor.shape, kept, device)
        self.copy(made, tensor, device)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: int) -> None:
        """Queue a copy; from pageable memory the host waits for the stream."""
        asynchronous = isinstance(source, PlayedTensor) or self.is_pinned(source)
        if not asynchronous:
            source = self.pinned(source)
        region = self._memory.at(plain(source).data_ptr())
        if self._memory.keeps_host and region is not None and region.kind == "pinned":
            region.used.append(self._machine.current_stream(device))
        self.kernel(device, target, [source], lambda to, of: to.copy_(of[0]))
        if not asynchronous and target.numel():
            self.wait("memory that is not registered")

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Note that a stream uses a tensor's memory."""
        region = self._memory.at(plain(tensor).data_ptr())
        assert region is not None
        region.used.append(stream)

    def wait(self, why: str) -> None:
        stream = self._machine.current_stream()
        self._machine.wait_for(stream.moment(), why)

    # ---- operations

    def kernel(
        self,
        device: int,
        target: torch.Tensor,
        sources: Sequence[torch.Tensor],
        compute: Callable[[torch.Tensor, list[torch.Tensor]], Any],
    ) -> None:
        """Queue a kernel on the device's current stream."""
        self._machine.use(device)
        spans = [Span.of(plain(source)) for source in sources]
        to = Span.of(plain(target))
        if not to.size:
            return
        Kernel(self._memory, device, to, spans, compute, self._machine.violate).queue(
            self._machine.current_stream(device)
        )

    def call(
        self, func: Callable[..., Any], device: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Do what torch would do for tensors on CUDA."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, device, args)
        if name in FACTS:
            return self._at_once(func, args, kwargs)
        if name in {"numpy", "__array__"}:
            raise TypeError("can't convert a CUDA tensor to numpy; use Tensor.cpu() first")
        if name in READS:
            self.wait("a number for the host")
            return self._at_once(func, args, kwargs)
        if name == "cpu":
            return self.moved(args[0], "cpu", None)
        if name in {"to", "cuda"}:
            return self._to(device, args, kwargs)
        if name in VIEWS:
            made = self._view(func, device, args, kwargs)
            if made is not None:
                return made
        if name in {"__setitem__", "copy_"} or (name.endswith("_") and name[:2] != "__"):
            return self._in_place(func, name, device, args, kwargs)
        return self._new(func, device, args, kwargs)

    def _at_once(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*changed(tuple(args), plain), **changed(kwargs, plain))

    def _attribute(self, func: Any, device: int, args: Sequence[Any]) -> Any:
        name = func.__self__.__name__
        if name == "device":
            return torch.device("cuda", device)
        if name in {"is_cuda", "is_cpu"}:
            return name == "is_cuda"
        found = self._at_once(func, args, {})
        return self.wrap(found, device) if isinstance(found, torch.Tensor) else found

    def _to(self, device: int, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        given = [*args[1:], *kwargs.values()]
        dtype = next((value for value in given if isinstance(value, torch.dtype)), None)
        where = next((v for v in given if isinstance(v, str | torch.device)), None)
        return self.moved(args[0], torch.device("cuda", device) if where is None else where, dtype)

    def _view(self, func: Any, device: int, args: Any, kwargs: Any) -> Any:
        """Return a view; None if torch would copy."""
        if next(tensors_in([*args[1:], kwargs]), None) is not None:
            return None
        storage = plain(args[0]).untyped_storage().data_ptr()
        found = self._at_once(func, args, kwargs)
        if getattr(func, "__name__", "") in {"set_", "requires_grad_"}:
            return args[0]
        parts = found if isinstance(found, tuple | list) else [found]
        if any(part.untyped_storage().data_ptr() != storage for part in parts):
            return None
        wrapped = [self.wrap(part, device) for part in parts]
        return (
            wrapped[0]
            if found is parts[0] or not isinstance(found, tuple | list)
            else (type(found)(wrapped))
        )

    def _in_place(
        self, func: Any, name: str, device: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Queue an operation that writes its first argument."""
        target, rest = args[0], list(args[1:])
        if name == "copy_":
            if not isinstance(target, PlayedTensor):  # to the host: it waits for the bytes
                self.wait("a copy to the host")
                return target.copy_(plain(rest[0]))
            self.copy(target, rest[0], device)
            return target
        sources, (more, named) = self._holes((rest, kwargs), device)

        def compute(to: torch.Tensor, of: list[torch.Tensor]) -> None:
            func(to, *filled(more, of), **filled(named, of))

        self.kernel(device, target, sources, compute)
        return target

    def _holes(self, given: Any, device: int) -> tuple[list[torch.Tensor], Any]:
        """Return a kernel's sources, and its arguments with holes: it keeps no tensor."""
        sources: list[torch.Tensor] = []

        def hole(tensor: torch.Tensor) -> _Hole:
            sources.append(self._there(tensor, device))
            return _Hole(len(sources) - 1)

        return sources, changed(given, hole)

    def _there(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return an operand that kernels can read: indices of the host are copied first."""
        if isinstance(tensor, PlayedTensor):
            return tensor
        return self.moved(tensor, torch.device("cuda", device), None)

    def _new(self, func: Any, device: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Queue an operation with a new tensor as its result."""
        kwargs.pop("device", None)
        sources, (given, named) = self._holes((list(args), kwargs), device)

        def result(of: Sequence[torch.Tensor]) -> Any:
            return func(*filled(given, of), **filled(named, of))

        shapes = result([plain(source).to("meta") for source in sources])
        if not isinstance(shapes, torch.Tensor):
            raise NotImplementedError(f"{func} on a played device")
        made = self.empty(shapes.shape, shapes.dtype, device)
        self.kernel(device, made, sources, lambda to, of: to.copy_(result(of)))
        return made
