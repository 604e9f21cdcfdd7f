"""Addresses of blocks on both sides of a copy, in slices of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvladder.arena import Arena
from kvladder.gpu.copy.copier import CopyJob, Direction
from kvladder.gpu.copy.device import Addresses, CopyRuns
from kvladder.gpu.copy.pages import Page, RankShare

_ONE = np.ones(1, np.uint64)


class UnfitJob(ValueError):
    """A job whose next slice cannot be handed over; the device was not touched for it."""


class SliceLimits(NamedTuple):
    """Bounds of a slice; a single block's pages may exceed them."""

    bytes: int
    runs: int

    def blocks(self, block_bytes: int, pages: int) -> int:
        """Return how many blocks of so many bytes and pages a slice has, at least one."""
        return max(1, min(self.bytes // block_bytes, self.runs // pages))


class Slice(NamedTuple):
    """A part of a job that one call hands over.

    Its arrays are valid until the next slice of any job of the group is made.
    """

    runs: CopyRuns
    top: int
    """Highest slot in it."""
    layers: Sequence[str]
    """Layers that are complete with it, for a job that goes by layer."""
    last: bool


class JobPlaces:
    """Blocks and slots of a job as arrays, converted and checked as far as they are needed."""

    def __init__(self, job: CopyJob, *, blocks: int, slots: int) -> None:
        if len(job.blocks) != len(job.slots):
            raise UnfitJob(f"{len(job.blocks)} blocks for {len(job.slots)} slots")
        self.count = len(job.blocks)
        self._job = job
        self._limits = blocks, slots
        self._blocks, self._slots = np.empty((2, self.count), np.int64)
        self._known = 0

    def between(self, start: int, end: int) -> tuple[Addresses, Addresses]:
        """Return blocks and slots number ``start`` to ``end``; raise UnfitJob if one is wrong."""
        if end > self._known:
            self._convert(end)
        return self._blocks[start:end].view(np.uint64), self._slots[start:end].view(np.uint64)

    def _convert(self, end: int) -> None:
        part = slice(self._known, end)
        for name, array, numbers, limit in zip(
            ("block", "slot"),
            (self._blocks, self._slots),
            (self._job.blocks, self._job.slots),
            self._limits,
            strict=True,
        ):
            array[part] = numbers[part]
            if array[part].min() < 0 or array[part].max() >= limit:
                wrong = array[part][(array[part] < 0) | (array[part] >= limit)]
                raise UnfitJob(f"{name} {wrong[0]} of {limit} does not exist")
        self._known = end


class AddressGroup:
    """Addresses of one group's blocks on both sides, as arrays for calculations.

    Parameters
    ----------
    piece_slots:
        Slots of a registered piece of the arena. No run of bytes crosses two pieces.
    runs_max:
        Largest number of runs in a slice; the arrays for so many are made once.
    """

    def __init__(self, part: RankShare, arena: Arena, piece_slots: int, runs_max: int) -> None:
        self.part = part
        self._piece_slots = np.uint64(piece_slots)
        assert 0 <= part.offset <= arena.slot_bytes - part.pages.block_bytes
        self._slots = arena.slots
        self._slot_bytes = np.uint64(arena.slot_bytes)
        self._first_slot = np.uint64(arena.address + part.offset)
        self._pages = _Columns.of(part.pages.pages)
        self._layers = _Columns.of(part.pages.layers)
        self._dense = [(page.size_bytes, page.stride_bytes) for page in part.pages.pages] == [
            (arena.slot_bytes, arena.slot_bytes)
        ]
        """True if neighbouring blocks are one run of bytes on both sides."""
        widest = max(runs_max, len(part.pages.layers))
        self._buffers: NDArray[np.uint64] = np.empty((3, widest), np.uint64)

    def places(self, job: CopyJob) -> JobPlaces:
        """Return a job's places; raise UnfitJob if it has more blocks than slots or fewer."""
        return JobPlaces(job, blocks=self.part.pages.blocks, slots=self._slots)

    def run_bytes(self, *, by_layer: bool) -> int:
        """Return the average bytes per run."""
        pages = self.part.pages
        return pages.block_bytes // len(pages.layers if by_layer else pages.pages)

    def whole(self, job: CopyJob, limits: SliceLimits) -> Iterator[Slice]:
        """Yield a job in slices of whole blocks; if dense, neighbours form one run."""
        places, pages = self.places(job), self._pages
        step = limits.blocks(self.part.pages.block_bytes, len(pages.sizes))
        for start in range(0, places.count, step):
            end = min(start + step, places.count)
            blocks, slots = places.between(start, end)
            top, counts = int(slots.max()), _ONE
            if self._dense and len(blocks) > 1:
                blocks, slots, counts = self._merged(blocks, slots)
            runs = self._runs(job.direction, pages, blocks, self._at(slots), counts)
            yield Slice(runs, top, (), end == places.count)

    def by_layer(self, job: CopyJob, limits: SliceLimits, turn_bytes: int) -> Iterator[Slice]:
        """Yield a job in slices of one layer, or of several up to about ``turn_bytes``."""
        places, layers = self.places(job), self.part.pages.layers
        first, told = 0, 0
        for stop, layer in enumerate(layers, start=1):
            told += layer.size_bytes * places.count
            if told < turn_bytes and stop < len(layers):
                continue
            columns = self._layers.between(first, stop)
            names = [name for page in layers[first:stop] for name in page.names]
            step = limits.blocks(int(columns.sizes.sum()), stop - first)
            for start in range(0, places.count, step):
                end = min(start + step, places.count)
                blocks, slots = places.between(start, end)
                runs = self._runs(job.direction, columns, blocks, self._at(slots), _ONE)
                complete = end == places.count
                yield Slice(
                    runs,
                    int(slots.max()),
                    names if complete else (),
                    complete and stop == len(layers),
                )
            first, told = stop, 0

    def rows(self, direction: Direction, rows: torch.Tensor, slots: Addresses) -> CopyRuns:
        """Return the copies between rows of staging memory and slots."""
        size = rows.stride(0)
        mine = np.uint64(rows.data_ptr()) + np.arange(len(rows), dtype=np.uint64) * np.uint64(size)
        return _directed(direction, mine, self._at(slots), np.full(len(rows), size, np.uint64))

    def _merged(
        self, blocks: Addresses, slots: Addresses
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return the first blocks and slots of runs of neighbours, and the number in each run."""
        apart = (blocks[1:] != blocks[:-1] + _ONE) | (slots[1:] != slots[:-1] + _ONE)
        pieces = slots // self._piece_slots
        apart |= pieces[1:] != pieces[:-1]
        if apart.all():
            return blocks, slots, _ONE
        begins = np.concatenate([[0], np.flatnonzero(apart) + 1])
        counts = np.diff(begins, append=len(blocks)).astype(np.uint64)
        return blocks[begins], slots[begins], counts

    def _runs(
        self,
        direction: Direction,
        columns: _Columns,
        blocks: Addresses,
        slots: Addresses,
        counts: Addresses,
    ) -> CopyRuns:
        """Return the runs of some pages of blocks, in the buffers that all slices share."""
        shape = len(columns.sizes), len(blocks)
        total = shape[0] * shape[1]
        mine, theirs, sizes = (row[:total].reshape(shape) for row in self._buffers)
        np.multiply(columns.strides, blocks, out=mine)
        mine += columns.bases
        np.add(columns.offsets, slots, out=theirs)
        np.multiply(columns.sizes, counts, out=sizes)
        return _directed(direction, *(row[:total] for row in self._buffers))

    def _at(self, slots: Addresses) -> Addresses:
        return self._first_slot + slots * self._slot_bytes


class _Columns(NamedTuple):
    """Page numbers as columns, to be combined with rows of blocks."""

    bases: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses

    @classmethod
    def of(cls, pages: Sequence[Page]) -> _Columns:
        return cls(
            _column(page.view.data_ptr() for page in pages),
            _column(page.stride_bytes for page in pages),
            _column(page.size_bytes for page in pages),
            _column(page.offset for page in pages),
        )

    def between(self, first: int, end: int) -> _Columns:
        """Return the columns of some pages."""
        return _Columns(*(column[first:end] for column in self))


def _column(numbers: Iterable[int]) -> Addresses:
    return np.array([*numbers], np.uint64)[:, None]


def _directed(
    direction: Direction, mine: Addresses, theirs: Addresses, sizes: Addresses
) -> CopyRuns:
    """Return the runs in the job's direction; slots to load from are claimed, and so steady."""
    if direction == "offload":
        return CopyRuns(theirs, mine, sizes, steady=False)
    return CopyRuns(mine, theirs, sizes, steady=True)
