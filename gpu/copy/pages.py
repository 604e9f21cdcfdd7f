"""Places of a block's bytes in an engine's KV tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch

from kvladder.errors import LayoutError


@dataclass(frozen=True, eq=False)
class Page:
    """One run of bytes in every block, for example one layer's keys and values."""

    names: tuple[str, ...]
    """Names of its tensors: more than one if layers share their KV."""
    view: torch.Tensor
    """uint8 ``[blocks, bytes]`` over the engine's memory; the last stride is 1."""
    offset: int
    """Offset of its bytes in this rank's part of a slot."""

    @property
    def size_bytes(self) -> int:
        """Bytes per block."""
        return self.view.shape[1]

    @property
    def stride_bytes(self) -> int:
        """Bytes from one block to the next."""
        return self.view.stride(0)


class BlockPages:
    """The pages of one rank's blocks, in their order within a slot.

    Keeps the tensors alive. Shapes are checked, never guessed: a layout is refused unless a block's
    bytes are one run in each tensor.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        *,
        blocks: int,
        shapes: frozenset[str] = frozenset(),
        element: tuple[str, int] = ("", 0),
    ) -> None:
        self._text = ";".join(f"{','.join(page.names)}={page.size_bytes}" for page in pages)
        self.pages = tuple(_merged(pages))
        """Pages to copy for a whole block; adjacent ones are merged."""
        self.layers = tuple(pages)
        """Pages of the same bytes, one per layer, in the given order."""
        self.shapes = shapes
        """Element type and shape of one block in each of the tensors, as text."""
        self.element = element
        """Element type, and how many adjacent elements one token and head has; "", 0 if mixed."""
        self.blocks = blocks
        """Number of blocks that the tensors hold; ids are ``0 <= id < blocks``."""
        self.block_bytes = sum(page.size_bytes for page in pages)
        """Bytes of one block on this rank: all pages together."""
        self.device = pages[0].view.device

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        blocks: int,
        page_bytes: Mapping[str, int] | None = None,
    ) -> BlockPages:
        """Describe tensors; the first dimension of each counts blocks.

        With ``page_bytes`` it may count equal parts of blocks, as the size says how many there are.

        Parameters
        ----------
        tensors:
            Tensors by name, in the order of their bytes in a slot; all on one device.
        blocks:
            Number of blocks in each of them.
        page_bytes:
            Bytes of a block in each tensor by the engine's account, which must match the tensors.

        Raises
        ------
        LayoutError
            A tensor does not have that shape; says which one, what was found and what is expected.
        """
        if not tensors:
            raise LayoutError("no KV tensors", hint="expected at least one")
        devices = {str(tensor.device) for tensor in tensors.values()}
        if len(devices) > 1:
            what = f"KV tensors on {', '.join(sorted(devices))}"
            raise LayoutError(what, hint="expected one device")
        views: dict[tuple[int, int, int], tuple[list[str], torch.Tensor]] = {}
        for name, tensor in tensors.items():
            view = _view(name, tensor, blocks, has_parts=page_bytes is not None)
            expected = view.shape[1] if page_bytes is None else page_bytes[name]
            if view.shape[1] != expected:
                what = f"{name}: a block takes {view.shape[1]} bytes in the tensor"
                raise LayoutError(what, hint=f"expected {expected}, as the engine specifies")
            key = (view.data_ptr(), view.stride(0), view.shape[1])
            views.setdefault(key, ([], view))[0].append(name)
        pages: list[Page] = []
        offset = 0
        for names, view in views.values():
            pages.append(Page(tuple(names), view, offset))
            offset += view.shape[1]
        _require_apart(pages, blocks)
        shapes = frozenset(f"{tensor.dtype}{list(tensor.shape[1:])}" for tensor in tensors.values())
        element = common_element(map(_element, tensors.values()))
        return cls(pages, blocks=blocks, shapes=shapes, element=element)

    def describe(self) -> str:
        """Return the layout as text; it is equal for equal layouts with any number of blocks."""
        return self._text


class RankShare(NamedTuple):
    """One rank's share of the blocks of one group."""

    pages: BlockPages
    offset: int = 0
    """Offset of its bytes in a slot that holds such a block."""


Parts = BlockPages | Mapping[int, RankShare]
"""Shares by group; or the pages of the only group 0, with offset 0."""


