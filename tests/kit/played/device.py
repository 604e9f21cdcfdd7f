"""The played machine as a whole, and the real ``CudaDevice`` on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, Literal

import torch

from kvladder.gpu.copy import cuda
from kvladder.gpu.copy.cuda import CudaDevice
from kvladder.gpu.copy.device import CopyRuns, Stream
from kvladder.gpu.copy.pages import BlockPages, Page, Parts, RankShare, by_group
from tests.kit.played.driver import Driver
from tests.kit.played.machine import Machine, Operation
from tests.kit.played.machine import Stream as Line
from tests.kit.played.memory import Memory
from tests.kit.played.runtime import Runtime
from tests.kit.played.tensors import Operations, PlayedTensor

Batched = Literal["driver", "vllm", ""]
"""What copies in batches: the driver, vLLM's operation, or nothing."""
_UNSET = object()


class Played:
    """A machine with CUDA; torch, the driver, time and threads are its own within ``with``.

    Parameters
    ----------
    batched:
        See ``Batched``.
    small:
        Largest average bytes per run for which the kernel is used; 0 if Triton is missing.
    run_s:
        Time of the host's that each run takes which is handed over.
    options:
        Those of ``Memory``.
    """

    def __init__(
        self,
        *,
        devices: int = 2,
        device: int = 1,
        seed: int = 0,
        batched: Batched = "driver",
        small: int = 0,
        registers: bool = True,
        run_s: float = 0.0,
        **options: Any,
    ) -> None:
        self.machine = Machine(devices=devices, device=device, seed=seed)
        self.memory = Memory(self.machine, **options)
        version = 12080 if batched == "driver" else 12070
        self.driver = Driver(
            self.machine, self.memory, version=version, registers=registers, run_s=run_s
        )
        self.operations = Operations(self.machine, self.memory)
        self.runtime = Runtime(self.machine, self.memory, self.operations)
        self.batched, self.small = batched, small
        self._patches = [*self._all_patches()]
        self._saved: list[list[tuple[Any, str, Any]]] = []

    def _all_patches(self) -> Iterator[tuple[Any, str, Any]]:
        yield from self.runtime.patches()
        yield cuda, "driver", lambda: self.driver
        vllm = self.driver.swap_blocks_batch if self.batched == "vllm" else None
        yield cuda, "batched_by_vllm", lambda: vllm
        yield cuda, "mover", lambda: self.driver.mover() if self.small else None
        yield cuda, "SMALL_BYTES", self.small
        machine = self.machine
        yield CudaDevice, "now", lambda _: machine.time_s
        yield CudaDevice, "pause", lambda _, seconds: machine.advance(seconds)
        yield CudaDevice, "background", lambda _, steps: machine.background(steps)

    def __enter__(self) -> Played:
        saved: list[tuple[Any, str, Any]] = []
        for place, name, value in self._patches:
            saved.append((place, name, vars(place).get(name, _UNSET)))
            setattr(place, name, value)
        saved.append((sys.modules, "cuda.bindings.driver", sys.modules.get("cuda.bindings.driver")))
        sys.modules["cuda.bindings.driver"] = self.driver.bindings()
        self._saved.append(saved)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for place, name, value in reversed(self._saved.pop()):
            if place is sys.modules:
                if value is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = value
            elif value is _UNSET:
                delattr(place, name)
            else:
                setattr(place, name, value)

    def own(self, tensor: torch.Tensor) -> PlayedTensor:
        """Return a tensor of the engine's device over an ordinary tensor's memory."""
        return self.operations.own(tensor)

    def check(self) -> None:
        """Check that no rule was broken, and that the process uses no device but its own."""
        for violation in self.machine.violations:
            raise violation
        assert self.machine.contexts == {self.machine.device}, "a context on another device"

    def leaks(self) -> int:
        """Return the bytes that are still registered."""
        return self.memory.registered


