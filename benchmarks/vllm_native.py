"""vLLM's own offloading on a CPU, where a thread copies because its own copies need CUDA streams.

Everything else is vLLM's: scheduler, managers, policies, tiers. To use it, set ``spec_name``
(``CPUSpec`` or ``TieringCPUSpec``) and ``spec_module_path`` in ``kv_connector_extra_config``.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyHandler(SingleDirectionOffloadingHandler):  # type: ignore[misc]
    """Copies according to vLLM's own descriptors, by memmove in one thread."""

    def __init__(
        self, gpu: list[Any], cpu: list[Any], blocks_per_row: int, refs: Any, *, down: bool
    ) -> None:
        self.src_tensors, self.dst_tensors = (gpu, cpu) if down else (cpu, gpu)
        self.gpu_to_cpu = down
        self.layer_refs_per_group = refs
        self.src_blocks_per_chunk = 1 if down else blocks_per_row
        self.dst_blocks_per_chunk = blocks_per_row if down else 1
        self._canonical_copy_plans = None
        self._pool = ThreadPoolExecutor(1)
        self._jobs: deque[tuple[int, Future[float], int]] = deque()

    def transfer_async(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        gpu_spec = src_spec if self.gpu_to_cpu else dst_spec
        count = self._estimate_max_copy_ops(gpu_spec.group_sizes)
        src, dst, sizes = (np.empty(count, dtype=np.int64) for _ in range(3))
        at_src = at_dst = copies = total = 0
        pairs = zip(gpu_spec.group_sizes, gpu_spec.block_indices, strict=False)
        for group, (size, first) in enumerate(pairs):
            if not size:
                continue
            skip_src = first % self.src_blocks_per_chunk
            skip_dst = first % self.dst_blocks_per_chunk
            end_src = at_src + cdiv(size + skip_src, self.src_blocks_per_chunk)
            end_dst = at_dst + cdiv(size + skip_dst, self.dst_blocks_per_chunk)
            copies, found = self._fill_direct_ops(
                group,
                src_spec.block_ids[at_src:end_src],
                dst_spec.block_ids[at_dst:end_dst],
                size,
                skip_src,
                skip_dst,
                src,
                dst,
                sizes,
                copies,
            )
            total += found
            at_src, at_dst = end_src, end_dst

        def copy() -> float:
            begun = time.perf_counter()
            triples = zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True)
            for (target, source, size), _ in zip(triples, range(copies), strict=False):
                ctypes.memmove(target, source, size)
            return time.perf_counter() - begun

        self._jobs.append((job_id, self._pool.submit(copy), total))
        return True

    def get_finished(self) -> list[Any]:
        found: list[Any] = []
        while self._jobs and self._jobs[0][1].done():
            job_id, future, size = self._jobs.popleft()
            found.append(
                TransferResult(
                    job_id=job_id,
                    success=True,
                    transfer_size=size,
                    transfer_time=future.result(),
                )
            )
        return found

    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        for job_id, future, _ in self._jobs:
            if job_id in wanted:
                future.result()

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self.src_tensors.clear()
        self.dst_tensors.clear()


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between vLLM's KV tensors and its CPU tier, both in main memory."""

    def __init__(self, kv_caches: Any, blocks_per_row: int, rows: int, region: Any) -> None:
        gpu: list[Any] = []
        cpu: list[Any] = []
        for tensor in kv_caches.tensors:
            gpu.append(tensor.tensor.view(torch.int8).view((-1, tensor.page_size_bytes)))
            size = tensor.page_size_bytes * blocks_per_row
            if region is None:
                cpu.append(torch.zeros((rows, size), dtype=torch.int8))
            else:
                cpu.append(region.create_next_worker_view(size))
        self._region = region
        refs = kv_caches.group_data_refs
        self._down = MemcpyHandler(list(gpu), list(cpu), blocks_per_row, refs, down=True)
        self._up = MemcpyHandler(list(gpu), list(cpu), blocks_per_row, refs, down=False)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._down.transfer_async(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._up.transfer_async(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[Any]:
        return self._down.get_finished() + self._up.get_finished()

    def wait(self, job_ids: Iterable[int]) -> None:
        self._down.wait(job_ids)
        self._up.wait(job_ids)

    def shutdown(self) -> None:
        self._down.shutdown()
        self._up.shutdown()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CPUSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU tier alone."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = HostWorker(
                kv_caches, self.blocks_per_chunk, self.num_chunks, region=None
            )
        return self._worker


class TieringCPUSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU tier with tiers below it."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(
                kv_caches, self.blocks_per_chunk, self.num_chunks, region=region
            )
        return self._worker
