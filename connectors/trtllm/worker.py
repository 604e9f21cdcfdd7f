"""The worker half: takes the KV cache's memory, and copies as the scheduler half decides."""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvladder.arena import Arena
from kvladder.connectors.trtllm.bases import WorkerBase, rank
from kvladder.connectors.trtllm.cache import Cache
from kvladder.connectors.trtllm.names import pages_of, rank_fields, regions_of
from kvladder.connectors.trtllm.options import check_engine, read
from kvladder.connectors.trtllm.ranks import Rank
from kvladder.connectors.trtllm.step import Meeting, TrtllmStep, halves_of, part
from kvladder.errors import TierError
from kvladder.gpu.copy.copier import Copier, CopyJob, Finished, JobId
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.notices import Notices
from kvladder.runtime import SystemClock


class KVLadderWorker(WorkerBase):  # type: ignore[misc]
    """The class that TensorRT-LLM creates on every rank; its executor's thread calls it.

    Rank 0's worker opens the cache when it receives the KV cache's memory. The others map the arena
    when a step tells them where it is.

    Raises
    ------
    ConfigError
        No stack is named, its settings are wrong, or kvladder does not support the engine.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # pyright: ignore[reportUnknownMemberType]
        check_engine(llm_args)
        _, self._config = read(os.environ)
        self._halves = halves_of(llm_args)
        self._rank = rank()
        self._notices = Notices(SystemClock().now)
        self._pages: BlockPages | None = None
        self._copier: Copier | None = None
        self._arena: Arena | None = None
        self._uplink: Rank | None = None
        self._met = False
        self._loading: set[JobId] = set()
        self._saving: dict[JobId, int] = {}
        self._finished: set[int] = set()
        """Finished requests; TensorRT-LLM still keeps their blocks for our copies."""
        self._broken: list[str] = []
        """Reasons why loads failed."""

    # ---- at start

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the KV cache's memory, one tensor ``[blocks, layers, 2, elements]``.

        Raises
        ------
        ConfigError
            The cache cannot be opened.
        LayoutError
            A block's bytes are not contiguous.
        """
        tokens = int(self._llm_args.kv_cache_config.tokens_per_block)
        self._register({"kv": kv_cache_tensor}, tokens)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Take the memory of the second version of TensorRT-LLM's KV cache manager."""
        self._register(regions_of(layout), int(layout.tokens_per_block))

    def _register(self, tensors: dict[str, torch.Tensor], tokens: int) -> None:
        self._pages = pages_of(tensors)
        if self._rank == 0:
            cache = Cache(
                self._halves, self._config, self._pages, tokens=tokens, notices=self._notices
            )
            self._copier = copier_for(self._pages, cache.manager.arena)
            self._halves.cache = cache
        self._halves.ready.set()
        atexit.register(self.close)  # TensorRT-LLM does not tell connectors when it ends

    def _meet(self, meeting: Meeting) -> None:
        """Map the arena of rank 0's process, and report to rank 0 once this rank can copy.

        That includes registering the arena with the rank's device, if needed. Rank 0 promises
        nothing before all ranks have reported.
        """
        if self._rank == 0 or self._met:
            return
        try:
            assert self._pages is not None, "a step came before the KV cache was registered"
            if self._arena is None:
                self._arena = Arena.attach(meeting.arena)
                mine = {0: RankShare(self._pages, self._rank * meeting.rank_bytes)}
                self._copier = copier_for(mine, self._arena)
            assert self._copier is not None
            if self._arena.admitted == self._arena.slots:
                self._met = True
                self._uplink = Rank(meeting, self._rank, rank_fields(self._pages))
            elif self._copier.settled:
                self._met = True
                what = f"its device reaches {self._arena.admitted} of {self._arena.slots} slots"
                hint = "make arena.size smaller"
                self._notices.say("ranks", f"rank {self._rank} caches nothing: {what}; {hint}")
        except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
            self._met = True
            self._notices.say("ranks", f"rank {self._rank} caches nothing: {error!r}")

    # ---- in a step, in this order

    def start_load_kv(self, stream: Any) -> None:
        """Load the blocks that the step's forward pass reads; wait until they are loaded.

        Raises
        ------
        TierError
            A block could not be copied. TensorRT-LLM must be stopped by an exception: otherwise it
            would compute with wrong bytes.
        """
        step = self._step
        if step.meeting is not None:
            self._meet(step.meeting)
        if not step.loads:
            return
        assert self._copier is not None
        with _on(stream):
            for job in step.loads:
                self._loading.add(job.id)
                self._copier.submit(job)
            self._copier.wait([job.id for job in step.loads])
        self._poll()
        if self._broken:
            raise TierError(f"promised blocks could not be copied: {self._broken[0]}")

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: whole blocks are loaded before the forward pass that reads them."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: whole blocks are saved after the forward pass that fills them."""

    def wait_for_save(self, stream: Any) -> None:
        """Begin to save the blocks that the step has completed."""
        saves, begun = self._step.saves, 0
        try:
            with _on(stream):
                for request, job in saves:
                    self._save(request, job)
                    begun += 1
        except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
            self._notices.say("copy", f"blocks could not be saved: {error!r}")
            for _, job in saves[begun:]:
                self._end(Finished(job.id, False, 0, 0.0, repr(error)))

    def _save(self, request: int, job: CopyJob) -> None:
        assert self._copier is not None
        self._copier.submit(job)
        self._saving[job.id] = request

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the finished requests that may free their blocks, and the requests that loaded."""
        self._finished.update(finished_gen_req_ids)
        self._poll()
        over = sorted(self._finished.difference(self._saving.values()))
        self._finished.difference_update(over)
        return over, list(started_loading_req_ids)

    # ---- the rest

    @property
    def _step(self) -> TrtllmStep:
        metadata = self._metadata
        return metadata if isinstance(metadata, TrtllmStep) else TrtllmStep()

    def _poll(self) -> None:
        for finished in [] if self._copier is None else self._copier.poll():
            self._end(finished)

    def _end(self, finished: Finished) -> None:
        if finished.id in self._loading:
            self._loading.discard(finished.id)
            if not finished.ok:
                self._broken.append(finished.error)
        elif not finished.ok:
            self._notices.say("copy", f"blocks could not be saved: {finished.error}")
        self._saving.pop(finished.id, None)
        if self._uplink is not None:
            self._uplink.tell([finished])
        else:
            self._halves.ended.append(finished)

    def close(self) -> None:
        """End all copies and, on rank 0, close the cache. May be called again."""
        if self._copier is not None:
            self._copier.close()
            self._poll()
            self._copier = None
        if self._uplink is not None:
            self._uplink.close()
            self._uplink = None
        if self._arena is not None:
            self._arena.close()
        if self._halves.cache is not None:
            self._halves.cache.close()
        part(self._halves)
        atexit.unregister(self.close)


def _on(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which copies are ordered after the work queued on ``stream``."""
    cuda: Any = torch.cuda
    return nullcontext() if stream is None else cuda.stream(stream)
