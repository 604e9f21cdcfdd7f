"""The reference connector: for an engine in the same process that hands over its KV tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvladder.errors import LayoutError, needed

with needed("torch"):
    import torch

from kvladder.connectors.base import Connector, StartedSave
from kvladder.gpu.copy.copier import Copier, CopyJob, Finished, JobId
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages
from kvladder.hints import HintExecutor
from kvladder.keys import BlockKey, KeyScheme
from kvladder.manager import CacheManager


class InlineConnector(Connector):
    """Connects a process's own KV tensors to a cache.

    Parameters
    ----------
    manager:
        An open cache. Its layout's ``block_bytes`` must be the size of a block in the tensors.
    kv:
        One tensor ``[blocks, ...]``, or several by name; in a slot, their bytes lie one after the
        other. The connector keeps the tensors alive. It reads and writes them in the background
        while jobs are in flight.

    Raises
    ------
    LayoutError
        The tensors do not match the cache's layout.
    """

    def __init__(
        self, manager: CacheManager, kv: torch.Tensor | Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(manager)
        tensors = {"kv": kv} if isinstance(kv, torch.Tensor) else kv
        blocks = min((tensor.shape[0] for tensor in tensors.values()), default=0)
        pages = BlockPages.of(tensors, blocks=blocks)
        if pages.block_bytes != manager.layout.block_bytes:
            what = f"a block takes {pages.block_bytes} bytes in the tensors"
            raise LayoutError(what, hint=f"expected {manager.layout.block_bytes}")
        self._keys = KeyScheme(manager.namespace, block_tokens=manager.layout.block_tokens)
        self._copier: Copier = copier_for(pages, manager.arena)
        HintExecutor.of(manager).name_blocks = lambda tokens, salt: [self.keys(tokens, salt=salt)]

    def keys(self, tokens: Sequence[int], *, salt: str = "", lora: str = "") -> list[BlockKey]:
        """Return the keys of a prompt's whole blocks; see :meth:`KeyScheme.chain`."""
        return self._keys.chain(tokens, parent=self._keys.root(salt=salt, lora=lora))

    def _start(self, job: CopyJob) -> None:
        self._copier.submit(job)

    def poll(self) -> list[Finished]:
        finished = self._copier.poll()
        for one in finished:
            self._report(one)
        return finished

    def wait(self, job: JobId | StartedSave | None) -> list[Finished]:
        """Wait until ``job`` has ended; return all jobs that ended since the last poll.

        ``job`` is the result of ``load`` or ``save``. This is the connector's only call that waits.
        It does not wait if there is nothing to copy.
        """
        waited = job.job if isinstance(job, StartedSave) else job
        if waited is not None:
            self._copier.wait([waited])
        return self.poll()

    def close(self) -> None:
        self._copier.close()
        self.poll()
        super().close()
