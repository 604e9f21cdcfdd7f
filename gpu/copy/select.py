"""The copier that fits a device."""

from __future__ import annotations

from kvladder.arena import Arena
from kvladder.errors import LayoutError
from kvladder.gpu.copy.copier import Copier
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.cuda import StreamCopier
from kvladder.gpu.copy.pages import Parts, by_group


def copier_for(parts: Parts, arena: Arena) -> Copier:
    """A copier between these pages and the slots of ``arena``, which outlives it.

    Raises
    ------
    LayoutError
        The tensors are on a device that there is no copier for.
    """
    device = next(iter(by_group(parts).values())).pages.device
    if device.type == "cpu":
        return CpuCopier(parts, arena)
    if device.type == "cuda":
        return StreamCopier(parts, arena)
    raise LayoutError(f"KV tensors on {device}", hint="expected cpu or cuda")