def by_group(parts: Parts) -> dict[int, RankShare]:
    """Return the shares by group."""
    return {0: RankShare(parts)} if isinstance(parts, BlockPages) else dict(parts)


def common_element(elements: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """Return the common ``BlockPages.element`` of all; "" and 0 if they differ."""
    found = set(elements)
    return found.pop() if len(found) == 1 else ("", 0)


def _element(tensor: torch.Tensor) -> tuple[str, int]:
    """Return a tensor's element type, and its last dimension's length if that is contiguous."""
    run = tensor.shape[-1] if tensor.dim() > 2 and tensor.stride(-1) == 1 else 0
    return str(tensor.dtype).removeprefix("torch."), run


def _view(name: str, tensor: torch.Tensor, blocks: int, *, has_parts: bool) -> torch.Tensor:
    """Return ``tensor`` as uint8 ``[blocks, bytes]``, sharing its memory.

    With ``has_parts`` the first dimension may count equal parts of blocks. Raises LayoutError if a
    block's bytes are not one run, or blocks overlap.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    found = f"{name}: shape {shape} with strides {tuple(strides)}"
    if blocks < 1 or not shape or shape[0] % blocks or (shape[0] != blocks and not has_parts):
        hint = f"expected {blocks} blocks along the first dimension, one tensor for each layer"
        raise LayoutError(found, hint=hint)
    parts = shape[0] // blocks
    inner = [*zip(shape[1:], strides[1:], strict=True)]
    if parts > 1:  # the engine's kernels see each block as several smaller ones
        inner.append((parts, strides[0]))
    run = 1
    for size, stride in sorted((d for d in inner if d[0] > 1), key=lambda d: d[1]):
        if stride != run:
            raise LayoutError(found, hint="expected the bytes of a block to be contiguous")
        run *= size
    item = tensor.element_size()
    step = strides[0] * parts
    if blocks > 1 and step < run:
        raise LayoutError(found, hint="expected blocks that do not overlap")
    base = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * item
    return base.set_(
        tensor.untyped_storage(), start, (blocks, run * item), (max(step, run) * item, 1)
    )


def _merged(pages: Sequence[Page]) -> Iterator[Page]:
    """Yield the pages, with those merged that are adjacent in the engine's blocks, as in a slot."""
    joined = pages[0]
    for page in pages[1:]:
        last = joined.view
        follows = page.view.data_ptr() == last.data_ptr() + joined.size_bytes
        if follows and page.stride_bytes == joined.stride_bytes:
            size = joined.size_bytes + page.size_bytes
            view = last.as_strided((last.shape[0], size), (joined.stride_bytes, 1))
            joined = Page((*joined.names, *page.names), view, joined.offset)
        else:
            yield joined
            joined = page
    yield joined


def _require_apart(pages: Sequence[Page], blocks: int) -> None:
    """Raise LayoutError if different pages overlap."""
    ordered = sorted(pages, key=lambda page: page.view.data_ptr())
    for one, two in combinations(ordered, 2):
        start, other = one.view.data_ptr(), two.view.data_ptr()
        last = start + (blocks - 1) * one.stride_bytes + one.size_bytes
        woven = (
            one.stride_bytes == two.stride_bytes
            and start + one.size_bytes <= other
            and other + two.size_bytes <= start + one.stride_bytes
        )
        if other < last and not woven:
            raise LayoutError(
                f"{one.names[0]} and {two.names[0]} overlap",
                hint="expected separate memory per tensor",
            )


def copy_tokens(memory: torch.Tensor, *, source: int, target: int, tokens: int, axis: int) -> None:
    """Copy the KV of the first ``tokens`` tokens from slot ``source`` to slot ``target``.

    Parameters
    ----------
    memory:
        The memory, changed in place; the first dimension counts slots.
    tokens:
        Number of tokens, 0 to the tokens of a block.
    axis:
        The dimension that counts tokens, 1 or more.

    Raises
    ------
    ValueError
        ``axis`` or ``tokens`` is out of its range; nothing was changed.
    """
    if not 1 <= axis < memory.dim():
        raise ValueError(f"axis {axis}: expected 1 .. {memory.dim() - 1}")
    if not 0 <= tokens <= memory.shape[axis]:
        raise ValueError(f"{tokens} tokens: expected 0 .. {memory.shape[axis]}")
    memory[target].narrow(axis - 1, 0, tokens).copy_(memory[source].narrow(axis - 1, 0, tokens))
