"""Loads that vLLM relies on and that no step has carried out: workers have to report them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from kvladder.connectors.vllm.step import Load
from kvladder.gpu.copy.copier import CopyJob, JobId


class LostLoads:
    """Loads that failed before a step named them, or whose step could not be built."""

    def __init__(self) -> None:
        self._loads: list[Load] = []
        self._ids = count(-1, -1)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def fail(self, request_id: str, blocks: Sequence[int], *, sync: bool) -> None:
        """Add a load that could not begin. It has no slots, so the workers report a failure."""
        job = CopyJob(JobId(next(self._ids)), "onboard", tuple(blocks), ())
        self._loads.append(Load(job, request_id, sync))

    def defer(self, loads: Iterable[Load]) -> None:
        """Add loads of a step that could not be built; the next step carries them out."""
        self._loads += loads

    def due(self) -> list[Load]:
        """Remove the sync loads and return them without slots, so that they fail.

        The step that could not be built computes on their blocks, so no later step is in time.
        """
        due = [load for load in self._loads if load.sync]
        self._loads = [load for load in self._loads if not load.sync]
        return [replace(load, job=replace(load.job, slots=())) for load in due]

    def clear(self) -> None:
        """Forget all loads: a step has them now."""
        self._loads.clear()
