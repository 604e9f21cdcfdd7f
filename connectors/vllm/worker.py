"""The worker half of the vLLM connector: it describes KV tensors, and copies blocks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvladder.arena import Arena
from kvladder.connectors.vllm.groups import groups_of
from kvladder.connectors.vllm.identity.loaded import Loaded
from kvladder.connectors.vllm.identity.watch import ModelWatch
from kvladder.connectors.vllm.start import group_pages, tensor_fields, this_node
from kvladder.connectors.vllm.step import Attach, Load, RankDescription, Report, StepMetadata
from kvladder.errors import LayoutError
from kvladder.gpu.copy.copier import Copier, CopyJob, Finished, JobId
from kvladder.gpu.copy.cuda import copier_for, numa_node
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.notices import Notices

REST_S = 0.001
"""Seconds that a step without a forward pass waits for copies and fetches, as in vLLM itself."""
HEAP_LESSON_BYTES = (32 << 20) - (64 << 10)
"""Size of about the largest block that raises glibc's thresholds when it is freed."""


class WorkerHalf:
    """The worker half, one per rank. It decides nothing.

    Jobs come with the step metadata, and their ends are sent back in the report.

    Parameters
    ----------
    vllm_config, kv_cache_config:
        vLLM's own configurations.
    rank:
        Its position among all ranks; see :class:`RankDescription`.
    make_copier, make_loaded:
        Replacements for the copier and the view of the weights, for tests.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        rank: int,
        notices: Notices,
        make_copier: Callable[..., Copier] = copier_for,
        make_loaded: Callable[[Mapping[str, Any]], Loaded] = Loaded,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._notices = notices
        self._make_copier = make_copier
        self._make_loaded = make_loaded
        self._models = ModelWatch(notices)
        self._owners: dict[JobId, int] = {}
        """Number of the request's adapter, if it has one, by load in flight."""
        self._stale = False
        """True if the step's keys name other weights than those in memory."""
        self._pages: dict[int, BlockPages] = {}
        self._pieces: dict[int, RankShare] = {}
        self._fields: dict[str, str] = {}
        self._replicas: int = getattr(kv_cache_config, "kv_tp_replicas", 1)
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._registers = False
        """True if a device registers the arena."""
        self._numa: int | None = None
        self._registered = 0
        """Number of slots that it has registered, as last reported."""
        self._asleep = False
        """True while the KV tensors' memory may not be touched."""
        self._saving: set[JobId] = set()
        """The saves in flight."""
        self._loads: dict[JobId, Load] = {}
        self._loading: Counter[str] = Counter()
        """Number of async loads in flight, by request."""
        self._by_layer: list[JobId] = []
        """Loads of this step for which its forward pass waits layer by layer."""
        self._distrusted: set[JobId] = set()
        self._spoiled = False
        self._resting = threading.Event()
        self._loaded: list[Finished] = []
        self._saved: list[Finished] = []
        self._number = 0
        self._received: set[str] = set()
        groups = groups_of(kv_cache_config, model=str(vllm_config.model_config.model))
        self._by_block = len(groups) == 1 and not groups.partial
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    # ---- at start

    def register(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Take the KV tensors by layer; a layer with a recurrent state has several.

        Raises
        ------
        LayoutError
            There are no tensors, or they do not match vLLM's own specification.
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
        device = next(iter(self._pages.values())).device
        self._registers = device.type != "cpu"
        self._numa = numa_node(device)
        if device.type == "cpu":
            keep_heap()
        self._fields = tensor_fields(self._vllm_config, self._pages, names)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._models.start(self._make_loaded(layers))

    def describe(self) -> RankDescription:
        """Return this rank's description for the scheduler half."""
        assert self._pages, "the KV tensors were not registered"
        groups = range(len(self._kv_cache_config.kv_cache_groups))
        return RankDescription(
            rank=self._rank,
            node=this_node(),
            sizes=tuple(self._pages[i].block_bytes if i in self._pages else 0 for i in groups),
            fields=self._fields,
            replicas=self._replicas,
            weights=self._models.digest,
            registers=self._registers,
            numa=self._numa,
            worker=self,
        )

    def attach(self, attach: Attach | None) -> None:
        """Map the arena, so that the device begins to register it. Cheap to repeat.

        Does nothing if no device registers the arena.
        """
        if self._registers and attach is not None:
            self._attached(attach)

    # ---- in a step, in this order

    def begin(self, step: StepMetadata) -> None:
        """Fence saves before the step writes to their blocks, and look at weights and adapters.

        Also read the adapter that the scheduler half wants. If the step's keys name other weights
        than those in memory, its jobs are not begun and fail.
        """
        self._spoiled, self._stale = False, True
        self.attach(step.attach)
        self._fence(step)
        if self._models.look(step.turn, step.doubt):
            self._distrusted.update(self._loads)  # they have blocks of the previous weights
        if step.wanted is not None:
            self._models.read_adapter(step.wanted)
        self._look_at_adapters(step)
        self._stale = self._models.stale(step.weights[self._rank] if step.weights else None)

    def _fence(self, step: StepMetadata) -> None:
        """Order saves before the step's writes to their blocks.

        If the step may have written to them already, the saves count as failed.
        """
        saves = [one for one in step.fence if one in self._saving]
        if not saves or self._copier is None:
            return
        if step.late:
            self._distrusted.update(saves)
            return
        try:
            self._copier.fence(saves)
        except BaseException:
            self._distrusted.update(saves)
            raise

    def _look_at_adapters(self, step: StepMetadata) -> None:
        """Look which adapters vLLM has in memory now; loads for changed adapters fail."""
        changed = self._models.look_at_adapters(step.turn)
        self._distrusted.update(i for i, number in self._owners.items() if number in changed)

    def _fits(self, step: StepMetadata, job: CopyJob) -> bool:
        """Return whether the adapter in memory is the one that the keys of a copy name."""
        number = step.owners.get(job.id)
        return number is None or self._models.fits(number, step.adapters[number][self._rank])

    def load(self, step: StepMetadata, *, by_layer: bool = False) -> None:
        """Begin the step's loads; its forward pass runs after the sync ones.

        With ``by_layer``, each layer waits for its own blocks instead; see ``await_layer``.
        """
        self._number = step.number
        self._loading.update(load.request_id for load in step.loads if not load.sync)
        self._loads.update((load.job.id, load) for load in step.loads)
        self._look_at_adapters(step)
        self._owners.update((i, one) for i, one in step.owners.items() if i in self._loads)
        first = [load.job for load in step.loads if load.sync]
        sync = [job.id for job in first]
        self._by_layer = sync if by_layer else []
        jobs = first + [load.job for load in step.loads if not load.sync]
        self._submit_all(step, jobs, go=not self._stale)
        if sync and not by_layer and self._copier is not None:
            self._order(self._copier, sync)
            self._poll()

    def await_layer(self, layer: str) -> None:
        """Order the device's further work after the loads of one layer, which is about to read."""
        if self._by_layer and self._copier is not None:
            self._order(self._copier, self._by_layer, layer)

    def _end_layers(self) -> None:
        """Order the device's further work after all loads by layer, and poll for failures.

        Called after the forward pass.
        """
        if self._by_layer and self._copier is not None:
            self._order(self._copier, self._by_layer)
            self._by_layer = []
            self._poll()

    def _order(self, copier: Copier, loads: Sequence[JobId], layer: str | None = None) -> None:
        """Order the forward pass after these loads, or wait for them if the fence fails."""
        try:
            copier.fence(loads, layer)
        except RuntimeError:  # the device cannot order them, so wait until they have ended
            copier.wait(loads)

    def save(self, step: StepMetadata) -> None:
        """Begin the step's saves after the forward pass, unless it computed on garbage.

        If there is no forward pass and requests only wait, rest briefly. Without the rest, vLLM's
        loop would ask again at once and keep other threads from the interpreter.
        """
        self._end_layers()
        self._look_at_adapters(step)
        self._submit_all(step, step.saves, go=not (self._spoiled or self._stale))
        if step.idle and self._copier is not None and (self._loads or self._saving):
            self._copier.rest(REST_S)
        elif step.idle:
            self._resting.wait(REST_S)

    def _submit_all(self, step: StepMetadata, jobs: Sequence[CopyJob], *, go: bool) -> None:
        """Begin jobs. If ``go`` is false, all fail; if one raises, it and the later ones fail."""
        begun = 0
        try:
            for job in jobs if go else ():
                if self._fits(step, job):
                    self._submit(step, job)
                else:
                    self._ended(Finished(job.id, False, 0, 0.0, "the adapter has changed"))
                begun += 1
        finally:
            why = "the weights have changed" if self._stale else "the copy did not begin"
            for job in jobs[begun:]:
                self._ended(Finished(job.id, False, 0, 0.0, why))

    def received(self) -> set[str]:
        """Return the requests with async loads that all ended since the last call, well or not."""
        self._poll()
        received, self._received = self._received, set()
        return received

    def failed(self) -> set[str]:
        """Return the requests with loads that failed since the last call.

        Only for models where vLLM cannot handle failures by block; see ``bad_blocks``.
        """
        failed, self._failed = self._failed, set()
        return failed

    def bad_blocks(self) -> set[int]:
        """Return the blocks that failed loads did not fill since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> Report | None:
        """Return what happened since the last report; None if nothing did.

        That is: ended jobs, the end of a timed step, news of weights, newly registered slots.
        """
        news = self._models.take()
        seen = {} if news is None else {self._rank: news}
        slots = self._arena.admitted if self._registers and self._arena is not None else 0
        registered = {self._rank: slots} if slots > self._registered else {}
        report = Report(self._loaded + self._saved, self._number, seen, registered)
        self._loaded, self._saved, self._number = [], [], 0
        self._registered = slots
        return report if report.ended or report.step or seen or registered else None

    # ---- any time

    def saved(self) -> Report:
        """Return the saves that ended; ``report`` does not repeat them.

        For a scheduler half in the same process.
        """
        self._poll()
        saved, self._saved = self._saved, []
        return Report(saved)

    def detach(self) -> None:
        """Stop using the KV tensors' memory: wait for copies in flight, and begin no others.

        Jobs fail until ``restore``. The arena stays registered. May be called again.
        """
        self._asleep = True
        if self._copier is not None:
            self._copier.drain()
            self._poll()

    def restore(self) -> None:
        """Use the KV tensors again: they are back at their addresses. May be called again."""
        self._asleep = False
        if self._copier is not None:
            self._copier.moved()

    def close(self) -> None:
        """Wait for copies in flight, and unmap the arena. May be called again.

        ``saved`` still works afterwards.
        """
        self._asleep = True
        if self._copier is not None:
            self._copier.close()
            self._poll()
            self._copier = None
        if self._arena is not None:
            self._arena.close()
        self._models.close()

    def _submit(self, step: StepMetadata, job: CopyJob) -> None:
        """Begin a job. If this rank has no part in it, it succeeds; if the engine sleeps, it fails.

        A rank has no part if it has none of the group's layers. Nor has it a part in a save if
        another rank saves the same bytes.
        """
        twin = job.direction == "offload" and self._rank % self._replicas
        if job.group not in self._pages or twin:
            self._ended(Finished(job.id, True, 0, 0.0))
        elif self._asleep:
            self._ended(Finished(job.id, False, 0, 0.0, "the engine sleeps"))
        else:
            if job.direction == "offload":
                self._saving.add(job.id)
            by_layer = job.id in self._by_layer
            urgent = job.id in self._loads and self._loads[job.id].sync
            self._attached(step.attach).submit(job, by_layer=by_layer, urgent=urgent)

    def _attached(self, attach: Attach | None) -> Copier:
        """Return the copier; the first call maps the arena and makes it."""
        if self._copier is None:
            assert attach is not None
            self._arena = Arena.attach(attach.arena)
            offsets = attach.offsets[self._rank]
            self._pieces = {i: RankShare(pages, offsets[i]) for i, pages in self._pages.items()}
            self._copier = self._make_copier(self._pieces, self._arena)
        return self._copier

    def _poll(self) -> None:
        if self._copier is not None:
            for finished in self._copier.poll():
                self._ended(finished)

    def _ended(self, finished: Finished) -> None:
        if not finished.ok:
            self._notices.say("copy", f"blocks could not be copied: {finished.error}")
        load = self._loads.pop(finished.id, None)
        self._owners.pop(finished.id, None)
        self._saving.discard(finished.id)
        if finished.id in self._distrusted:
            self._distrusted.discard(finished.id)
            finished = replace(finished, ok=False)
        if load is None:
            self._saved.append(finished)
            return
        self._loaded.append(finished)
        # vLLM cannot recompute from a failed block if those before it may be null or another's
        if not finished.ok and not self._by_block:
            self._failed.add(load.request_id)
        elif not finished.ok:
            self._bad_blocks.update(load.job.blocks)
            self._spoiled = self._spoiled or load.sync
        if not load.sync:
            self._loading[load.request_id] -= 1
            if not self._loading[load.request_id]:
                del self._loading[load.request_id]
                self._received.add(load.request_id)


def keep_heap() -> None:
    """Make glibc keep the memory that a CPU engine frees, for the engine's next operation.

    glibc returns the top of the heap to the system when more is free there than twice the largest
    block that was ever mapped and freed. Whether a forward pass's memory lies at the top depends
    on other allocations. Without this call, even a connector that did nothing made each step
    fault thousands of pages in again.
    """
    torch.empty(HEAP_LESSON_BYTES, dtype=torch.uint8)  # freed at once, never touched
