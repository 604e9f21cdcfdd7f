"""SGLang's host pools, of keys and values and of anything else: names and copies their pages."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvladder.arena import Arena
from kvladder.connectors.sglang.pieces import PageRun
from kvladder.connectors.vllm.groups import marked
from kvladder.errors import LayoutError
from kvladder.layout import Kind

KV: Final = "kv"
FACTS: Final = (
    "layout", "page_size", "dtype", "storage_format_tag", "start_layer", "end_layer", "layer_num",
    "head_num", "head_dim", "v_head_dim", "conv_dtype", "temporal_dtype",
)  # fmt: skip
"""Attributes that tell one pool's pages from another's; a pool may lack some."""


@dataclass(frozen=True)
class RankPool:
    """One of the host pools of a rank."""

    name: str
    held: Any
    """SGLang's pool."""
    page: int
    """Rows per page."""
    page_bytes: int
    group: int
    """Index among the pools of a rank."""
    mark: int
    """Digest of its layout, and of its rank if ranks differ; part of its pages' names."""

    @property
    def kind(self) -> Kind:
        """Kind of content: a window's, a state, or full attention's."""
        if "swa" in self.name:
            return "window"
        return "state" if "mamba" in self.name or "state" in self.name else "full"

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """Return our names of its pages: SGLang's digests, changed by the pool's mark."""
        return marked([bytes.fromhex(key) for key in keys], self.mark)

    def copy(self, arena: Arena, piece: PageRun, rows: torch.Tensor, *, up: bool) -> None:
        """Copy a piece's pages from our slots into the pool (``up``), or from the pool into slots.

        ``rows`` are the pool's rows of all pages of the batch. ``memmove`` releases the GIL, so
        other threads may run meanwhile.
        """
        chosen = rows.view(-1, self.page)[piece.pages].reshape(-1)
        pointers, sizes = self.held.get_page_buffer_meta(chosen)
        parts, base, size = len(pointers) // len(piece.slots), arena.address, arena.slot_bytes
        for index, slot in enumerate(piece.slots):
            place = base + slot * size
            for part in range(index * parts, (index + 1) * parts):
                to, source = (pointers[part], place) if up else (place, pointers[part])
                ctypes.memmove(to, source, sizes[part])
                place += sizes[part]


def pool_of(held: Any, name: str, ranks: Any, group: int) -> RankPool:
    """Return the ``RankPool`` of one of SGLang's pools.

    Raises
    ------
    LayoutError
        The pool does not tell where a page lies.
    """
    page = int(getattr(held, "page_size", 1) or 1)
    try:
        _, sizes = held.get_page_buffer_meta(torch.arange(page))
    except (AttributeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
        kind = type(held).__name__
        what = f"the host pool {name!r}, a {kind}, does not report where a page lies: {error}"
        hint = "use --hicache-mem-layout page_first_direct, page_first or layer_first"
        raise LayoutError(what, hint=hint) from error
    page_bytes = int(sum(sizes))
    return RankPool(name, held, page, page_bytes, group, _mark(held, name, ranks, page_bytes))


def _mark(held: Any, name: str, ranks: Any, page_bytes: int) -> int:
    shard = _shard(held, name, ranks)
    if name == KV and not shard:  # the namespace already tells its layout
        return 0
    facts = " ".join(str(getattr(held, fact, None)) for fact in FACTS)
    text = f"kvladder pool {name} {type(held).__name__} {page_bytes} {facts} {shard}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


def _shard(held: Any, name: str, ranks: Any) -> str:
    """Return which part of a page this rank has; empty if every rank has whole pages."""
    own = [
        ("cp", ranks.attn_cp_rank, ranks.attn_cp_size),
        ("dcp", ranks.dcp_rank, ranks.dcp_size),
    ]
    if is_sharded(held, name, ranks):
        own.append(("tp", ranks.tp_rank, ranks.tp_size))
    return " ".join(f"{what} {rank} of {size}" for what, rank, size in own if size > 1)


def is_sharded(held: Any, name: str, ranks: Any) -> bool:
    """Return whether tensor-parallel ranks keep parts of a page: heads, or states by heads."""
    if not ranks.is_mla_model:
        return True
    return name != KV and (name == "mamba" or hasattr(held, "head_num"))


def require_stored(pool: RankPool, ranks: Any) -> None:
    """Raise LayoutError if SGLang stores less of a pool than its ranks read."""
    if not ranks.is_mla_model or ranks.tp_size == 1 or pool.name == "mamba":
        return
    if is_sharded(pool.held, pool.name, ranks):
        what = (
            f"each rank has its own heads in the pool {pool.name!r}, but only one rank stores them"
        )
        raise LayoutError(what, hint="use --tp-size 1, or a draft model without such a pool")
