"""Copies and kernels of a played machine: what they read and write, and when."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from tests.kit.played import machine as timing
from tests.kit.played import rules
from tests.kit.played.machine import Operation, Stream
from tests.kit.played.memory import GARBAGE, Memory, Span
from tests.kit.played.rules import Rule

Run = tuple[int, int, int]
"""Target, source, and bytes."""


def seconds_of(size: int) -> float:
    return timing.CALL_S + timing.BYTE_S * size


class Runs:
    """Copies runs of bytes: one half when it begins, and one when it ends.

    Parameters
    ----------
    reach:
        Checks one end of a run when it is accessed, and returns the host's pointer to it.
    read:
        Returns the runs when the work begins; ``None`` if they are given.
    """

    def __init__(
        self,
        memory: Memory,
        reach: Callable[[int, int], int],
        runs: Sequence[Run] = (),
        *,
        read: Callable[[], Sequence[Run]] | None = None,
    ) -> None:
        self._memory, self._reach, self._read = memory, reach, read
        self._runs = list(runs)
        self._firsts: list[bytes] = []

    def early(self) -> None:
        """Read the first halves before the stream's turn."""
        self._firsts = [self._bytes(source, size // 2) for _, source, size in self._runs]

    def begin(self) -> None:
        if self._read is not None:
            self._runs = list(self._read())
        if not self._firsts:
            self.early()
        for (target, _, size), first in zip(self._runs, self._firsts, strict=True):
            self._write(target, first + bytes([GARBAGE]) * (size - len(first)))

    def end(self) -> None:
        for target, source, size in self._runs:
            half = size // 2
            self._write(target + half, self._bytes(source + half, size - half))

    def operation(self, size: int, by: str = "") -> Operation:
        return Operation(seconds_of(size), self.begin, self.end, by=by)

    def _bytes(self, address: int, size: int) -> bytes:
        return ctypes.string_at(self._reach(address, size), size) if size else b""

    def _write(self, address: int, data: bytes) -> None:
        if data:
            ctypes.memmove(self._reach(address, len(data)), data, len(data))


class Kernel:
    """A kernel of torch: a function of tensors, which it reads in halves.

    Parameters
    ----------
    target:
        The tensor that it writes.
    sources:
        The tensors that it reads.
    compute:
        Writes the target, given tensors over the memory.
    """

    def __init__(
        self,
        memory: Memory,
        device: int,
        target: Span,
        sources: Sequence[Span],
        compute: Callable[[torch.Tensor, list[torch.Tensor]], None],
        broken: Callable[[Rule, str], Exception],
    ) -> None:
        self._memory, self._device = memory, device
        self._target, self._sources = target, list(sources)
        self._compute, self._broken = compute, broken
        self._firsts: list[torch.Tensor] = []

    def begin(self) -> None:
        sources = self._tensors()
        self._firsts = [source.clone() for source in sources]
        self._run([_garbage(source) for source in sources])

    def end(self) -> None:
        halves = [
            _halves(first, source)
            for first, source in zip(self._firsts, self._tensors(), strict=True)
        ]
        self._run(halves)

    def operation(self) -> Operation:
        return Operation(seconds_of(self._target.size), self.begin, self.end)

    def queue(self, stream: Stream) -> None:
        stream._machine.launch(stream, self.operation())

    def _tensors(self) -> list[torch.Tensor]:
        return [self._memory.reach(source, self._device).tensor() for source in self._sources]

    def _run(self, sources: list[torch.Tensor]) -> None:
        target = self._memory.reach(self._target, self._device).tensor()
        try:
            with torch.no_grad():
                self._compute(target, sources)
        except (IndexError, RuntimeError) as error:
            raise self._broken(rules.STICKY, f"a device-side assertion: {error}") from error


def _garbage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one with other content; numbers that may be indices stay."""
    if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 1:
        return tensor
    bytes_ = torch.full((tensor.numel() * tensor.element_size(),), GARBAGE, dtype=torch.uint8)
    return bytes_.view(tensor.dtype).view(tensor.shape)


def _halves(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one half of each of two."""
    joined = second.clone().contiguous()
    half = joined.numel() // 2
    joined.view(-1)[:half] = first.reshape(-1)[:half]
    return joined.view(second.shape)
