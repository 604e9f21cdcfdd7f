"""Loads into vLLM's blocks: how a step waits for them, their copies, and those that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.facts import EngineFacts
from kvladder.connectors.vllm.requests.answers import Answers
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.connectors.vllm.step import Load
from kvladder.gpu.copy.copier import CopyJob, JobId


class RequestLoads:
    """Begins loads for requests, and keeps them until their copies have ended."""

    def __init__(self, facts: EngineFacts, connector: StepConnector, answers: Answers) -> None:
        self._groups = facts.groups
        self._mode = facts.options.load
        self._step_tokens = facts.step_tokens
        self.shared = facts.caches_prefixes
        """True if a request waits for another's load, to find it in vLLM's own prefix cache."""
        self._connector = connector
        self._answers = answers
        self.in_flight: dict[JobId, Load] = {}
        self.owners: dict[JobId, int] = {}
        """Number of the request's adapter, if it has one, by copy of the step being built."""
        self.lost = LostLoads()
        """Loads that vLLM relies on and that no step has carried out."""
        self.layered = False
        """True if the step being built has a load by layer."""

    def step_waits(self, left: int, found: int, *, alone: bool) -> bool:
        """Return whether the step that computes ``left`` tokens waits for the ``found`` ones.

        By layer, it waits if the request is ``alone``, or if computing hides the copies. Only
        one load per step goes by layer: a second one would begin only after all of the first.
        """
        if self._mode != "layers":
            return self._mode == "sync"
        if alone:
            return True
        copies_s = self._connector.loading_s(found // self._groups.main.tokens)
        computes_s = self._connector.manager.computing_s(int(min(left, self._step_tokens)))
        if self.layered or copies_s is None or computes_s is None:
            return False
        return copies_s <= computes_s

    def begin(
        self,
        state: RequestState,
        own: int,
        end: int,
        tables: Sequence[Sequence[int]],
        *,
        sync: bool,
    ) -> None:
        """Begin to load a request's tokens from ``own`` to ``end`` into blocks of ``tables``.

        They are what its search has found. There is one job for each group.
        """
        state.sources = []
        find = self._answers.take(state)
        found = find.end
        held = find.take()
        try:
            assert found == end, f"{end} tokens are to be loaded, {found} were found"
            for group in self._groups:
                start, stop = max(group.first(end), own // group.tokens), end // group.tokens
                targets = tuple(tables[group.index][start:stop])
                if not targets:
                    continue
                assert len(targets) == stop - start, "blocks are missing in vLLM's table"
                assert 0 not in targets, "a block that is read is null in vLLM's table"
                mine = held.pop(group.index)
                first = start - mine.first
                if group is self._groups.main:
                    state.sources = mine.match.sources[first : first + len(targets)]
                job_id = self._connector.load(mine.match, targets, first=first, group=group.index)
                state.lookup.loading.add(job_id)
                job = CopyJob(job_id, "onboard", targets, (), group.index)
                self.in_flight[job_id] = Load(job, state.request.request_id, sync)
                if state.number:
                    self.owners[job_id] = state.number
                if group is self._groups.main and self.shared:
                    keys = state.keys(group, start, stop)
                    self._answers.fills(state.request.request_id, keys)
            state.lookup.begun()
        finally:
            for left in held.values():
                left.match.release()


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
