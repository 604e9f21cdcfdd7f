"""A small engine with continuous batching: a Hugging Face model on kvladder's block pools.

    python transformers_engine.py [--model DIRECTORY] [--stack FILE.yaml] [--beams N] [--drafts N]

Requests that share a prefix compute it once. What the pools evict goes down a stack of tiers and
comes back from there, also after a restart. When the pools are full the youngest request makes way
and goes on later. Beams share the blocks of what they have in common. Where a text repeats itself
its next tokens are drafted, and one pass says which are right. Without a model a tiny one with
random weights is made.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvladder import Retention
from kvladder.connectors.transformers import PooledModel
from kvladder.connectors.transformers.decoding import BeamSearch, agreed, drafted
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
    """A user's request, and its results so far."""

    prompt: list[int]
    tokens_max: int
    salt: str = ""
    retention: Retention | None = None
    ends: frozenset[int] = frozenset()
    """Tokens after which nothing comes."""
    beams: int = 1
    """The best of so many texts is wanted; its ``output`` is empty until it is ``done``."""
    drafts_max: int = 0
    """How many tokens are drafted at a time."""
    output: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens of the prompt that were not computed, since they were found cached."""
    passes_saved: int = 0
    """Tokens that were drafted right."""
    preempted: int = 0
    search: BeamSearch | None = None
    drafts: list[int] = field(default_factory=list)
    """What comes after the output, perhaps; the next pass says."""
    requests: list[Request] = field(default_factory=list)
    """One for each text while it runs."""
    suspended: Suspended | None = None

    @property
    def done(self) -> bool:
        ended = bool(self.output) and self.output[-1] in self.ends
        return ended or len(self.output) >= self.tokens_max

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each request."""
        said = [self.output + self.drafts] if self.search is None else self.search.texts
        return [self.prompt + one for one in said]


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
        """Queue a prompt; its ``output`` grows with each step until it is ``done``.

        Raises ValueError if it has more beams than the engine computes at once, or beams and
        drafts, or drafts that the model does not take back.
        """
        job = Job(prompt, tokens_max, **options)
        if not 1 <= job.beams <= self.batch_max:
            raise ValueError(f"{job.beams} beams: expected 1 .. {self.batch_max}")
        if job.drafts_max:
            self.model.require_drafts()
            if job.beams > 1:
                raise ValueError(f"drafts for {job.beams} beams: expected either drafts or beams")
        self.waiting.append(job)
        return job

    def run(self) -> None:
        """Serve everything that was submitted."""
        while self.busy:
            self.step()

    @property
    def busy(self) -> bool:
        """Return whether a job is not done."""
        return bool(self.waiting or self.running or self.suspended)

    def step(self) -> None:
        """Admit what there is room for, and compute the next tokens of all that are ready."""
        self.model.cache.poll()
        self._restart_lost()
        self._give_room(self.running)
        began = len(self.running)  # these come first, so that each step computes for one of them
        self._resume()
        if not self.suspended:
            self._admit()
        self._give_room(self.running[began:])
        batch = [job for job in self.running if self._has_room(job)]
        if not batch:
            self.model.cache.wait(WAIT_S)  # for a tier, or for slots that are still being read
            return
        rows = [(request, len(job.drafts)) for job in batch for request in job.requests]
        requests, drafts = zip(*rows, strict=True)
        logits = iter(self.model.run(requests, drafts))
        for job in batch:
            found = [row for row in islice(logits, len(job.requests)) if row is not None]
            if not found:
                continue
            if job.search is None:
                self._verify(job, found[0].argmax(-1).tolist())
            else:
                self._branch(job, job.search, torch.cat(found))
            if job.done:
                self._leave(job)

    # ---- texts

    def _verify(self, job: Job, chosen: list[int]) -> None:
        """Take what the model chose after the output, and after each draft that was right."""
        right = agreed(job.drafts, chosen)
        if job.drafts:
            self.model.accept(job.requests[0], right)
            job.drafts = []
        for token in chosen[: right + 1]:
            if not job.done:
                job.output.append(token)
        job.passes_saved += right

    def _branch(self, job: Job, search: BeamSearch, logits: torch.Tensor) -> None:
        """Have a request for each text: those that go on from one share what is computed."""
        before, parents = job.requests, search.step(logits)
        for at, request in enumerate(before):
            if at not in parents:
                self.model.requests.release(request, store=False)
        ways = Counter(parents)
        forks = {at: self.model.requests.fork(before[at], ways[at] - 1) for at in ways}
        job.requests = [forks[at].pop() if forks[at] else before[at] for at in parents]
        if search.done:
            job.output = search.texts[0]

    def _draft(self, job: Job) -> None:
        """Draft what the output goes on with, where nothing else is left to be computed."""
        request, left = job.requests[0], job.tokens_max - len(job.output) - 1
        if self.model.step is not None:
            left = min(left, self.model.step - 1)
        if job.output and not job.drafts and request.computed == len(request.tokens):
            job.drafts = drafted(job.texts[0], min(job.drafts_max, left))

    # ---- room

    def _admit(self) -> None:
        """Begin waiting jobs, oldest first, while there is room without preempting anyone."""
        while self.waiting:
            job = self.waiting[0]
            if sum(other.beams for other in [*self.running, job]) > self.batch_max:
                return
            if any(self._computes_for(other, job) for other in self.running):
                return
            if self.running and not self._has_room_for_beams(job):
                return
            if job.beams > 1:
                job.search = BeamSearch(job.beams, job.tokens_max, ends=job.ends)
            try:
                request = self.model.requests.begin(
                    job.texts[0],
                    salt=job.salt,
                    retention=job.retention,
                    room=self.model.step,
                    prompt_tokens=len(job.prompt),
                )
            except OutOfBlocks as error:
                self._require_patience(error)
                return
            job.requests = [request]
            if not job.preempted:
                job.cached = request.cached
            self.running.append(self.waiting.popleft())

    def _computes_for(self, other: Job, job: Job) -> bool:
        """Return whether ``other`` will soon compute whole blocks that ``job`` begins with, too."""
        shared = 0
        for left, right in zip(other.prompt, job.prompt, strict=False):
            if left != right or other.salt != job.salt:
                break
            shared += 1
        size = self.model.requests.step
        return other.requests[0].computed < shared // size * size

    def _has_room_for_beams(self, job: Job) -> bool:
        """Return whether all that its beams compute has room: to begin anew takes long."""
        if job.beams == 1:
            return True
        for group, pool in zip(self.model.requests.groups, self.model.cache.pools, strict=True):
            own = job.tokens_max // group.block_tokens + 2
            if pool.free < len(job.prompt) // group.block_tokens + job.beams * own:
                return False
        return True

    def _ready(self, job: Job) -> bool:
        return all(self.model.prepare(request) for request in job.requests)

    def _has_room(self, job: Job) -> bool:
        for request, text in zip(job.requests, job.texts, strict=True):
            end = request.computed + self.model.ahead(request)
            complete = request.ready and len(request.tokens) == len(text)
            if not complete or end > self.model.room(request):
                return False
        return True

    def _give_room(self, jobs: list[Job]) -> None:
        """Have slots for what these compute next, if their blocks have come; the oldest first."""
        for job in list(jobs):
            if job in self.running and self._ready(job):
                self._make_room(job)

    def _make_room(self, job: Job) -> None:
        """Have slots for what the job computes next; the youngest job makes way if need be."""
        if job.drafts_max:
            self._draft(job)
        at = 0
        while at < len(job.requests):
            request = job.requests[at]
            new = job.texts[at][len(request.tokens) :]
            try:
                if new:
                    self.model.requests.append(request, new)
                    self.model.prepare(request)  # the last of several forks then needs no copy
                else:
                    end = request.computed + self.model.ahead(request)
                    self.model.requests.extend(request, end)
                at += 1
            except BlocksBusy:
                return  # the next step asks again
            except OutOfBlocks:
                if len(new) > 1:
                    job.drafts = []  # no other job makes way for these
                    continue
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])

    def _preempt(self, job: Job) -> None:
        """The job makes way: its blocks are copied to host slots, or computed again later.

        Several beams begin anew, with what is cached.
        """
        job.preempted += 1
        if job.search is not None or not job.requests[0].ready:
            self._leave(job)
            self.waiting.appendleft(job)
            return
        [request] = job.requests
        job.drafts, job.requests = [], []
        beyond = len(request.tokens) - len(job.texts[0])
        self.model.requests.rewind(request, max(0, beyond))
        job.suspended = self.model.cache.suspend(request)
        self.running.remove(job)
        self.suspended.appendleft(job)

    def _resume(self) -> None:
        """Let jobs that made way go on, with blocks to spare for what all compute next."""
        while self.suspended:
            job = self.suspended[0]
            parts = zip(_suspended(job).parts, self.model.cache.pools, strict=True)
            for part, pool in parts:
                chunk = -(-(self.model.step or 1) // part.block_tokens) + 1
                spare = chunk * (len(self.running) + 1) if self.running else 0
                if pool.free < len(part.held) + spare:
                    return
            try:
                request = self.model.cache.resume(_suspended(job), room=self.model.step)
            except NotReady:
                return
            except OutOfBlocks as error:
                self._require_patience(error)
                return
            job.suspended, job.requests = None, [request]
            self.running.append(self.suspended.popleft())

    def _require_patience(self, error: OutOfBlocks) -> None:
        """Raise the error if there is nothing to wait for: what was asked for never fits."""
        busy = self.running or self.model.cache.port.busy
        if not busy and not isinstance(error, BlocksBusy):
            raise error

    def _restart_lost(self) -> None:
        """A block did not come back from a tier: begin anew with what is cached."""
        for job in [job for job in self.running if any(one.lost for one in job.requests)]:
            self._leave(job)
            self.waiting.appendleft(job)

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        for request in job.requests:
            self.model.requests.release(request)
            self.model.requests.copied(request)  # those that were not made are not needed
        job.requests, job.drafts = [], []


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


def serve(model: Any, stack: str | Path, prompts: list[list[int]], **options: Any) -> list[Job]:
    """Serve all prompts at once, print what came from where, and close."""
    with PooledModel(model, stack, context=256, block_tokens=8, step=64) as pooled:
        engine = Engine(pooled)
        jobs = [engine.submit(prompt, 24, **options) for prompt in prompts]
        engine.run()
        stats = pooled.cache.stats()
    for number, job in enumerate(jobs):
        print(
            f"  request {number}: {len(job.prompt)} tokens, {job.cached} of them cached,"
            f" preempted {job.preempted} times, saved {job.passes_saved} passes:"
            f" {job.output[:6]} ..."
        )
    for name, counts in stats.items():
        kept = {k: v for k, v in counts.items() if v and k in ("evicted", "onboarded", "hits")}
        if kept:
            print(f"  {name}: {kept}")
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve six prompts twice.")
    parser.add_argument(
        "--model", help="load a model by directory or name (default: a tiny random model)"
    )
    parser.add_argument("--stack", help="use this YAML file (default: host memory and files)")
    parser.add_argument("--beams", type=int, default=1, help="search with this many beams")
    parser.add_argument(
        "--drafts", type=int, default=0, help="draft up to this many tokens at a time"
    )
    arguments = parser.parse_args()
    options = {"beams": arguments.beams, "drafts_max": arguments.drafts}
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
        print("six requests with the same prefix:")
        first = serve(model, stack, prompts, **options)
        print("the same requests after a restart:")
        again = serve(model, stack, prompts, **options)
    assert [job.output for job in first] == [job.output for job in again]
    print("the answers are the same")


if __name__ == "__main__":
    main()
