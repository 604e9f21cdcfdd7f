"""kvladder's stack as one secondary tier of vLLM's own tiering, to keep using that tiering.

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KVLadderTier",
                             "module_path": "kvladder.connectors.vllm_native.tier",
                             "config": "stack.yaml"}]}

vLLM moves blocks between the device and its CPU tier. The blocks that it hands down are copied
into kvladder's arena, and the levels take them from there. vLLM calls from its scheduler's thread,
which waits only in ``drain_jobs`` and ``shutdown``. A thread copies blocks, and a load is copied
once its blocks below host have been fetched.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvladder.compose import open_manager, unrecorded
from kvladder.config.stack import load_config
from kvladder.connectors.inline import InlineConnector
from kvladder.connectors.naming import folder_fields, model_folder, prefixed
from kvladder.connectors.vllm.groups import mark_of, marked
from kvladder.connectors.vllm.identity.fingerprint import (
    code_fields,
    switches,
    vllm_version,
)
from kvladder.connectors.vllm.reports.log import route, say_ready, warn
from kvladder.connectors.weights import read_weights_digest
from kvladder.errors import ConfigError
from kvladder.gpu.copy.copier import Finished, JobId
from kvladder.hints import HintExecutor
from kvladder.hints.requests import RequestHints, begin
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import POLL_S, BatchedFetch, BatchedSave, CacheManager, Save
from kvladder.notices import Notices
from kvladder.runtime import SystemClock

_ROWS, _PER_ROW = "chunk_ids", "blocks_per_chunk"

HINTS, PLACED = "kv_hints", "_offload_key_positions"
HASH_BYTES = 32
GROUP_BYTES = 4


def block_key(key: OffloadKey) -> BlockKey | None:
    """Return our key of vLLM's block: its hash, with the mark of its group.

    None if the hash does not have 256 bits.
    """
    block_hash, group = key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:])
    if len(block_hash) != HASH_BYTES:
        return None
    return BlockKey(marked([block_hash], mark_of(group))[0])


@dataclass
class Job:
    """One of vLLM's transfer jobs, which may have more blocks than the arena has slots."""

    told: TransferJob
    rows: list[int]
    """Rows of its blocks in vLLM's CPU memory."""
    paced: BatchedFetch | BatchedSave[Save]
    is_copying: bool = False
    ok: bool = True
    bytes: int = 0
    """Number of bytes copied so far."""


