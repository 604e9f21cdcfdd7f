"""Gives device memory of idle pools back, and takes it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvladder.device.port import TierPort
from kvladder.errors import LayoutError, PoolError
from kvladder.gpu.copy.pages import BlockPages
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.requests.requests import Requests
from kvladder.gpu.tree.names import DeviceSlot

Leave = Callable[[BlockPool, int], tuple[int, int]]
"""``DeviceCache._leave``: starts evicting blocks, returns how many leave, and the room found."""


class Room:
    """Shrinks and grows the memory of the pools of one device cache, from the last block on.

    Tensors stay the same objects with the same shapes; only the memory behind them is shorter. No
    code may touch blocks that have no memory.

    Parameters
    ----------
    tensors:
        The tensors by group, each ``[blocks, ...]``.
    """

    def __init__(
        self, port: TierPort, requests: Requests, tensors: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        self._port = port
        self._groups = requests.groups
        self._pools = [one.pool for one in requests.sequences]
        self._tensors = tensors
        self._storages: list[list[tuple[torch.UntypedStorage, int]]] = []
        """Storages of each group's tensors, with the bytes of a block in each."""

    def shrink(self, share: float, *, timeout_s: float, leave: Leave) -> int:
        """See ``DeviceCache.shrink``."""
        if not 0 <= share <= 1:
            raise ValueError(f"share {share!r}: expected a number from 0 to 1")
        self._storages = self._storages or self._found()
        end_s = self._port.manager.ladder.clock.now() + timeout_s
        self._rest(end_s)
        before = self._bytes
        keep = [min(pool.blocks, max(1, int(pool.settings.blocks * share))) for pool in self._pools]
        for pool, blocks in zip(self._pools, keep, strict=True):
            while pool.cached > blocks:
                left = pool.cached - blocks
                if not leave(pool, left)[0]:
                    pool.evict(left)  # no room below: forget the least valuable
                self._rest(end_s)
        for group, (pool, blocks) in enumerate(zip(self._pools, keep, strict=True)):
            self.move(group, pool.resize(blocks))
            self._resize(group, blocks)
        self._settle()
        return before - self._bytes

    def grow(self) -> int:
        """See ``DeviceCache.grow``."""
        self._storages = self._storages or self._found()
        self._rest(self._port.manager.ladder.clock.now())
        before = self._bytes
        try:
            for group, pool in enumerate(self._pools):
                self._resize(group, pool.settings.blocks)
        finally:
            self._settle()
        for pool in self._pools:
            pool.resize(pool.settings.blocks)
        return self._bytes - before

    def _rest(self, end_s: float) -> None:
        """Wait for copies to end, until ``end_s``; raise PoolError if blocks are still held."""
        clock = self._port.manager.ladder.clock
        self._port.poll()
        while self._port.busy and (left_s := end_s - clock.now()) > 0:
            self._port.wait(left_s)
            self._port.poll()
        for group, pool in zip(self._groups, self._pools, strict=True):
            if pool.used:
                what = f"{pool.used} blocks of {group.name} are held or being copied"
                raise PoolError(f"{what}: expected no running request")

    # ---- the memory itself

    def _found(self) -> list[list[tuple[torch.UntypedStorage, int]]]:
        """Return the storages by group; raise LayoutError if no part of one can be given back."""
        found: list[list[tuple[torch.UntypedStorage, int]]] = []
        seen: set[int] = set()
        for held, pool in zip(self._tensors, self._pools, strict=True):
            own: dict[int, tuple[torch.UntypedStorage, int]] = {}
            for name, tensor in held.items():
                storage, size = tensor.untyped_storage(), tensor.stride(0) * tensor.element_size()
                where, whole = storage.data_ptr(), size * pool.settings.blocks
                if where in seen or whole != storage.nbytes() or not storage.resizable():
                    hint = "expected a tensor that owns its memory, with contiguous blocks"
                    raise LayoutError(f"{name}: its memory cannot be given back", hint=hint)
                own[where] = storage, size
            seen.update(own)
            found.append(list(own.values()))
        return found

    @property
    def _bytes(self) -> int:
        return sum(storage.nbytes() for own in self._storages for storage, _ in own)

    def move(self, group: int, moves: Sequence[tuple[DeviceSlot, DeviceSlot]]) -> None:
        """Copy whole blocks from one slot to another of the group."""
        if moves:
            settings = self._pools[group].settings
            blocks = max(settings.blocks, settings.places)
            pages = BlockPages.of(self._tensors[group], blocks=blocks)
            sources, targets = torch.tensor(moves, device=pages.device).T
            for page in pages.pages:
                page.view[targets] = page.view[sources]

    def _resize(self, group: int, blocks: int) -> None:
        """Resize memory to the first ``blocks`` blocks of a group; new bytes are undefined."""
        for storage, size in self._storages[group]:
            if storage.nbytes() != blocks * size:
                storage.resize_(blocks * size)

    def _settle(self) -> None:
        """Tell the copier that memory has moved, and return torch's unused memory to the device."""
        self._port.copier.moved()
        if any(storage.device.type == "cuda" for own in self._storages for storage, _ in own):
            torch.cuda.empty_cache()
