"""The memory of a plan on a device: allocates it, with a view of each layer and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from kvladder.errors import PlanError
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.handlers import ConvState, Side
from kvladder.schema import nearest

if TYPE_CHECKING:
    from kvladder.gpu.sizing.plan import CachePlan

Tensors = dict[str, torch.Tensor]
Allocate = Callable[[str, int, int], torch.Tensor]
"""``allocate(name, count, bytes)``: uint8 ``[count, bytes]`` for ``count`` blocks or sequences.

Called once for all pools that share memory, in regions, see ``SHARED``.
"""


class PlanMemory:
    """The allocated memory of a sized plan. Ask for views again after ``resize`` and ``move``.

    Parameters
    ----------
    device:
        Device of all memory.
    allocate:
        Called for each pool and for each handler outside pools; None uses torch.
    least:
        Whether to begin with room for one sequence, until ``resize``.

    Raises
    ------
    PlanError
        The plan is not sized, or is allocated already.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        device: torch.device | str = "cpu",
        allocate: Allocate | None = None,
        least: bool = False,
    ) -> None:
        self.plan = plan
        self._device = device
        self._kinds = {one.name: one for one in plan.resources}
        plan.allocate(allocate or self._zeros, least=least)

    def _zeros(self, _: str, count: int, size: int) -> torch.Tensor:
        return torch.zeros(count, size, dtype=torch.uint8, device=self._device)

    def resize(self, peak_bytes: int) -> None:
        """Divide and allocate all memory anew, with ``peak_bytes`` left for a forward pass."""
        self.plan.resize(peak_bytes)

    def move(self, device: torch.device | str) -> None:
        """Move memory outside pools to another device. Pools stay where tiers reach them."""
        for one in self.plan.alone:
            self.plan.memory[one.name] = self._raw(one.name).to(device)

    @property
    def tensors(self) -> list[Tensors]:
        """Views of each pool's blocks: by name, in their order in a block, ``[blocks, ...]``."""
        return [
            {place.name: self._view(place.name) for place in pool.places}
            for pool in self.plan.pools
        ]

    def buffers(self, layer: str) -> torch.Tensor:
        """Return a layer's keys and values: ``[blocks, factor, tokens, heads, head size]``.

        Heads come before tokens if its layout is ``hnd``.

        Raises
        ------
        PlanError
            The plan has no such layer.
        """
        return self._of(layer, "layer", Layer)

    def states(self, name: str) -> torch.Tensor:
        """Return a recurrent state, or a custom handler's: ``[blocks, ...]``.

        Raises as ``buffers`` does.
        """
        others = (Layer, Side, ConvState)
        names = [one.name for one in self.plan.states if not isinstance(one, others)]
        return self._named(name, "state", names)

    def convolutions(self, name: str) -> torch.Tensor:
        """Return a convolution's last inputs: ``[blocks, channels, width]``.

        If it joins no pool of states it is outside pools: ``[sequences, ...]``. Raises as
        ``buffers`` does.
        """
        return self._of(name, "convolution", ConvState)

    def sides(self, name: str) -> torch.Tensor:
        """Return a side buffer: ``[blocks, tokens, heads, bytes]``; raises as ``buffers`` does."""
        return self._of(name, "side buffer", Side)

    def apart(self, name: str) -> torch.Tensor:
        """Return memory outside pools: ``[sequences, ...]``; raises as ``buffers`` does."""
        return self._named(name, "resource outside pools", [one.name for one in self.plan.alone])

    def _of(self, name: str, what: str, kind: type) -> torch.Tensor:
        names = [each for each, one in self._kinds.items() if isinstance(one, kind)]
        return self._named(name, what, names)

    def _named(self, name: str, what: str, names: list[str]) -> torch.Tensor:
        if name not in names:
            hint = nearest(name, names) if names else f"the plan has no {what}"
            raise PlanError(f"{name!r} is not a {what}", path="plan", hint=hint)
        return self._view(name)

    def _raw(self, name: str) -> torch.Tensor:
        return cast("torch.Tensor", self.plan.memory[name])

    def _view(self, name: str) -> torch.Tensor:
        for pool in self.plan.pools:
            for place in pool.places:
                if place.name == name:
                    blocks = self._raw(pool.group.name)
                    if self.plan.division is not None and self.plan.division.regions:
                        blocks = blocks.view(-1, pool.block_bytes)
                    return _shaped(blocks, place.offset, place.shape, place.dtype)
        one = next(one for one in self.plan.alone if one.name == name)
        return _shaped(self._raw(name), 0, one.shape, one.dtype)


def _shaped(blocks: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """View elements of a shape at an offset of each of ``blocks``, uint8 ``[blocks, bytes]``."""
    kind: torch.dtype = getattr(torch, "float8_e4m3fn" if dtype == "fp8" else dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return blocks[:, offset : offset + size].view(kind).view(len(blocks), *shape)
