"""Keeps vLLM from giving blocks to other requests while they are being saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvladder.gpu.copy.copier import CopyJob, JobId


class Holds:
    """References in vLLM's block pool to the blocks that saves in flight read.

    Model runner V2 zeroes and copies blocks before it calls the connector's worker half. A fence
    there comes too late. A block with a reference is not free, so vLLM gives it to no request.

    Holding only makes saves succeed. The worker half itself refuses a save if its block may
    have been overwritten, so holds may end at any time.

    Parameters
    ----------
    pool:
        vLLM's block pool; None disables all holds.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[JobId, tuple[int, ...]] = {}
        self._counts: Counter[int] = Counter()
        if pool is not None:
            self._release_before_reset(pool)

    def _release_before_reset(self, pool: Any) -> None:
        """Wrap the reset of vLLM's prefix cache to end all holds first.

        The prefix cache can be reset only while no block has a reference, and vLLM calls no hook
        before a reset.
        """
        reset: Callable[[], bool] = pool.reset_prefix_cache

        def release_and_reset() -> bool:
            self.release_all()
            return reset()

        pool.reset_prefix_cache = release_and_reset

    def take(self, job: CopyJob) -> None:
        """Hold the blocks that a save reads until ``release``."""
        if self._pool is not None:
            self._held[job.id] = job.blocks
            self._counts.update(job.blocks)
            self._pool.touch([self._pool.blocks[block] for block in job.blocks])

    def release(self, job_id: JobId) -> None:
        """End the holds of one save, if there are any."""
        blocks = self._held.pop(job_id, ())
        self._counts.subtract(blocks)
        for block in blocks:
            if not self._counts[block]:
                del self._counts[block]
        if blocks:  # the head last, so that vLLM evicts the tail first
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def release_all(self) -> None:
        """End all holds."""
        for job_id in [*self._held]:
            self.release(job_id)

    @property
    def pending(self) -> bool:
        """True if a block is held by saves alone, and becomes free when they end."""
        return any(self._pool.blocks[n].ref_cnt == count for n, count in self._counts.items())
