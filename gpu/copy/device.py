"""What a copier needs of a device with streams of its own: the seam that tests simulate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvladder.gpu.copy.pages import Page

Stream = Any
"""Work that a device does in order; None stands for the engine's own."""
Event = Any
"""A point in a stream's work."""
Addresses = NDArray[np.uint64]


class CopyRuns(NamedTuple):
    """Runs of bytes to copy, in no order among themselves: none overlaps another's target."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses
    steady: bool
    """Whether the sources are complete already, and nothing writes them before the copy ends."""


class Device(ABC):
    """One device, as the engine's thread uses it. Nothing but ``wait`` and ``pause`` waits.

    What is told to a stream happens in the order in which it was told; streams order among each
    other by events alone. Each call raises RuntimeError if the device refuses.
    """

    batched: bool
    """Whether ``copy`` hands all runs over in one call."""
    small_bytes: int = 0
    """Runs of up to so many bytes, on the average, are for ``move``; 0 as long as it cannot."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream that runs beside the engine's."""

    @abstractmethod
    def mark(self, stream: Stream = None) -> Event:
        """An event at the present end of a stream."""

    @abstractmethod
    def after(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is told from now on happens after ``event``."""

    @abstractmethod
    def is_over(self, event: Event) -> bool:
        """Whether the device has reached an event; raises what went wrong on its way there."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Return when the device has reached an event."""

    @abstractmethod
    def seconds(self, begun: Event, ended: Event) -> float:
        """The device's time between two events that are over."""

    @abstractmethod
    def now(self) -> float:
        """The host's time, seconds."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Return after so long; other threads run meanwhile."""

    @abstractmethod
    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        """Copy between device memory and host memory; the arrays may be reused on return.

        Host memory that is not registered makes this wait for the whole stream.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Do what takes a while before ``move`` can be called. Any thread that is bound."""

    @abstractmethod
    def move(self, stream: Stream, batch: CopyRuns) -> torch.Tensor:
        """Copy by one kernel, between device memory and host memory that is registered.

        Returns what tells the kernel of the runs: kept until the stream has read it.
        """

    @abstractmethod
    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Numbers for ``gather``, in registered host memory: kept until the stream has read it."""

    @abstractmethod
    def staging(self, size: int) -> torch.Tensor:
        """Device memory of ``size`` bytes; raises torch.OutOfMemoryError."""

    @abstractmethod
    def gather(
        self,
        stream: Stream,
        pages: Sequence[Page],
        ids: torch.Tensor,
        rows: torch.Tensor,
        *,
        out: bool,
    ) -> None:
        """Copy blocks, page by page, into rows of device memory that hold one each; or back.

        ``out`` tells which way; raises torch.OutOfMemoryError.
        """

    @abstractmethod
    def register(self, address: int, size: int) -> str:
        """Have the device copy from and to host memory directly: "" or why it cannot.

        Leaves no error behind for the engine's next kernel to raise. Any thread that is bound.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    @abstractmethod
    def bind(self) -> None:
        """Make this the device of the calling thread, which else opens a context on the first."""

    @abstractmethod
    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        """Work through ``steps`` in a thread; returns what waits for its end."""