def _on_machine(name: str) -> Callable[..., Any]:
    """Return a method of ``CudaDevice`` that finds the played machine below it."""

    @wraps(getattr(CudaDevice, name))
    def method(self: PlayedDevice, *args: Any, **kwargs: Any) -> Any:
        with self.played:
            return getattr(CudaDevice, name)(self, *args, **kwargs)

    return method


class PlayedDevice(CudaDevice):
    """The real ``CudaDevice`` on a played machine, in virtual time.

    ``calls`` lists a copier's calls that move bytes or register memory.
    """

    def __init__(
        self, played: Played | None = None, *, batched: bool = True, **options: Any
    ) -> None:
        self.played = played or Played(batched="driver" if batched else "", **options)
        self.machine = self.played.machine
        self.calls: list[str] = []
        with self.played:
            super().__init__(torch.device("cuda", self.machine.device))

    # ---- what the host's clock and threads are

    def now(self) -> float:
        return self.machine.time_s

    def pause(self, seconds: float) -> None:
        self.machine.advance(seconds)

    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        return self.machine.background(steps)

    # ---- calls of a copier

    new_stream = _on_machine("new_stream")
    mark = _on_machine("mark")
    after = _on_machine("after")
    is_over = _on_machine("is_over")
    wait = _on_machine("wait")
    seconds = _on_machine("seconds")
    prepare = _on_machine("prepare")
    ids = _on_machine("ids")
    staging = _on_machine("staging")
    unregister = _on_machine("unregister")
    bind = _on_machine("bind")
    describe = _on_machine("describe")
    free_bytes = _on_machine("free_bytes")

    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        self.calls.append("copy")
        assert len(batch.sizes) <= self.runs_max, "too many runs for one call"
        with self.played:
            super().copy(stream, batch)

    def move(self, stream: Stream, batch: CopyRuns) -> bool:
        with self.played:
            moves = super().move(stream, batch)
        if moves:
            self.calls.append("move")
        return moves

    def gather(
        self,
        stream: Stream,
        pages: Sequence[Page],
        ids: torch.Tensor,
        rows: torch.Tensor,
        *,
        out: bool,
    ) -> None:
        self.calls.append("gather")
        with self.played:
            super().gather(stream, pages, ids, rows, out=out)

    def register(self, address: int, size: int) -> str:
        self.calls.append("register")
        with self.played:
            return super().register(address, size)

    # ---- what tests do with the machine

    def pages(self, pages: BlockPages) -> BlockPages:
        """Return the same pages in the device's memory; they were ordinary tensors'."""
        made = copy(pages)
        made.pages = tuple(replace(page, view=self.own(page.view)) for page in pages.pages)
        made.layers = tuple(replace(page, view=self.own(page.view)) for page in pages.layers)
        made.device = made.pages[0].view.device
        return made

    def parts(self, parts: Parts) -> dict[int, RankShare]:
        """Return the same shares in the device's memory."""
        owned = by_group(parts).items()
        return {group: RankShare(self.pages(part.pages), part.offset) for group, part in owned}

    def own(self, tensor: torch.Tensor) -> PlayedTensor:
        """Return a tensor of the device over an ordinary tensor's memory."""
        return self.played.own(tensor)

    def told(self, line: Line | None, operation: Operation) -> None:
        """Launch a kernel; on the engine's stream by default."""
        self.machine.launch(line or self.machine.engine, operation)

    @property
    def engine(self) -> Line:
        return self.machine.engine

    @property
    def lines(self) -> list[Line]:
        return self.machine.lines

    @property
    def time_s(self) -> float:
        return self.machine.time_s

    @property
    def host_waits(self) -> list[tuple[str, float]]:
        return self.machine.host_waits

    @property
    def registered(self) -> int:
        return self.played.memory.registered

    def advance(self, seconds: float) -> None:
        self.machine.advance(seconds)

    def run_on(self, seconds: float) -> None:
        self.machine.run_on(seconds)

    def settle(self) -> None:
        self.machine.settle()

    def work_in_background(self) -> None:
        self.machine.work_in_background()

    def step_background(self) -> None:
        self.machine.step_background()
