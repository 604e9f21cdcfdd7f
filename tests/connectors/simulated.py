"""vLLM's own scheduler, block pool and managers of groups over a model of a few numbers.

vLLM's decisions are real: blocks that leave a window, states that move, preemption, its own prefix
cache, hand-offs. A forward pass is simulated: each token first reads the blocks that its kind of
attention reads, and the test fails unless they hold the bytes of the earlier tokens. Then it writes
two numbers, which depend on its whole prefix, into each group's block. All groups share the same
bytes. The numbers also name the weights and the LoRA adapter that wrote them, or say that several
did. Blocks from the cache must come from the weights and the adapter in memory alone. Adapters are
read and evicted as by vLLM's own worker: ``loras``.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvladder.arena import Arena
from kvladder.gpu.copy.copier import Copier
from kvladder.gpu.copy.pages import Parts
from kvladder.notices import Notices
from tests.connectors.lazy import LazyCopier
from tests.connectors.loaded import FakeLoaded
from tests.connectors.loras import Loras, Server
from tests.connectors.mixes import MODELS, SECTION, WINDOW, vllm_configs

Numbers = npt.NDArray[np.int64]

STAMP = 1000
"""The step between the numbers written by successive weights."""
WEIGHTS = 3
"""The number of weights; an adapter adds its content times this to their number."""
MIXED = 99
"""Stands for several weights."""


class Rank:
    """One rank's memory and worker half, with tables as a worker keeps them."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        from kvladder.connectors.vllm.worker import WorkerHalf

        groups, blocks = simulation.groups, simulation.blocks
        page = max(tokens for _, tokens in groups) * 16
        raw = torch.full((blocks, page), 85, dtype=torch.uint8)
        self.raw = raw.numpy()
        words = raw.view(torch.int64)
        self.views: list[Numbers] = []
        layers: dict[str, Any] = {}
        for index, (kind, tokens) in enumerate(groups):
            part = words[:, : 3 if kind == "state" else 2 * tokens]
            self.views.append(part.numpy())
            layers[f"l{index}"] = [part[:, :1], part[:, 1:]] if kind == "state" else part
        self.copier: LazyCopier | None = None

        def make(parts: Parts, arena: Arena) -> Copier:
            self.copier = LazyCopier(parts, arena, random=simulation.random)
            return self.copier

        self.loras = Loras(simulation.adapters, simulation.adapters)
        self.models = FakeLoaded(b"0", loras=self.loras)
        self.half = WorkerHalf(
            simulation.vllm_config,
            simulation.kv_config,
            rank=rank,
            notices=Notices(lambda: 0.0),
            make_copier=make,
            make_loaded=self.models,
        )
        self.half.register(layers)


