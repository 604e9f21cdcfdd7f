"""Interface of a device with streams, as a copier needs it; tests simulate it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvladder.gpu.copy.pages import Page

Stream = Any
"""Queue of work that a device does in order; None stands for the engine's own stream."""
Event = Any
"""A point in a stream's work."""
Addresses = NDArray[np.uint64]


class CopyRuns(NamedTuple):
    """Runs of bytes to copy, in any order: no run overlaps another run's target."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses
    steady: bool
    """True if the sources are complete already, and nothing writes them before the copy ends."""


class Device(ABC):
    """One device, as the engine's thread uses it. Only ``wait`` and ``pause`` wait.

    A stream does its work in the order in which it was queued. Only events order work of different
    streams. Each call raises RuntimeError if the device refuses.
    """

    batched: bool
    """True if ``copy`` hands all runs over in one call."""
    small_bytes: int = 0
    """Largest average bytes per run to use ``move`` for; 0 while ``move`` is not available."""
    runs_max: int = 1024
    """Largest number of runs for one call of ``copy``, which takes a fraction of a millisecond."""
    move_runs_max: int = 4096
    """Largest number of runs for one call of ``move``."""

    @abstractmethod
    def describe(self) -> str:
        """Return the device's name and how it copies, with the reasons, for a log line."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how much of the device's memory is free."""

    @abstractmethod
    def new_stream(self, *, urgent: bool = False) -> Stream:
        """Return a new stream that runs beside the engine's.

        Its kernels run after the engine's, or before them if it is ``urgent``.
        """

    @abstractmethod
    def mark(self, stream: Stream = None) -> Event:
        """Return an event at the current end of a stream."""

    @abstractmethod
    def after(self, stream: Stream, event: Event) -> None:
        """Order all later work of ``stream`` after ``event``."""

    @abstractmethod
    def is_over(self, event: Event) -> bool:
        """Return whether the device has reached an event; raise if the work before it failed."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Wait until the device has reached an event."""

    @abstractmethod
    def seconds(self, begun: Event, ended: Event) -> float:
        """Return the device's time in seconds between two events that it has reached."""

    @abstractmethod
    def now(self) -> float:
        """Return the host's time in seconds."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Sleep for this time; other threads run meanwhile."""

    @abstractmethod
    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        """Copy between device memory and registered host memory.

        The arrays may be reused on return. With other host memory, this would wait for the whole
        stream.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Prepare ``move``, which may take a while. Any thread may call it after ``bind``."""

    @abstractmethod
    def move(self, stream: Stream, batch: CopyRuns) -> bool:
        """Copy by one kernel, from registered host memory to the device's.

        The arrays may be reused on return. Return False, and do nothing, if there are more than
        ``move_runs_max`` runs, or if earlier kernels still use all tables of runs.
        """

    @abstractmethod
    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return block ids for ``gather``, in registered host memory; keep it until it is read."""

    @abstractmethod
    def staging(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of device memory, or raise torch.OutOfMemoryError."""

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
        """Copy blocks, page by page, into rows of device memory (``out``), or from rows back.

        Each row holds one block. May raise torch.OutOfMemoryError.
        """

    @abstractmethod
    def register(self, address: int, size: int) -> str:
        """Register host memory for direct copies; return "" or the reason why it cannot be.

        A failure leaves no error that the engine's next kernel would raise. Any thread may call it
        after ``bind``.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    @abstractmethod
    def bind(self) -> None:
        """Make this the calling thread's device; otherwise it would open a context on device 0."""

    @abstractmethod
    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        """Run ``steps`` to their end in a thread; return a function that waits for it."""
