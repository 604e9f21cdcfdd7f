"""The interface of a device with streams, as a copier needs it; tests simulate it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvladder.gpu.copy.pages import Page

Stream = Any
"""A queue of work that a device does in order; None means the engine's own stream."""
Event = Any
"""A point in a stream's work."""
Addresses = NDArray[np.uint64]


class CopyRuns(NamedTuple):
    """Runs of bytes to copy in any order: no run overlaps the target of another."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses
    steady: bool
    """True if the sources are complete already, and nothing writes them before the copy ends."""


class Device(ABC):
    """One device, as the engine's thread uses it. Only ``wait`` and ``pause`` wait.

    A stream does its work in the order in which it was queued. Only events order the work of
    different streams. Each call raises RuntimeError if the device refuses.
    """

    batched: bool
    """True if ``copy`` hands all runs over in one call."""
    small_bytes: int = 0
    """Largest average run, in bytes, for which to use ``move``; 0 while ``move`` is not ready."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return a new stream that runs beside the engine's."""

    @abstractmethod
    def mark(self, stream: Stream = None) -> Event:
        """Return an event at the present end of a stream."""

    @abstractmethod
    def after(self, stream: Stream, event: Event) -> None:
        """Make the work that ``stream`` gets from now on wait for ``event``."""

    @abstractmethod
    def is_over(self, event: Event) -> bool:
        """Return whether the device has reached an event; raise if the work before it failed."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Wait until the device has reached an event."""

    @abstractmethod
    def seconds(self, begun: Event, ended: Event) -> float:
        """Return the device's time between two events that are over."""

    @abstractmethod
    def now(self) -> float:
        """Return the host's time in seconds."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``; other threads run meanwhile."""

    @abstractmethod
    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        """Copy between device memory and host memory; the arrays may be reused on return.

        If the host memory is not registered, this waits for the whole stream.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Do the slow preparations for ``move``. Any bound thread may call this."""

    @abstractmethod
    def move(self, stream: Stream, batch: CopyRuns) -> torch.Tensor:
        """Copy with one kernel, between device memory and registered host memory.

        Return the kernel's table of runs; the caller keeps it until the stream has read it.
        """

    @abstractmethod
    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return block numbers for ``gather``, in registered host memory.

        The caller keeps them until the stream has read them.
        """

    @abstractmethod
    def staging(self, size: int) -> torch.Tensor:
        """Return device memory of ``size`` bytes; may raise torch.OutOfMemoryError."""

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
        """Copy blocks, page by page, to rows of device memory that hold one block each, or back.

        If ``out``, copy from the blocks to the rows. May raise torch.OutOfMemoryError.
        """

    @abstractmethod
    def register(self, address: int, size: int) -> str:
        """Let the device access host memory directly; return "" or the reason it cannot.

        Leaves no error behind that the engine's next kernel would raise. Any bound thread may call
        this.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    @abstractmethod
    def bind(self) -> None:
        """Make this the calling thread's device; else it opens a context on the first device."""

    @abstractmethod
    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        """Run ``steps`` in a thread; return a function that waits for its end."""