@dataclass
class Tracked:
    """The record of a request in the model runner."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int
    stated: int | None = None
    """Tokens after which its running states are; None before they are moved for the first time."""


class Simulation:
    """One engine: vLLM's scheduler, the connector, and ranks that compute with numbers."""

    def __init__(
        self,
        folder: Path,
        source: Mapping[str, Any],
        model: str,
        *,
        seed: int = 0,
        blocks: int = 120,
        budget: int = 32,
        ranks: int = 1,
        overlap: bool = False,
        interval: int | None = None,
        adapters: int = 2,
        late_hooks: bool = False,
        early: bool = False,
    ) -> None:
        """Ranks have room for ``adapters``, chosen for a step before ``late_hooks`` are called.

        ``early``: it writes to blocks before its workers begin a step, as model runner V2.
        """
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )

        self.random = Random(seed)
        self.adapters = adapters
        self._late_hooks = late_hooks
        self.groups, self.blocks = MODELS[model], blocks
        self._early = early
        self.vllm_config, self.kv_config = vllm_configs(
            folder, source, self.groups, blocks=blocks, budget=budget, ranks=ranks,
            overlap=overlap, interval=interval, adapters=adapters,
        )  # fmt: skip
        block_size, hash_size = resolve_kv_cache_block_sizes(self.kv_config, self.vllm_config)
        self.kv_config.hash_block_size = hash_size
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.ranks = [Rank(self, rank) for rank in range(ranks)]
        self.server = Server(folder, [rank.loras for rank in self.ranks])
        self.scheduler = self._scheduler(block_size, hash_size)
        self.connector: Any = self.scheduler.connector
        self.connector.notices = self  # an error that its edges swallow fails the test
        described = {(0, rank): one.half.describe() for rank, one in enumerate(self.ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(described)
        self.half = self.connector.scheduler.running
        self._overlap = overlap
        self._launched: deque[tuple[Any, Any]] = deque()
        self._alive: dict[str, Tracked] = {}
        self._salts: dict[str, str | None] = {}
        self._loras: dict[str, Any] = {}
        self._contents: dict[int, int] = {}
        """The content of each adapter when it was last in memory, by number."""
        self._reported: dict[str, int] = {}
        self._count = 0
        self.answers: dict[str, list[int]] = {}
        self.reads = self.steps = self.failures = 0
        self.weights = 0
        """The number of the weights in memory."""
        self._filled: dict[tuple[int, int], int] = {}
        """The required writer of each block being filled from the cache, by group and block."""
        self.hits = 0
        """Tokens that came from the connector, as vLLM counts them."""

    def _scheduler(self, block_size: int, hash_size: int) -> Any:
        """Make vLLM's scheduler, which makes its half of the connector."""
        from vllm.v1.structured_output import StructuredOutputManager

        with pytest.MonkeyPatch.context() as patch:  # a configuration refuses it without Triton
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(self._early)))
            return self.vllm_config.scheduler_config.get_scheduler_cls()(
                vllm_config=self.vllm_config,
                kv_cache_config=self.kv_config,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                block_size=block_size,
                hash_block_size=hash_size,
                log_stats=True,
            )

    def say(self, kind: str, message: str) -> None:
        """Take a notice of the connector: of a hook that failed, or of something harmless."""
        logging.getLogger(__name__).warning("%s", message)
        if kind in dir(self.connector):
            raise AssertionError(message)

    # ---- actions of a user

    def add(
        self,
        tokens: Sequence[int],
        *,
        length: int = 1,
        priority: int = 0,
        salt: str | None = None,
        recompute: bool = False,
        adapter: str | None = None,
    ) -> str:
        """A request for ``length`` tokens after ``tokens``; ``adapter`` is the name of one."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        sampling.skip_reading_prefix_cache = recompute
        request = Request(
            request_id=f"r{self._count}",
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(self._count),
            priority=priority,
            cache_salt=salt,
            lora_request=None if adapter is None else self.server.served[adapter],
            block_hasher=self._hasher,
        )
        self._loras[request.request_id] = request.lora_request
        self._salts[request.request_id] = salt
        self.scheduler.add_request(request)
        return f"r{self._count}"

    @property
    def requests(self) -> dict[str, Any]:
        """Unfinished requests by id."""
        over = self._over
        return {i: r for i, r in self.scheduler.requests.items() if not over(r.status)}

    def _over(self, status: Any) -> bool:
        return bool(type(status).is_finished(status))

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool = False, connector: bool = False) -> None:
        """Drop vLLM's prefix cache, every running request given up for now."""
        with suppress(RuntimeError):  # vLLM refuses this while blocks are being loaded, and says so
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        if connector:
            assert self.scheduler.reset_connector_cache()

    def reload(self, weights: int, *, noticed: bool) -> None:
        """Put other weights in memory; ``noticed`` by the worker halves."""
        self.weights = weights
        for rank in self.ranks:
            rank.models.load(b"%d" % weights, noticed=noticed)

    def run(self, steps_max: int = 3000) -> None:
        """Step until every request has ended and all copies are done."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests() and not self._launched and not self.half.busy:
                return
            self.step()
        raise AssertionError(f"not over after {steps_max} steps: {self.scheduler.requests}")

    # ---- one step

    def step(self) -> None:
        """Schedule, execute, and process the output of this step or the one before."""
        self.steps += 1
        output = self.scheduler.schedule()
        self._launched.append((output, self._execute(output)))
        idle = not output.total_num_scheduled_tokens
        while len(self._launched) > (1 if self._overlap and not idle else 0):
            self._update(*self._launched.popleft())
        self.half.check()

    def _update(self, output: Any, result: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.connector_prefix_cache_stats is not None:
                self.hits += stats.connector_prefix_cache_stats.hits

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        step = output.kv_connector_metadata
        if not self._early:
            self._begin(step, output)
        self._follow(output)
        self._prepare(output)
        if self._early:
            self._begin(step, output)
        sampled = [self._compute(i, n) for i, n in output.num_scheduled_tokens.items()]
        received: list[set[str]] = []
        failed, bad, report = set[str](), set[int](), None
        self._filled.update(
            ((load.job.group, block), self._writer(load.request_id))
            for load in step.loads
            for block in load.job.blocks
        )
        for rank in self.ranks:
            rank.half.load(step)
            rank.half.save(step)
            received.append(rank.half.received())
            failed |= rank.half.failed()
            bad |= rank.half.bad_blocks()
            self.failures += bool(failed or bad)
            one = rank.half.report()
            if one is not None:
                report = one if report is None else report.aggregate(one)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: n for n, i in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=self._by_all(received),
                failed_recving=failed,
                invalid_block_ids=bad,
                kv_connector_worker_meta=report,
            ),
        )

    def _writer(self, request_id: str) -> int:
        """Return the weights and the adapter that compute a request now."""
        lora = self._loras[request_id]
        if lora is None:
            return self.weights
        for rank in self.ranks:
            self._contents |= rank.loras.contents()
        return self.weights + WEIGHTS * self._contents[lora.lora_int_id]

    def _begin(self, step: Any, output: Any) -> None:
        wanted = {self._loras[i] for i in output.num_scheduled_tokens} - {None}
        for rank in self.ranks:
            if self._late_hooks:
                rank.loras.set_active_adapters(wanted, None)
            rank.half.begin(step)
            self._contents |= rank.loras.contents()
            if wanted and not self._late_hooks:
                rank.loras.set_active_adapters(wanted, None)

    def _prepare(self, output: Any) -> None:
        """Perform the writes of a step that precede its forward pass."""
        for rank in self.ranks:
            rank.raw[list(output.new_block_ids_to_zero or ())] = 0
            for copy in output.kv_cache_block_copies or ():
                rank.raw[copy.dst_block_id] = rank.raw[copy.src_block_id]
        for copy in output.kv_cache_block_copies or ():
            for index in range(len(self.groups)):
                self._filled.pop((index, copy.dst_block_id), None)
        for request_id, count in output.num_scheduled_tokens.items():
            sequence = self._alive[request_id]
            for index, (kind, tokens) in enumerate(self.groups):
                if kind == "state":
                    self._move_state(sequence, index, sequence.computed + count, tokens)

    def _move_state(self, sequence: Tracked, index: int, end: int, tokens: int) -> None:
        """Copy the running state to the block in which the step ends, as vLLM does."""
        start = sequence.computed if sequence.stated is None else sequence.stated
        table = sequence.tables[index]
        target, source = table[(end - 1) // tokens], table[(start - 1) // tokens]
        if sequence.computed and target != source:
            assert target, f"step {self.steps}: null block"
            for rank in self.ranks:
                rank.views[index][target] = rank.views[index][source]

    def _by_all(self, received: list[set[str]]) -> set[str]:
        """Return requests that all ranks have reported, as vLLM's aggregator does."""
        reported = self._reported
        for one in received:
            for request_id in one:
                reported[request_id] = reported.get(request_id, 0) + 1
        complete = {i for i, count in reported.items() if count == len(self.ranks)}
        for request_id in complete:
            del reported[request_id]
        return complete

    def _follow(self, output: Any) -> None:
        """Keep the tables as a worker does: grown, or replaced when a request resumes."""
        for request_id in output.finished_req_ids:
            self._alive.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tables = [list(table) for table in new.block_ids]
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self._alive[new.req_id] = Tracked(tokens, tables, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, fresh, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sequence = self._alive[request_id]
            sequence.computed = computed
            if request_id in cached.resumed_req_ids:
                sequence.tables = [list(table) for table in fresh]
                sequence.stated = None
                request = self.scheduler.requests[request_id]
                sequence.tokens = [*request.all_token_ids]
            elif fresh is not None:
                for table, more in zip(sequence.tables, fresh, strict=True):
                    table += more

    def _content(self, sequence: Tracked, salt: str | None, end: int) -> Numbers:
        """Two numbers for each of the first ``end`` tokens."""
        digest, found = hashlib.blake2b(repr(salt).encode(), digest_size=16), []
        for token in sequence.tokens[:end]:
            digest.update(token.to_bytes(4))
            found.append(np.frombuffer(digest.digest(), dtype=np.int64))
        return np.array(found, dtype=np.int64).reshape(end, 2)

    def _compute(self, request_id: str, count: int) -> list[int]:
        """Read the earlier tokens and write new ones; return the next token once all are there."""
        sequence = self._alive[request_id]
        start, end = sequence.computed, sequence.computed + count
        content = self._content(sequence, self._salts[request_id], end)
        assert len(content) == end, "tokens are computed that nobody said"
        said = int(content[-1, 0]) % 50
        writer = self._writer(request_id)
        who = {writer}
        for index in range(len(self.groups)):
            for rank in self.ranks:
                who |= self._read(rank, request_id, index, content, start)
        content[start:] += STAMP * (writer if who == {writer} else MIXED)
        for index, (kind, tokens) in enumerate(self.groups):
            table = np.array(sequence.tables[index])
            for rank in self.ranks:
                view = rank.views[index]
                if kind == "state":
                    self._write_state(view, sequence, index, content, end)
                    continue
                at = np.arange(start, end)
                cells = view.reshape(self.blocks, tokens, 2)
                cells[table[at // tokens], at % tokens] = content[start:end] + index
            for block in table[start // tokens : -(-end // tokens)]:
                self._filled.pop((index, int(block)), None)
        sequence.computed = sequence.stated = end
        if end < len(sequence.tokens):
            return []
        sequence.tokens.append(said)
        self.answers.setdefault(request_id, []).append(sequence.tokens[-1])
        return sequence.tokens[-1:]

    def _read(
        self, rank: Rank, request_id: str, index: int, content: Numbers, start: int
    ) -> set[int]:
        """Read the first ``start`` tokens as a group does; return the weights that wrote them."""
        kind, tokens = self.groups[index]
        sequence = self._alive[request_id]
        where = f"step {self.steps}: {request_id} at {start} reads another's KV: {kind} {index}"
        table = np.array(sequence.tables[index])
        if kind == "state":
            if not start:
                return set()
            self.reads += 1
            block = table[((start if sequence.stated is None else sequence.stated) - 1) // tokens]
            assert block, f"{where}: null block"
            read = rank.views[index][block, :3]
            assert read[2] == start, where
            stamps, blocks = read[:2] - content[start - 1] - index, [block]
        else:
            first = 0
            if kind == "window":
                first = max(0, start - WINDOW + 1)
            elif kind == "local":
                first = start // SECTION * SECTION
            at = np.arange(first, start)
            self.reads += len(at)
            blocks = table[at // tokens]
            assert blocks.all(), f"{where}: null block"
            cells = rank.views[index].reshape(self.blocks, tokens, 2)
            stamps = cells[blocks, at % tokens] - content[first:start] - index
        by_token = stamps.reshape(-1, 2)
        assert (by_token[:, 0] == by_token[:, 1]).all(), where
        assert not (by_token % STAMP).any(), where
        who = by_token[:, 0] // STAMP
        assert ((who >= 0) & (who <= MIXED)).all(), where
        for block, wrote in zip(blocks, who, strict=True):
            expected = self._filled.get((index, int(block)), wrote)
            assert wrote == expected, f"{where}: of weights {wrote}, not {expected}"
        return {int(one) for one in who}

    def _write_state(
        self, view: Numbers, sequence: Tracked, index: int, content: Numbers, end: int
    ) -> None:
        """Move the running state to the block of the last token, as vLLM does, and change it."""
        block = sequence.tables[index][(end - 1) // self.groups[index][1]]
        assert block, f"step {self.steps}: null block"
        view[block, :3] = [*(content[end - 1] + index), end]

    def close(self) -> None:
        """End it as vLLM does, the workers first; everything must have been given back."""
        for rank in self.ranks:
            rank.half.close()
        manager = self.half.connector.manager
        self.half.settle()
        manager.check()
        self.scheduler.shutdown()
        assert self.half._answers.pins == 0
        manager.check()
        assert manager.arena.free == manager.arena.slots
