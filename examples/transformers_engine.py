"""A small engine with continuous batching: a Hugging Face model on kvladder's block pools.

    python transformers_engine.py [--model DIRECTORY] [--stack FILE.yaml]

Requests that share a prefix compute it once. What the pools evict goes down a stack of tiers and
comes back from there, also after a restart. When the pools are full the youngest request makes way
and goes on later. Without a model a tiny one with random weights is made.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvladder import Retention
from kvladder.connectors.transformers import PooledModel
from kvladder.device import Suspended
from kvladder.errors import BlocksBusy, NotReady, OutOfBlocks
from kvladder.gpu.requests.requests import Request

WAIT_S = 0.05

STACK = """
gpu: {{memory: 256 KiB}}                # blocks: on a GPU a part of what is free
arena: {{size: 384 KiB}}
tiers:
  - {{name: host, type: host}}
  - {{name: files, type: files, path: {path}, capacity: 64 MiB}}
"""


@dataclass(eq=False)
class Job:
    """What a user asks for, and what came of it so far."""

    prompt: list[int]
    tokens_max: int
    salt: str = ""
    retention: Retention | None = None
    output: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens of the prompt that were not computed, since they were found cached."""
    preempted: int = 0
    request: Request | None = None
    suspended: Suspended | None = None

    @property
    def done(self) -> bool:
        return len(self.output) >= self.tokens_max


class Engine:
    """Serves jobs: as many at once as the pools hold, each step all that are ready."""

    def __init__(self, model: PooledModel, *, batch_max: int = 16) -> None:
        self.model = model
        self.batch_max = batch_max
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        """In the order in which they began; the last ones make way first."""
        self.suspended: deque[Job] = deque()
        """Made way, and go on before anybody else begins; the oldest first."""

    def submit(self, prompt: list[int], tokens_max: int, **options: Any) -> Job:
        """Queue a prompt; its ``output`` grows with each step until it is ``done``."""
        job = Job(prompt, tokens_max, **options)
        self.waiting.append(job)
        return job

    def run(self) -> None:
        """Serve everything that was submitted."""
        while self.busy:
            self.step()

    @property
    def busy(self) -> bool:
        """Whether a job is not done."""
        return bool(self.waiting or self.running or self.suspended)

    def step(self) -> None:
        """Admit what there is room for, and compute the next tokens of all that are ready."""
        self.model.cache.poll()
        self._restart_lost()
        self._resume()
        if not self.suspended:
            self._admit()
        for job in list(self.running):
            if job in self.running and self._ready(job):
                self._make_room(job)
        batch = [job for job in self.running if self._has_room(job)]
        if not batch:
            self.model.cache.wait(WAIT_S)  # for a tier, or for slots that are still being read
            return
        logits = self.model.run([_request(job) for job in batch])
        for job, row in zip(batch, logits, strict=True):
            if row is not None:
                job.output.append(int(row.argmax()))
                if job.done:
                    self._leave(job)

    # ---- room

    def _admit(self) -> None:
        """Begin waiting jobs, oldest first, while there is room without preempting anyone."""
        while self.waiting and len(self.running) < self.batch_max:
            job = self.waiting[0]
            if any(self._computes_for(other, job) for other in self.running):
                return
            try:
                job.request = self.model.requests.begin(
                    job.prompt + job.output,
                    salt=job.salt,
                    retention=job.retention,
                    room=self.model.step,
                    prompt_tokens=len(job.prompt),
                )
            except OutOfBlocks as error:
                self._require_patience(error)
                return
            if not job.preempted:
                job.cached = job.request.cached
            self.running.append(self.waiting.popleft())

    def _computes_for(self, other: Job, job: Job) -> bool:
        """Whether ``other`` is about to compute whole blocks that ``job`` begins with, too."""
        shared = 0
        for left, right in zip(other.prompt, job.prompt, strict=False):
            if left != right or other.salt != job.salt:
                break
            shared += 1
        size = self.model.block_tokens
        return _request(other).computed < shared // size * size

    def _ready(self, job: Job) -> bool:
        return self.model.prepare(_request(job))

    def _has_room(self, job: Job) -> bool:
        request = _request(job)
        slots = min(map(len, request.tables)) * self.model.block_tokens
        ahead = self.model.ahead(request)
        complete = len(request.tokens) == len(job.prompt) + len(job.output)
        return request.ready and complete and request.computed + ahead <= slots

    def _make_room(self, job: Job) -> None:
        """Have slots for what the job computes next; the youngest job makes way if need be."""
        request = _request(job)
        have = len(request.tokens)
        new = (job.prompt + job.output)[have:]
        while True:
            try:
                if new:
                    self.model.requests.append(request, new)
                else:
                    end = request.computed + self.model.ahead(request)
                    self.model.requests.extend(request, end)
                return
            except BlocksBusy:
                return  # the next step asks again
            except OutOfBlocks:
                if any(_suspended(other).copies_left for other in self.suspended):
                    return  # there will be room when these have been copied
                youngest = self.running[-1]
                if len(self.running) == 1:
                    raise
                self._preempt(youngest)
                if youngest is job:
                    return

    def _preempt(self, job: Job) -> None:
        """The job makes way: its blocks are copied to host slots, or computed again later."""
        job.preempted += 1
        if not _request(job).ready:
            self._leave(job)
            self.waiting.appendleft(job)
            return
        job.suspended = self.model.cache.suspend(_request(job))
        job.request = None
        self.running.remove(job)
        self.suspended.appendleft(job)

    def _resume(self) -> None:
        """Let jobs that made way go on, with a block to spare for everyone who runs."""
        while self.suspended:
            job = self.suspended[0]
            parts = zip(_suspended(job).parts, self.model.cache.pools, strict=True)
            spare = len(self.running)
            if any(pool.free < len(part.held) + spare for part, pool in parts):
                return
            try:
                job.request = self.model.cache.resume(_suspended(job), room=self.model.step)
            except NotReady:
                return
            except OutOfBlocks as error:
                self._require_patience(error)
                return
            job.suspended = None
            self.running.append(self.suspended.popleft())

    def _require_patience(self, error: OutOfBlocks) -> None:
        """Raise the error if there is nothing to wait for: what was asked for never fits."""
        busy = self.running or self.model.cache.port.busy
        if not busy and not isinstance(error, BlocksBusy):
            raise error

    def _restart_lost(self) -> None:
        """A block did not come back from a tier: begin anew with what is cached."""
        for job in [job for job in self.running if _request(job).lost]:
            self._leave(job)
            self.waiting.appendleft(job)

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        self.model.requests.release(_request(job))
        self.model.requests.copied(_request(job))  # those that were not made are not needed
        job.request = None


