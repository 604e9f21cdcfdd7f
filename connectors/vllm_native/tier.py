"""kvladder's stack as one secondary tier of vLLM's own tiering, for those who stay with it.

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KVLadderTier",
                             "module_path": "kvladder.connectors.vllm_native.tier",
                             "config": "stack.yaml"}]}

vLLM moves blocks between the device and its CPU tier; what it hands down comes into our arena,
whose levels take it from there. vLLM calls from its scheduler's thread, which never waits here:
blocks are copied by a thread, and what lies below host is fetched before a load is copied.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
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

from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.connectors.inline import InlineConnector
from kvladder.connectors.vllm.groups import mark_of, marked
from kvladder.connectors.vllm.identity.fingerprint import (
    code_fields,
    folder_fields,
    model_folder,
    prefixed,
    switches,
    vllm_version,
)
from kvladder.connectors.vllm.reports.log import route, say_ready, warn
from kvladder.connectors.weights import downloaded, weights_digest
from kvladder.errors import ConfigError
from kvladder.gpu.copy.copier import Finished, JobId
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import CacheManager, Fetch
from kvladder.notices import Notices
from kvladder.runtime import SystemClock

_ROWS, _PER_ROW = "chunk_ids", "blocks_per_chunk"

HASH_BYTES = 32
GROUP_BYTES = 4


def block_key(key: OffloadKey) -> BlockKey | None:
    """Our name of vLLM's block: its hash, marked by its group; None for a hash below 256 bits."""
    block_hash, group = key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:])
    if len(block_hash) != HASH_BYTES:
        return None
    return BlockKey(marked([block_hash], mark_of(group))[0])


class KVLadderTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps what vLLM's CPU tier hands down, in a stack of levels.

    Parameters
    ----------
    config:
        Path of a stack's YAML file; without one the stack's settings stand beside ``type``.
    locality:
        vLLM's own setting.

    Raises
    ------
    ConfigError
        The stack cannot be had; says where, what and what instead.
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
            raise ConfigError("stands beside config", path=where, hint=f"put it into {config}")
        route()
        settings = load_config(stack if config is None else config)
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
        self._fetching: deque[tuple[TransferJob, Fetch]] = deque()
        self._copying: dict[JobId, TransferJob] = {}
        self._ended: list[JobResult] = []

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        name = block_key(key)
        if name is None:
            self._notices.say("hash", "vLLM's block hashes are below 256 bits: nothing is cached")
            return LookupResult.MISS
        return LookupResult.HIT if self.manager.lookup([name]).total else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.manager.touch([name for name in map(block_key, keys) if name is not None])

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to copy what is new here; the rest is there, or is not wanted by any level."""
        pairs = zip(map(block_key, job_metadata.keys), rows_of(job_metadata), strict=True)
        known = [(name, row) for name, row in pairs if name is not None]
        copy = self._connector.save([name for name, _ in known], [row for _, row in known])
        if copy is not None:
            self._copying[copy] = job_metadata
        else:
            self._ended.append(self._result(job_metadata, 0))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Pin what is there, and begin to bring up what lies below host."""
        names = map(block_key, job_metadata.keys)
        match = self._connector.match([name for name in names if name is not None])
        self._fetching.append((job_metadata, match))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for _ in range(len(self._fetching)):
            job, match = self._fetching.popleft()
            if match.done:
                self._copy_up(job, match)
            else:
                self._fetching.append((job, match))
        self._end(self._connector.poll())
        ended, self._ended = self._ended, []
        return ended

    def _copy_up(self, job: TransferJob, match: Fetch) -> None:
        rows = rows_of(job)[: match.blocks]
        if rows:
            self._copying[self._connector.load(match, rows)] = job
        else:
            match.release()
            self._ended.append(self._result(job, 0))

    def _end(self, copies: Iterable[Finished]) -> None:
        for one in copies:
            if not one.ok:
                self._notices.say("copy", f"blocks could not be copied: {one.error}")
            self._ended.append(self._result(self._copying.pop(one.id), one.bytes, ok=one.ok))

    def _result(self, job: TransferJob, size: int, *, ok: bool = True) -> JobResult:
        """What became of a job, which has copied so many bytes: of a load, the first blocks."""
        loaded = [*job.keys][: size // self.block_size_bytes] if job.is_promotion else None
        return JobResult(
            job.job_id,
            success=ok and (loaded is None or len(loaded) == len(job.keys)),
            successful_keys=loaded or None,
            transfer_time=time.monotonic() - job.submit_time,
            transfer_bytes=size,
        )

    def has_pending_work(self) -> bool:
        return bool(self._fetching or self._copying or self._ended)

    def drain_jobs(self) -> None:
        """Return when every job has ended; a fetch ends at its deadline at the latest."""
        while self._fetching:
            job, match = self._fetching.popleft()
            match.wait()
            self._copy_up(job, match)
        for copy in [*self._copying]:
            self._end(self._connector.wait(copy))

    def shutdown(self) -> None:
        self.drain_jobs()
        self._connector.close()
        self.manager.close()


def rows_of(job: TransferJob) -> list[int]:
    """Where in vLLM's CPU memory the blocks of a job lie."""
    return [int(row) for row in getattr(job, _ROWS)]


def layout_of(config: Any, block_bytes: int, fingerprint: str) -> Layout:
    """The layout of vLLM's CPU blocks, and whose they are, as far as vLLM tells its tiers.

    Raises
    ------
    ConfigError
        The model's weights are not on this machine: ``model.fingerprint`` has to stand for them.
    """
    folder = model_folder(config.model.name)
    if fingerprint == "auto":
        path = Path(config.model.name)
        weights = weights_digest(path if path.exists() else downloaded(config.model.name))
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
