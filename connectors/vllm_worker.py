"""The worker half of the vLLM connector: describes KV tensors, and copies what it is told to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvladder.arena import Arena
from kvladder.connectors.vllm_checks import group_pages, tensor_fields, this_node
from kvladder.connectors.vllm_groups import groups_of
from kvladder.connectors.vllm_step import Attach, Load, RankDescription, Report, Step
from kvladder.errors import LayoutError
from kvladder.gpu.copy import Copier, CopyJob, Finished, JobId
from kvladder.gpu.pages import BlockPages, Part
from kvladder.gpu.select import copier_for
from kvladder.notices import Notices

REST_S = 0.001
"""How long a step without a forward pass lets copies and fetches go on, as vLLM itself does."""


class WorkerHalf:
    """One per rank. It decides nothing: jobs come with the step, their ends go with the report.

    Parameters
    ----------
    vllm_config, kv_cache_config:
        vLLM's own.
    rank:
        Its position among all ranks; see :class:`RankDescription`.
    make_copier:
        Another way to copy, for tests.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        rank: int,
        notices: Notices,
        make_copier: Callable[..., Copier] = copier_for,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._notices = notices
        self._make_copier = make_copier
        self._pages: dict[int, BlockPages] = {}
        self._fields: dict[str, str] = {}
        self._replicas: int = getattr(kv_cache_config, "kv_tp_replicas", 1)
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._loads: dict[JobId, Load] = {}
        self._parts: Counter[str] = Counter()
        self._distrusted: set[JobId] = set()
        self._spoiled = False
        self._resting = threading.Event()
        self._loaded = Report()
        self._saved = Report()
        self._number = 0
        self._received: set[str] = set()
        groups = groups_of(kv_cache_config, model=str(vllm_config.model_config.model))
        self._by_block = len(groups) == 1 and not groups.partial
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    # ---- at start

    def register(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Take the KV tensors, by layer; a layer with a recurrent state has several.

        Raises
        ------
        LayoutError
            They are not what vLLM's own specification of them says.
        """
        blocks: int = self._kv_cache_config.num_blocks
        names: list[str] = []
        for index, group in enumerate(self._kv_cache_config.kv_cache_groups):
            pages = group_pages(group, tensors, blocks=blocks)
            if pages is not None:
                self._pages[index] = pages
                names += group.layer_names
        if not names:
            raise LayoutError(f"rank {self._rank} has no KV tensors", hint="expected at least one")
        self._fields = tensor_fields(self._vllm_config, self._pages, names)

    def describe(self) -> RankDescription:
        """What the scheduler half needs to know."""
        assert self._pages, "the KV tensors were not registered"
        groups = range(len(self._kv_cache_config.kv_cache_groups))
        return RankDescription(
            rank=self._rank,
            node=this_node(),
            sizes=tuple(self._pages[i].block_bytes if i in self._pages else 0 for i in groups),
            fields=self._fields,
            replicas=self._replicas,
            worker=self,
        )

    # ---- in a step, in this order

    def begin(self, step: Step) -> None:
        """Before the step writes to any block: end the saves that still read it."""
        self._spoiled = False
        if not step.fence or self._copier is None:
            return
        try:
            self._copier.fence(step.fence)
        except BaseException:
            self._distrusted.update(step.fence)
            raise

    def load(self, step: Step) -> None:
        """Begin the step's loads; those that its forward pass reads have ended on return."""
        self._number = step.number
        waiting = list(step.loads)
        self._parts.update(load.request_id for load in waiting if not load.sync)
        try:
            while waiting:
                self._loads[waiting[0].job.id] = waiting[0]
                self._submit(step, waiting[0].job)
                del waiting[0]
            sync = [load.job.id for load in step.loads if load.sync]
            if sync and self._copier is not None:
                self._copier.wait(sync)
                self._poll()
        finally:
            for load in waiting:
                self._loads[load.job.id] = load
                self._ended(Finished(load.job.id, False, 0, 0.0, "not begun"))

    def save(self, step: Step) -> None:
        """After the forward pass: begin the step's saves, unless it computed on garbage.

        In a step without one, in which requests only wait, other threads get their turn: a loop
        that asks again at once would keep them from the interpreter.
        """
        waiting = list(step.saves)
        try:
            while waiting and not self._spoiled:
                self._submit(step, waiting[0])
                del waiting[0]
        finally:
            for job in waiting:
                self._ended(Finished(job.id, False, 0, 0.0, "not begun"))
        if step.idle and self._copier is not None and self._loads:
            self._copier.rest(REST_S)
        elif step.idle:
            self._resting.wait(REST_S)

    def received(self) -> set[str]:
        """Requests whose async loads ended since the last call, well or not."""
        self._poll()
        received, self._received = self._received, set()
        return received

    def failed(self) -> set[str]:
        """Requests whose async loads failed since the last call, where blocks cannot tell."""
        failed, self._failed = self._failed, set()
        return failed

    def bad_blocks(self) -> set[int]:
        """Blocks that loads were to fill and did not, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> Report | None:
        """The jobs that ended since the last report, and the step if it is to be reported."""
        report = Report(self._loaded.done | self._saved.done, self._number)
        self._loaded, self._saved, self._number = Report(), Report(), 0
        return report if report.done or report.step else None

    # ---- any time

    def saved(self) -> Report:
        """The saves that ended, not to be reported again: for a scheduler half beside this one."""
        self._poll()
        report, self._saved = self._saved, Report()
        return report

    def close(self) -> None:
        """End what was begun, unmap the arena; ``saved`` still answers. May be called again."""
        if self._copier is not None:
            self._copier.close()
            self._poll()
        if self._arena is not None:
            self._arena.close()

    def _submit(self, step: Step, job: CopyJob) -> None:
        """Begin a job, unless this rank has no part in it: another has the same bytes, or all."""
        twin = job.direction == "offload" and self._rank % self._replicas
        if job.group in self._pages and not twin:
            self._attach(step.attach).submit(job)
        else:
            self._ended(Finished(job.id, True, 0, 0.0))

    def _attach(self, attach: Attach | None) -> Copier:
        """The copier; made when the arena is named for the first time."""
        if self._copier is None:
            assert attach is not None
            self._arena = Arena.attach(attach.arena)
            offsets = attach.offsets[self._rank]
            parts = {index: Part(pages, offsets[index]) for index, pages in self._pages.items()}
            self._copier = self._make_copier(parts, self._arena)
        return self._copier

    def _poll(self) -> None:
        if self._copier is not None:
            for finished in self._copier.poll():
                self._ended(finished)

    def _ended(self, finished: Finished) -> None:
        if not finished.ok:
            self._notices.say("copy", f"blocks could not be copied: {finished.error}")
        load = self._loads.pop(finished.id, None)
        if load is None:
            trusted = finished.id not in self._distrusted
            self._distrusted.discard(finished.id)
            self._saved.add(replace(finished, ok=finished.ok and trusted))
            return
        self._loaded.add(finished)
        if not finished.ok and not self._by_block:  # blocks before it may be null, or another's
            self._failed.add(load.request_id)
        elif not finished.ok:
            self._bad_blocks.update(load.job.blocks)
            self._spoiled = self._spoiled or load.sync
        if not load.sync:
            self._parts[load.request_id] -= 1
            if not self._parts[load.request_id]:
                del self._parts[load.request_id]
                self._received.add(load.request_id)