def _request(job: Job) -> Request:
    assert job.request is not None
    return job.request


def _suspended(job: Job) -> Suspended:
    assert job.suspended is not None
    return job.suspended


def tiny_model() -> Any:
    """A Llama with random weights, so large that what it says depends on all that it has read."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def serve(model: Any, stack: str | Path, prompts: list[list[int]]) -> list[Job]:
    """Serve all prompts at once, print what came from where, and close."""
    with PooledModel(model, stack, context=256, block_tokens=8, step=64) as pooled:
        engine = Engine(pooled)
        jobs = [engine.submit(prompt, 24) for prompt in prompts]
        engine.run()
        stats = pooled.cache.stats()
    for number, job in enumerate(jobs):
        print(
            f"  request {number}: {len(job.prompt)} tokens, {job.cached} of them cached,"
            f" made way {job.preempted} times: {job.output[:6]} ..."
        )
    for name, counts in stats.items():
        kept = {k: v for k, v in counts.items() if v and k in ("evicted", "onboarded", "hits")}
        if kept:
            print(f"  {name}: {kept}")
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description="serve six prompts, twice")
    parser.add_argument("--model", help="a directory or a name; default: a tiny random model")
    parser.add_argument("--stack", help="a YAML file; default: host memory and files")
    arguments = parser.parse_args()
    model = (
        AutoModelForCausalLM.from_pretrained(arguments.model) if arguments.model else tiny_model()
    )
    model.eval()
    draw = torch.Generator().manual_seed(2)
    system, *questions = torch.randint(0, 256, (7, 40), generator=draw).tolist()
    prompts = [system + question for question in questions]
    with tempfile.TemporaryDirectory() as place:
        stack = arguments.stack or Path(place, "stack.yaml")
        if not arguments.stack:
            Path(stack).write_text(STACK.format(path=Path(place, "kv")))
        print("six requests with the same beginning:")
        first = serve(model, stack, prompts)
        print("the same after a restart:")
        again = serve(model, stack, prompts)
    assert [job.output for job in first] == [job.output for job in again]
    print("the answers are the same")


if __name__ == "__main__":
    main()
