"""An engine that decides in one process and computes in two others, with half of each block each.

``docs/how-to/write-a-connector.md`` explains it. Instead of a model, ``Worker._compute`` writes
numbers that depend on the tokens, so that the example can check what was loaded.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import kvladder
from kvladder.arena import Arena, ArenaHandle
from kvladder.connectors.steps import StepConnector
from kvladder.gpu.copy.copier import CopyJob, Finished
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages, RankShare

TOKENS = 16
BLOCKS = 64
RANKS = 2
RANK_SHAPE = (2, TOKENS, 4, 8)
"""Shape of a rank's share of a block: keys and values, tokens, heads, elements."""
RANK_BYTES = 2 * TOKENS * 4 * 8 * 4


@dataclass
class Step:
    """What the scheduler sends to each worker for one step; plain data."""

    loads: list[CopyJob] = field(default_factory=list[CopyJob])
    saves: list[CopyJob] = field(default_factory=list[CopyJob])
    compute: dict[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    """Tokens of each block that is computed in this step."""
    expect: dict[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    """Tokens of each block that must be right after the step; only for this example."""


class Worker:
    """One rank: owns its share of the KV cache, and copies what the scheduler names."""

    def __init__(self, rank: int, arena: ArenaHandle) -> None:
        self.kv = torch.zeros(BLOCKS, *RANK_SHAPE)
        pages = BlockPages.of({"kv": self.kv}, blocks=BLOCKS)
        self.arena = Arena.attach(arena)  # the same slots, mapped here
        # In a slot, the bytes of rank 1 follow those of rank 0.
        self.copier = copier_for({0: RankShare(pages, rank * pages.block_bytes)}, self.arena)

    def step(self, step: Step) -> list[Finished]:
        """Load, compute, begin to save; return the copies that have ended."""
        for job in step.loads:
            self.copier.submit(job)
        self.copier.wait([job.id for job in step.loads])  # the forward pass reads these blocks
        for block, tokens in step.compute.items():
            self.kv[block] = self._compute(tokens)
        for job in step.saves:
            self.copier.submit(job)
        for block, tokens in step.expect.items():
            assert torch.equal(self.kv[block], self._compute(tokens)), f"block {block} is wrong"
        return self.copier.poll()

    def _compute(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([*tokens]).view(1, TOKENS, 1, 1).expand(RANK_SHAPE).float()

    def close(self) -> list[Finished]:
        """End the copies, then unmap the arena; return the copies that ended meanwhile."""
        self.copier.close()
        ended = self.copier.poll()
        self.arena.close()
        return ended


def work(rank: int, arena: ArenaHandle, pipe: Connection) -> None:
    """Run one worker's process until the scheduler sends None."""
    worker = Worker(rank, arena)
    while (step := pipe.recv()) is not None:
        pipe.send(worker.step(step))
    pipe.send(worker.close())


class Scheduler:
    """Owns the cache, decides what is loaded and saved, and never touches a tensor."""

    def __init__(self, stack: dict[str, Any]) -> None:
        layout = kvladder.Layout(
            block_tokens=TOKENS,
            block_bytes=RANKS * RANK_BYTES,
            fields={"model": "demo", "ranks": str(RANKS)},  # whatever changes a block's bytes
        )
        self.cache = kvladder.open_cache(stack, layout=layout)
        self.connector = StepConnector(self.cache, ranks=RANKS)
        self.keys = kvladder.KeyScheme(self.cache.namespace, block_tokens=TOKENS)
        self.pipes: list[Connection] = []
        self.processes = []
        context = multiprocessing.get_context("spawn")  # a forked process would share too much
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, self.cache.arena.handle, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def step(self, step: Step | None = None) -> list[Finished]:
        """Run one step on all workers; return the loads and saves that all ranks have ended."""
        step = step or Step()
        for job in self.connector.take():  # what load and save began since the last step
            (step.loads if job.direction == "onboard" else step.saves).append(job)
        for pipe in self.pipes:
            pipe.send(step)
        for pipe in self.pipes:
            self.connector.report(pipe.recv())
        return self.connector.poll()

    def serve(self, tokens: Sequence[int], blocks: Sequence[int]) -> int:
        """Compute a prompt of whole blocks; return how many blocks came from the cache."""
        names = self.keys.chain(tokens)
        parts = [tokens[at : at + TOKENS] for at in range(0, len(tokens), TOKENS)]
        match = self.connector.match(names)
        while not match.done:
            self.step()  # an engine runs its other requests here
        found = match.blocks
        if found == 0:
            match.release()
        else:
            job = self.connector.load(match, blocks[:found])
            ended = {one.id: one.ok for one in self.step()}
            if not ended[job]:  # the blocks hold garbage: compute them
                found = 0
        self.step(Step(compute=dict(zip(blocks[found:], parts[found:], strict=True))))
        self.connector.save(names, blocks)  # in the next step, once the blocks are complete
        while self.connector.busy:  # until then no block may be reused
            self.step()
        self.step(Step(expect=dict(zip(blocks, parts, strict=True))))
        return found

    def close(self) -> None:
        """End the workers first, then the connector, then the cache."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            self.connector.report(pipe.recv())
            process.join()
        self.connector.close()
        self.cache.close()


def main() -> None:
    """Serve a prompt, a longer one, and both again from files after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"name": "files", "type": "files", "path": str(Path(folder, "kv"))}
        stack = {
            "arena": {"size": "1 MiB"},
            "fetch": {"when": "always"},
            "tiers": [{"name": "host", "type": "host"}, files | {"capacity": "4 MiB"}],
        }
        for start in ("first start", "second start"):
            engine = Scheduler(stack)
            for length, first in ((6, 0), (10, 20)):
                found = engine.serve(range(length * TOKENS), [*range(first, first + length)])
                print(f"{start}: {found} of {length} blocks came from the cache")
            engine.close()


if __name__ == "__main__":
    main()
