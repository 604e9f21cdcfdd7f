"""The copier that fits a device."""

from __future__ import annotations

from kvladder.arena import Arena
from kvladder.errors import LayoutError
from kvladder.gpu.copy import Copier
from kvladder.gpu.cpu import CpuCopier
from kvladder.gpu.pages import BlockPages
from kvladder.gpu.streams import StreamCopier


def copier_for(pages: BlockPages, arena: Arena, *, offset: int = 0) -> Copier:
    """A copier between these pages and the slots of ``arena``.

    Parameters
    ----------
    pages:
        This rank's pages.
    arena:
        Stays open until the copier is closed.
    offset:
        Where this rank's bytes begin in each slot.

    Raises
    ------
    LayoutError
        The tensors are on a device that there is no copier for.
    """
    if pages.device.type == "cpu":
        return CpuCopier(pages, arena, offset=offset)
    if pages.device.type == "cuda":
        return StreamCopier(pages, arena, offset=offset)
    raise LayoutError(f"KV tensors on {pages.device}", hint="expected cpu or cuda")