class KVLadderTier(SecondaryTierManager):  # type: ignore[misc]
    """Stores the blocks that vLLM's CPU tier hands down in a stack of levels.

    Parameters
    ----------
    config:
        Path of a stack's YAML file; without it, the stack's settings are given beside ``type``.
    locality:
        vLLM's own setting.

    Raises
    ------
    ConfigError
        The stack cannot be opened; says where, what and what instead.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        config: str | None = None,
        locality: str | None = None,
        **stack: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        if config is not None and stack:
            where = f"secondary_tiers.{next(iter(stack))}"
            raise ConfigError(
                "cannot be combined with config", path=where, hint=f"move it into {config}"
            )
        route()
        settings = load_config(stack if config is None else config)
        if settings.record.path is not None:
            raise unrecorded("the calls of vLLM's own offloading")
        layout = layout_of(
            offloading_spec.config, self.block_size_bytes, settings.model.fingerprint
        )
        self.manager: CacheManager = open_manager(settings, layout)
        warn(settings, version=vllm_version())
        say_ready(self.manager, settings)
        self._notices = Notices(SystemClock().now)
        self._connector = InlineConnector(
            self.manager,
            torch.frombuffer(primary_kv_view, dtype=torch.int8).view(-1, self.block_size_bytes),
        )
        # vLLM names these blocks, and the tier does not know the salts of their requests
        HintExecutor.of(self.manager).name_blocks = None
        self._jobs: list[Job] = []
        self._copying: dict[JobId, Job] = {}
        self._ended: list[JobResult] = []

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Do what its hints ask at its start; a pin is done at its end, when it has blocks."""
        sent: object = req_context.kv_hints or (req_context.kv_transfer_params or {}).get(HINTS)
        if sent is not None:
            executor = HintExecutor.of(self.manager)
            hints = begin(executor, sent, salt="", ranks_saves=False, names_others=False)
            req_context.set_state(hints)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Do what waits for its end, for the blocks that vLLM has placed for it."""
        hints: RequestHints | None = req_context.get_state(RequestHints)
        if hints is not None and hints.waiting:
            placed: dict[OffloadKey, int] = getattr(req_context, PLACED, {})
            names = map(block_key, sorted(placed, key=placed.__getitem__))
            own = [name for name in names if name is not None]
            hints.finish(HintExecutor.of(self.manager), [own], "")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        name = block_key(key)
        if name is None:
            self._notices.say(
                "hash", "vLLM's block hashes are shorter than 256 bits: nothing is cached"
            )
            return LookupResult.MISS
        return LookupResult.HIT if self.manager.lookup([name]).total else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.manager.touch([name for name in map(block_key, keys) if name is not None])

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to copy those blocks that are new here and that a level would take."""
        self._begin(job_metadata, self.manager.save_paced)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Pin the cached blocks, and begin to fetch those below host."""
        self._begin(job_metadata, self.manager.fetch_paced)

    def _begin(
        self,
        told: TransferJob,
        paced: Callable[[Sequence[BlockKey]], BatchedFetch | BatchedSave[Save]],
    ) -> None:
        pairs = zip(map(block_key, told.keys), rows_of(told), strict=True)
        known = [(name, row) for name, row in pairs if name is not None]
        job = Job(told, [row for _, row in known], paced([name for name, _ in known]))
        self._jobs.append(job)
        self._go_on(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for job in [*self._jobs]:
            self._go_on(job)
        self._end(self._connector.poll())
        ended, self._ended = self._ended, []
        return ended

    def _go_on(self, job: Job) -> None:
        """Copy the next piece of a job if it has arrived; end a job without further pieces."""
        while not job.is_copying and job.paced.ready:
            if job.paced.over or not job.ok:
                job.paced.close()
                self._jobs.remove(job)
                self._ended.append(self._result(job))
                return
            copy = self._copy(job)
            if copy is None:
                job.paced.advance()
            else:
                job.is_copying, self._copying[copy] = True, job

    def _copy(self, job: Job) -> JobId | None:
        paced = job.paced
        if isinstance(paced, BatchedFetch):
            assert paced.fetch is not None
            rows = job.rows[paced.first : paced.first + paced.count]
            return self._connector.load(paced.fetch, rows)
        assert paced.piece is not None
        return self._connector.fill(paced.piece, [job.rows[n] for n in paced.piece.indices])

    def _end(self, copies: Iterable[Finished]) -> None:
        for one in copies:
            if not one.ok:
                self._notices.say("copy", f"blocks could not be copied: {one.error}")
            job = self._copying.pop(one.id)
            job.is_copying, job.ok, job.bytes = False, one.ok, job.bytes + one.bytes
            job.paced.advance()
            self._go_on(job)

    def _result(self, job: Job) -> JobResult:
        """Return the result of an ended job; a load succeeds for its first copied blocks."""
        told, size = job.told, job.bytes
        loaded = [*told.keys][: size // self.block_size_bytes] if told.is_promotion else None
        return JobResult(
            told.job_id,
            success=job.ok and (loaded is None or len(loaded) == len(told.keys)),
            successful_keys=loaded or None,
            transfer_time=time.monotonic() - told.submit_time,
            transfer_bytes=size,
        )

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._ended)

    def drain_jobs(self) -> None:
        """Wait until every job has ended; each piece has a deadline."""
        while self._jobs:
            for job in [*self._jobs]:
                self._go_on(job)
            if self._copying:
                self._end(self._connector.wait(next(iter(self._copying))))
            elif self._jobs:
                threading.Event().wait(POLL_S)

    def shutdown(self) -> None:
        self.drain_jobs()
        self._connector.close()
        self.manager.close()


def rows_of(job: TransferJob) -> list[int]:
    """Return the rows of a job's blocks in vLLM's CPU memory."""
    return [int(row) for row in getattr(job, _ROWS)]


def layout_of(config: Any, block_bytes: int, fingerprint: str) -> Layout:
    """Return the layout of vLLM's CPU blocks, with the namespace fields that vLLM tells its tiers.

    Raises
    ------
    ConfigError
        The model's weights are not on this machine, so ``model.fingerprint`` must be set.
    """
    folder = model_folder(config.model.name)
    if fingerprint == "auto":
        weights = read_weights_digest(config.model.name)
    else:
        weights = f"given {fingerprint}"
    parallel = config.parallel
    groups = ";".join(f"{g.group_id} {g.tokens_per_block} {g.layer_names}" for g in config.groups)
    fields = {
        "engine": "vllm offloading",
        "model": config.model.name,
        "weights": weights,
        "kv.dtype": config.model.dtype,
        "kv.groups": groups,
        "kv.layout": f"{config.kv_cache_layout} canonical {config.canonical_layout}",
        "hash": f"every {config.cache.tokens_per_hash} tokens",
        "ranks": f"{parallel.world_size} {parallel.tp_size} {parallel.pp_size}"
        f" {parallel.pcp_size} {parallel.dcp_size}",
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **prefixed("environment", switches()),
        **folder_fields({} if folder is None else {"model": folder}),
        **code_fields(),
    }
    tokens = config.groups[0].tokens_per_block * getattr(config.cache, _PER_ROW)
    return Layout(tokens, block_bytes, fields)
