"""An engine in virtual time over a simulated device; its forward passes check their reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch

from kvladder.arena import Arena, Slot
from kvladder.gpu.copy.copier import CopyJob, Direction, Finished, JobId
from kvladder.gpu.copy.pages import Page, RankShare
from kvladder.gpu.copy.streams import StreamCopier
from tests.kit.played import GARBAGE, Operation, PlayedDevice, plain

BLOCKS, SLOTS, LAYERS = 10, 8, 3
SLOT_BYTES = 16 << 10
SEEDS = range(12)
Tensors = dict[str, torch.Tensor]
Place = tuple[int, int]
"""A group and the number of a block in it."""


def lbhnc() -> list[Tensors]:
    kv = torch.zeros(LAYERS, BLOCKS, 2, 8, 16, dtype=torch.bfloat16)
    return [{f"layer{i}": kv[i] for i in range(LAYERS)}]


def blhnc() -> list[Tensors]:
    kv = torch.zeros(BLOCKS, LAYERS, 2, 8, 16, dtype=torch.bfloat16)
    return [{f"layer{i}": kv[:, i] for i in range(LAYERS)}]


def latent() -> list[Tensors]:
    """Multi-head latent attention: one vector a token, and an indexer's of another type."""
    return [
        {f"layer{i}": torch.zeros(BLOCKS, 8, 36, dtype=torch.bfloat16) for i in range(LAYERS)}
        | {"index": torch.zeros(BLOCKS, 8, 33, dtype=torch.uint8)}
    ]


def fp8() -> list[Tensors]:
    kv = torch.zeros(LAYERS, BLOCKS, 2, 8, 17, dtype=torch.uint8)
    return [{f"layer{i}": kv[i] for i in range(LAYERS)}]


def hybrid() -> list[Tensors]:
    """Return two groups over one memory: attention layers, and a state with the bytes of a page."""
    memory = torch.zeros(2 * BLOCKS, 1024, dtype=torch.uint8)
    attention = {f"layer{i}": memory[i::2].view(torch.bfloat16) for i in range(2)}
    return [attention, {"state": torch.zeros(BLOCKS, 700, dtype=torch.uint8)}]


def dense() -> list[Tensors]:
    """One page a block, as large as a slot: neighbours are one run of bytes on both sides."""
    return [{"all": torch.zeros(BLOCKS, SLOT_BYTES, dtype=torch.uint8)}]


LAYOUTS = [lbhnc, blhnc, latent, fp8, hybrid]


