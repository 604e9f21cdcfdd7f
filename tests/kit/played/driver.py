"""The driver's library of a played machine: the calls that kvladder makes by name.

Each takes what ctypes passes, and returns an error's number. As the real ones do, they work in the
calling thread's context, and raise nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kvladder.gpu.copy import cuda
from tests.kit.played import rules
from tests.kit.played.machine import Machine, Operation, Stream
from tests.kit.played.memory import ALIAS, Memory, Region, Span
from tests.kit.played.rules import Violation
from tests.kit.played.runs import Run, Runs, seconds_of

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_CONTEXT, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = 201, 700, 712, 713
NOT_SUPPORTED = 801
TEXTS = {
    INVALID_VALUE: b"invalid argument",
    OUT_OF_MEMORY: b"out of memory",
    INVALID_CONTEXT: b"invalid device context",
    ILLEGAL_ADDRESS: b"an illegal memory access was encountered",
    ALREADY_REGISTERED: b"part or all of the requested memory range is already mapped",
    NOT_REGISTERED: b"pointer does not correspond to a registered memory region",
    NOT_SUPPORTED: b"operation not supported",
}
PORTABLE = 1
IN_STREAM_ORDER, DURING_THE_CALL, ANY_TIME = 1, 2, 3
PAGEABLE_ACCESS, HOST_POINTER, REGISTER_SUPPORTED = 88, 91, 99
CONTEXTS = 0x900


class Driver:
    """The library that torch loads.

    Parameters
    ----------
    version:
        The CUDA version that it is made for.
    registers:
        Whether devices can register host memory at all.
    run_s:
        Time that the host takes to hand over each run.
    """

    def __init__(
        self,
        machine: Machine,
        memory: Memory,
        *,
        version: int = 12080,
        registers: bool = True,
        run_s: float = 0.0,
    ) -> None:
        self._machine, self._memory = machine, memory
        self.run_s = run_s
        self.version = version
        self.registers = registers
        self.refusal = 0
        """The error of the next call that copies or registers."""
        self.calls: list[str] = []
        """The calls that copied, registered or unregistered."""
        self.batch = cuda._BATCH(self._guarded)  # C's own calling rules, as for the real one

    # ---- devices and contexts

    def cuDriverGetVersion(self, found: Any) -> int:
        _write(found, ctypes.c_int, self.version)
        return 0

    def cuDeviceGet(self, found: Any, number: int) -> int:
        if not 0 <= number < self._machine.devices:
            return INVALID_VALUE
        _write(found, ctypes.c_int, number)
        return 0

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:
        values = {
            PAGEABLE_ACCESS: self._memory.pageable_access,
            HOST_POINTER: self._memory.same_pointers,
            REGISTER_SUPPORTED: self.registers,
        }
        _write(found, ctypes.c_int, int(values.get(_number(attribute), 0)))
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        context = self._machine.thread.context
        if context is None:
            return INVALID_CONTEXT
        for place in (free, total):
            _write(place, ctypes.c_size_t, self._memory.room[context])
        return 0

    def cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> int:
        self._machine.contexts.add(_number(device))
        _write(found, ctypes.c_void_p, CONTEXTS + _number(device))
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self._machine.thread.context = _number(context) - CONTEXTS
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        thread = self._machine.thread
        thread.pushed.append(thread.context)
        thread.context = _number(context) - CONTEXTS
        return 0

    def cuCtxPopCurrent_v2(self, found: Any) -> int:
        thread = self._machine.thread
        if not thread.pushed:
            return INVALID_CONTEXT
        _write(found, ctypes.c_void_p, CONTEXTS + (thread.context or 0))
        thread.context = thread.pushed.pop()
        return 0

    def cuGetErrorString(self, error: int, found: Any) -> int:
        _write(found, ctypes.c_char_p, TEXTS.get(error, b"unknown error"))
        return 0

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:
        """Return a function's address, as cuda-bindings do."""
        if name != b"cuMemcpyBatchAsync" or self.version < version:
            return 500, 0, 1
        return 0, ctypes.cast(self.batch, ctypes.c_void_p).value or 0, 0

    def bindings(self) -> ModuleType:
        """Return a module that stands for ``cuda.bindings.driver``."""
        made = ModuleType("cuda.bindings.driver")
        vars(made).update(
            cuGetProcAddress=self.cuGetProcAddress, CUresult=SimpleNamespace(CUDA_SUCCESS=0)
        )
        return made

    # ---- registration

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:
        start, length = _number(address), _number(size)
        error = self._entered("register")
        if error:
            return error
        if not self.registers:
            return NOT_SUPPORTED
        total = self._memory.registered + length
        if length > self._memory.register_max or total > self._memory.registered_max:
            return OUT_OF_MEMORY
        if self._memory.overlapping(start, length):
            return ALREADY_REGISTERED
        context = self._machine.thread.context
        assert context is not None
        region = Region(start, length, "registered", context, portable=bool(flags & PORTABLE))
        self._memory.add(region)
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        error = self._entered("unregister")
        if error:
            return error
        region = self._memory.beginning(_number(address))
        if region is None or region.kind != "registered":
            return NOT_REGISTERED
        self._memory.drop(region)
        return 0

    def cuMemHostGetDevicePointer_v2(self, found: Any, address: Any, flags: int) -> int:
        there = self._memory.at(_number(address))
        if there is None or there.kind == "device":
            return INVALID_VALUE
        same = self._memory.same_pointers
        _write(found, ctypes.c_void_p, _number(address) + (0 if same else ALIAS))
        return 0

    # ---- copies

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        error = self._entered("copy")
        if error:
            return error
        line = self._machine.stream_of(_number(stream))
        run = _number(target), _number(source), _number(size)
        return self._copy(line, [run], early=False, raw=True)

    def swap_blocks_batch(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool,
    ) -> None:
        """Copy runs on the current stream: vLLM's operation."""
        runs = [*zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)]
        line = self._machine.current_stream()
        error = self._copy(line, runs, early=is_src_access_order_any, raw=False)
        if error:
            raise RuntimeError(TEXTS[error].decode())

    def _guarded(self, *arguments: Any) -> int:
        """Answer a call from C, which no exception may leave."""
        try:
            return self._batched(*(argument or 0 for argument in arguments))
        except Violation:
            return ILLEGAL_ADDRESS

    def _batched(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, firsts: int,
        kinds: int, failed: int, stream: int,
    ) -> int:  # fmt: skip
        """Read the arrays of a batch, and copy; each attribute is for some of the copies."""
        error = self._entered("copy")
        if error:
            return error
        arrays = [
            (ctypes.c_uint64 * count).from_address(place)[:] for place in (targets, sources, sizes)
        ]
        begins = (ctypes.c_size_t * kinds).from_address(firsts)[:] if kinds else []
        orders = [
            ctypes.c_uint.from_address(attributes + at * ctypes.sizeof(cuda._Attributes)).value
            for at in range(kinds)
        ]
        rising = all(one < two for one, two in pairwise([*begins, count]))
        if not begins or begins[0] or not rising or not {*orders} <= {1, 2, 3}:
            return INVALID_VALUE
        line, runs = self._machine.stream_of(stream), [*zip(*arrays, strict=True)]
        for first, end, order in zip(begins, [*begins[1:], count], orders, strict=True):
            early = order != IN_STREAM_ORDER
            error = self._copy(line, runs[first:end], early=early, raw=False)
            if error:
                ctypes.c_size_t.from_address(failed).value = first
                return error
        return 0

    def _entered(self, call: str) -> int:
        """Note a call, and return the error that it ends with at once."""
        self.calls.append(call)
        if self._machine.failing:
            return ILLEGAL_ADDRESS
        if self._machine.thread.context is None:
            return INVALID_CONTEXT
        error, self.refusal = self.refusal, 0
        return error

    def _copy(self, line: Stream, runs: Sequence[Run], *, early: bool, raw: bool) -> int:
        """Queue copies of runs in any order; ``raw`` pointers of the host are translated."""
        self._spend(len(runs))
        kinds = [self._kind(address, size) for address, size in _ends(runs)]
        if "two" in kinds:
            return INVALID_VALUE
        self._require_apart(runs)
        shuffled = list(runs)
        self._machine.random.shuffle(shuffled)

        def reach(address: int, size: int) -> int:
            here = self._memory.translated(address)
            self._memory.touch(here, size)
            there = self._memory.at(here)
            usable = raw or self._memory.same_pointers or here != address
            if there is not None and there.kind == "registered" and not usable:
                raise self._machine.violate(rules.HOST_POINTER, "a host's pointer on a device")
            if "pageable" not in kinds and there is None:
                raise self._machine.violate(
                    rules.UNREGISTER, "memory was unregistered while it was copied"
                )
            return here

        work = Runs(self._memory, reach, shuffled)
        if early:
            work.early()
        size = sum(size for *_, size in runs)
        line.todo.append(work.operation(size, self._engine(runs)))
        if "pageable" in kinds:
            self._machine.wait_for(line.moment(), "memory that is not registered")
        return 0

    def _spend(self, runs: int) -> None:
        """Let the time pass that the host takes to hand over runs."""
        if self.run_s:
            self._machine.run_on(self.run_s * runs)

    def _engine(self, runs: Sequence[Run]) -> str:
        """Return the copy engine for runs of one direction; the device's own memory needs none."""
        places = [self._memory.at(self._memory.translated(place)) for place in runs[0][:2]]
        target, source = [place is not None and place.kind == "device" for place in places]
        return "" if target == source else "to the device" if target else "to the host"

    def _kind(self, address: int, size: int) -> str:
        """Return the kind of a range; "two" if it is in several registrations."""
        found = self._memory.overlapping(self._memory.translated(address), size)
        context = self._machine.thread.context
        usable = [one for one in found if one.portable or one.device == context]
        if not usable:
            return "pageable"
        only, start = usable[0], self._memory.translated(address)
        whole = only.start <= start and start + size <= only.start + only.size
        return only.kind if whole and len(found) == 1 else "two"

    def _require_apart(self, runs: Sequence[Run]) -> None:
        """Check that no copy of a batch depends on another."""
        targets = sorted((target, target + size) for target, _, size in runs if size)
        for one, two in pairwise(targets):
            if two[0] < one[1]:
                raise self._machine.violate(rules.BATCH, "two copies of a batch write one place")

    # ---- the kernel for small pages

    def mover(self) -> Callable[[torch.Tensor, int], None]:
        """Return what stands for the compiled kernel: it reads its table at the stream's turn.

        Triton launches on the current stream of the selected device.
        """

        def move(table: torch.Tensor, unit: int) -> None:
            machine, memory = self._machine, self._memory
            device = machine.thread.device
            machine.use(device)
            where, line = Span.of(table), machine.current_stream(device)
            dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[unit]

            def reach(address: int, size: int) -> int:
                return memory.reach(Span(address, (size,), (1,), torch.uint8), device).address

            def read() -> list[Run]:
                numbers = memory.reach(where, device).tensor().tolist()
                runs = [*zip(*numbers, strict=True)]
                for place, size in _ends(runs):
                    memory.reach(Span(place, (size // unit,), (1,), dtype), device)
                return runs

            self._spend(table.shape[1])
            size = table.shape[1] << 10  # the sizes are on the device, and not there yet
            work = Runs(memory, reach, read=read)
            machine.launch(line, Operation(seconds_of(size), work.begin, work.end))

        return move


def _number(value: Any) -> int:
    """Return a number that ctypes passes."""
    found = value.value if hasattr(value, "value") else value
    return int(found or 0)


def _write(place: Any, kind: Any, value: Any) -> None:
    """Write a result where a call's caller wants it."""
    ctypes.cast(place, ctypes.POINTER(kind))[0] = value


def _ends(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    for target, source, size in runs:
        yield target, size
        yield source, size