@dataclass
class Engine:
    """An engine's host thread, its device, and the expected content of every block.

    ``here`` is the content of each block once the device has executed all its work.
    """

    random: Random
    device: PlayedDevice
    copier: StreamCopier
    arena: Arena
    parts: dict[int, RankShare]
    here: dict[Place, int] = field(default_factory=dict[Place, int])
    stored: dict[Slot, tuple[int, int]] = field(default_factory=dict[Slot, tuple[int, int]])
    """The group and the content of each slot; claimed slots are not in it."""
    jobs: dict[JobId, tuple[CopyJob, list[int]]] = field(default_factory=dict[JobId, Any])
    wrong: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    """Errors of jobs."""
    number: int = 0

    def forward(self, seconds: float, reads: Sequence[Place], writes: Sequence[Place]) -> None:
        """Launch a forward pass, ordered after the saves that still read the blocks it writes."""
        self.copier.fence(self._saving(writes))
        held = {place: self.here[place] for place in reads}
        made = {place: self._next() for place in writes}
        self.here.update(made)

        def check() -> None:
            for place, content in held.items():
                self._expect("a forward pass read", self._bytes(place), content)

        def begin() -> None:
            check()
            for place in writes:
                self._fill(place, bytes([GARBAGE]) * self._size(place[0]))

        def end() -> None:
            check()
            for place, content in made.items():
                self._fill(place, self._pattern(content, self._size(place[0])))

        self.device.told(None, Operation(seconds, begin, end))

    def save(self, group: int, blocks: Sequence[int], slots: Sequence[Slot]) -> JobId:
        """Begin to save blocks into free slots."""
        contents = [self.here[group, block] for block in blocks]
        return self._submit("offload", group, blocks, slots, contents)

    def load(
        self, group: int, slots: Sequence[Slot], blocks: Sequence[int], *, sync: bool
    ) -> JobId:
        """Begin to load slots; with ``sync`` the next forward pass reads them."""
        contents = [self.stored.pop(slot)[1] for slot in slots]
        self.copier.fence(self._saving([(group, block) for block in blocks]))
        for block in blocks:
            self.here.pop((group, block), None)
        job = self._submit("onboard", group, blocks, slots, contents)
        if sync:
            self.copier.fence([job])
            self.here.update(zip(((group, block) for block in blocks), contents, strict=True))
        return job

    def by_layer(
        self, group: int, slots: Sequence[Slot], blocks: Sequence[int], seconds: float
    ) -> JobId:
        """Load slots layer by layer for a forward pass that waits for each layer, and check it."""
        contents = [self.stored.pop(slot)[1] for slot in slots]
        places = [(group, block) for block in blocks]
        self.copier.fence(self._saving(places))
        job = self._submit("onboard", group, blocks, slots, contents, by_layer=True)
        layers = self.parts[group].pages.layers
        for layer in layers:
            self.copier.fence([job], layer.names[0])
            check = partial(self._check, layer, blocks, contents)
            self.device.told(None, Operation(seconds / len(layers), check, check))
        self.copier.fence([job])
        self.here.update(zip(places, contents, strict=True))
        return job

    def _check(self, layer: Page, blocks: Sequence[int], contents: Sequence[int]) -> None:
        """A layer of a forward pass reads its part of blocks."""
        for block, content in zip(blocks, contents, strict=True):
            wanted = self._pattern(content, layer.offset + layer.size_bytes)[layer.offset :]
            if plain(layer.view)[block].numpy().tobytes() != wanted:
                self.wrong.append("a layer read")

    def poll(self) -> list[Finished]:
        """Process ended jobs."""
        ended = self.copier.poll()
        for finished in ended:
            job, contents = self.jobs.pop(finished.id)
            if not finished.ok:
                self.failed.append(finished.error)
                continue
            for block, slot, content in zip(job.blocks, job.slots, contents, strict=True):
                self.stored[slot] = job.group, content
                if job.direction == "onboard":
                    self.here.setdefault((job.group, block), content)
                size, offset = self._size(job.group), self.parts[job.group].offset
                held = bytes(self.arena.view(slot)[offset : offset + size])
                self._expect(f"{job.direction}: a slot holds", held, content)
        return ended

    def settle(self) -> None:
        """Let all work end, and check the content of every block."""
        self.finish()
        self.device.played.check()
        for place, content in self.here.items():
            self._expect("a block holds", self._bytes(place), content)

    def finish(self) -> None:
        """Let all work end; each poll may hand over more of it."""
        for _ in range(1000):
            self.device.settle()
            self.poll()
            if not self.jobs:
                return
            self.device.advance(0.01)

    def step(self) -> None:
        """Do anything that an engine may do."""
        group = self.random.choice([*self.parts])
        loading = {
            (job.group, block)
            for job, _ in self.jobs.values()
            if job.direction == "onboard"
            for block in job.blocks
        }
        filled = [block for g, block in self.here if g == group and (g, block) not in loading]
        slots = [slot for slot, (g, _) in self.stored.items() if g == group]
        claimed = {slot for job, _ in self.jobs.values() for slot in job.slots}
        free = [slot for slot in map(Slot, range(SLOTS)) if slot not in {*self.stored, *claimed}]
        what = self.random.randrange(5)
        if what == 0 and filled and free:
            count = self.random.randint(1, min(4, len(filled), len(free)))
            self.save(group, self.random.sample(filled, count), self.random.sample(free, count))
        elif what == 1 and slots:
            unused = [block for block in range(BLOCKS) if (group, block) not in loading]
            if unused:
                count = self.random.randint(1, min(4, len(slots), len(unused)))
                chosen = self.random.sample(slots, count)
                blocks, way = self.random.sample(unused, count), self.random.randrange(3)
                if way == 2:
                    self.by_layer(group, chosen, blocks, self.random.choice([1e-4, 0.05]))
                else:
                    self.load(group, chosen, blocks, sync=bool(way))
        elif what == 2 and slots:  # other jobs need the room
            del self.stored[self.random.choice(slots)]
        elif what == 3:
            self.device.advance(self.random.choice([0.0, 5e-5, 1e-4, 0.01, 0.2]))
            self.poll()
        else:
            usable = [(group, block) for block in range(BLOCKS) if (group, block) not in loading]
            writes = self.random.sample(usable, min(3, len(usable)))
            reads = [place for place in usable if place in self.here and place not in writes]
            self.forward(self.random.choice([1e-3, 0.05, 0.5]), reads, writes)

    def both_ways_at_once(self) -> None:
        """Save and load at the same instant, and poll repeatedly for ended jobs."""
        self.settle()
        self.stored.clear()
        group = self.random.choice([*self.parts])
        self.forward(1e-3, [], [(group, block) for block in range(4)])
        self.save(group, [0, 1], [Slot(0), Slot(1)])
        self.finish()
        assert self.failed == []
        self.save(group, [2, 3], [Slot(2), Slot(3)])
        self.load(group, [Slot(0), Slot(1)], [4, 5], sync=False)
        for _ in range(1000):
            self.device.advance(2e-5)
            self.poll()
        self.settle()

    def _submit(
        self,
        direction: Direction,
        group: int,
        blocks: Sequence[int],
        slots: Sequence[Slot],
        contents: list[int],
        *,
        by_layer: bool = False,
    ) -> JobId:
        job = CopyJob(JobId(self._next()), direction, tuple(blocks), tuple(slots), group)
        self.jobs[job.id] = job, contents
        self.copier.submit(job, by_layer=by_layer)
        return job.id

    def _saving(self, places: Sequence[Place]) -> list[JobId]:
        return [
            number
            for number, (job, _) in self.jobs.items()
            if any((job.group, block) in places for block in job.blocks)
        ]

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _size(self, group: int) -> int:
        return self.parts[group].pages.block_bytes

    def _pattern(self, content: int, size: int) -> bytes:
        return Random(content).randbytes(size)

    def _expect(self, what: str, found: bytes, content: int) -> None:
        if found != self._pattern(content, len(found)):
            self.wrong.append(what)

    def _bytes(self, place: Place) -> bytes:
        group, block = place
        views = [plain(page.view)[block] for page in self.parts[group].pages.pages]
        return b"".join(view.numpy().tobytes() for view in views)

    def _fill(self, place: Place, data: bytes) -> None:
        group, block = place
        for page in self.parts[group].pages.pages:
            part = bytearray(data[page.offset : page.offset + page.size_bytes])
            plain(page.view)[block] = torch.frombuffer(part, dtype=torch.uint8)


Start = Callable[..., Engine]
"""The type of the fixture ``start``."""


def forget(engine: Engine) -> None:
    """Forget jobs that cannot end, because of a fault."""
    engine.copier._launched.clear()
    for copies in engine.copier._waiting.values():
        copies.clear()


def run(
    start: Start,
    layout: Callable[[], list[Tensors]],
    device: PlayedDevice,
    seed: int,
    copies: type[StreamCopier] = StreamCopier,
    **options: float,
) -> Engine:
    """An engine after some time, at rest; a slice has one or two blocks of most layouts."""
    options = {"staging_bytes": 3000, "turn_bytes": 1, "slice_bytes": 3100, **options}
    engine = start(layout, device, seed=seed, copies=copies, **options)
    for _ in range(60):
        engine.step()
    engine.both_ways_at_once()
    return engine
