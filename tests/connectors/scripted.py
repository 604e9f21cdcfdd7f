"""A small engine that treats both halves as vLLM does, and checks every byte it reads.

It has no prefix cache of its own, reuses blocks at once and in any order, computes prompts in
parts, preempts, and aborts requests in every state. A forward pass must read the bytes that the
earlier tokens wrote: each token writes a number that depends on its whole prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from kvladder.arena import Arena
from kvladder.config.stack import load_config
from kvladder.gpu.copy.copier import Copier
from kvladder.gpu.copy.pages import Parts
from kvladder.notices import Notices
from tests.connectors.lazy import LazyCopier
from tests.connectors.loaded import FakeLoaded

TOKENS = 4
LAYERS = 2
NULL = 0


class Request:
    """The part of vLLM's request that the connector reads."""

    def __init__(self, request_id: str, tokens: Sequence[int]) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.skip_reading_prefix_cache = False
        self.lora_request: Any = None
        self.cache_salt: str | None = None
        self.mm_features: list[Any] = []
        self.prompt_embeds: Any = None
        self.kv_transfer_params: Mapping[str, Any] | None = None
        self.kv_hints: Any = None
        self.trace_headers: Mapping[str, str] | None = None
        self.hash()

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash(self) -> None:
        while (len(self.block_hashes) + 1) * TOKENS <= len(self.tokens):
            end = (len(self.block_hashes) + 1) * TOKENS
            self.block_hashes.append(hashlib.sha256(repr(self.tokens[:end]).encode()).digest())

    def content(self, position: int) -> int:
        """Return the number that the forward pass writes for a token."""
        return int.from_bytes(
            hashlib.sha256(repr(self.tokens[: position + 1]).encode()).digest()[:6]
        )


@dataclass
class Entry:
    """A request in the engine."""

    request: Request
    length: int
    """Tokens after which it is over."""
    table: list[int] = field(default_factory=list[int])
    state: str = "waiting"
    new: bool = True
    resumed: bool = False
    fresh: list[int] = field(default_factory=list[int])
    """Blocks that it got since the last step that it was scheduled in."""
    arrivals: int = 0
    """Ranks that have reported the end of its load."""


def kv_spec(kind: str, **attributes: Any) -> Any:
    """Return a stand-in for one of vLLM's kinds of KV cache, which are recognized by name."""
    return type(kind, (), {"block_size": TOKENS, **attributes})()


def configs(*, hash_name: str = "sha256", ranks: int = 1) -> tuple[Any, Any]:
    """Stand-ins for vLLM's VllmConfig and KVCacheConfig."""
    page = TOKENS * 8
    spec = kv_spec("FullAttentionSpec", page_size_bytes=page, unpadded_page_size_bytes=page)
    group = SimpleNamespace(layer_names=[f"l{i}" for i in range(LAYERS)], kv_cache_spec=spec)
    cache = SimpleNamespace(prefix_caching_hash_algo=hash_name, cache_dtype="auto")
    model = SimpleNamespace(
        model="tiny", dtype="int64", quantization=None, hf_config=SimpleNamespace(to_dict=dict)
    )
    parallel = type("ParallelConfig", (SimpleNamespace,), {})(tensor_parallel_size=ranks)
    vllm_config = type("VllmConfig", (SimpleNamespace,), {})(
        model_config=model,
        cache_config=cache,
        load_config=SimpleNamespace(load_format="dummy"),
        parallel_config=parallel,
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        use_v2_model_runner=False,
    )
    return vllm_config, SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC")


class Engine:
    """One engine with its two halves (of ``ranks`` workers each has the same tensors)."""

    def __init__(
        self,
        source: Mapping[str, Any],
        *,
        blocks: int = 40,
        seed: int = 0,
        load: Any = "async",
        save_decode: bool = True,
        ranks: int = 1,
        on_reset: Any = "forget",
        failing: Exception | None = None,
        role: str = "kv_both",
        handed_over: bool = False,
        make_copier: Callable[[Parts, Arena], Copier] | None = None,
        pool: object = None,
    ) -> None:
        from kvladder.connectors.vllm import worker as vllm_worker
        from kvladder.connectors.vllm.options import VllmOptions
        from kvladder.connectors.vllm.scheduler import SchedulerHalf

        self.random = Random(seed)
        self.way = load
        self.expects: Callable[[Exception], bool] = lambda _: False
        """Whether the test expects an error while a step is built."""
        vllm_config, kv_config = configs(ranks=ranks)
        vllm_config.kv_transfer_config.kv_role = role
        kv_config.num_blocks = blocks
        self.notices = Notices(lambda: 0.0)
        self.copiers: list[LazyCopier] = []

        def make(parts: Parts, arena: Arena) -> Copier:
            copier = LazyCopier(parts, arena, random=self.random)
            self.copiers.append(copier)
            return copier

        self.kv = [
            torch.zeros(LAYERS, blocks, 1, TOKENS, 1, dtype=torch.int64) for _ in range(ranks)
        ]
        self.loaded_models = [FakeLoaded(failing=failing) for _ in range(ranks)]
        self.workers = []
        for rank, kv in enumerate(self.kv):
            worker = vllm_worker.WorkerHalf(
                vllm_config,
                kv_config,
                rank=rank,
                notices=self.notices,
                make_copier=make if make_copier is None else make_copier,
                make_loaded=self.loaded_models[rank],
            )
            worker.register({f"l{i}": kv[i] for i in range(LAYERS)})
            worker._registers = make_copier is not None
            self.workers.append(worker)
        options = VllmOptions(load=self.way, save_decode=save_decode, on_reset=on_reset)
        self.scheduler = SchedulerHalf(
            vllm_config,
            kv_config,
            options=options,
            config=load_config(source),
            notices=self.notices,
        )
        described = {rank: worker.describe() for rank, worker in enumerate(self.workers)}
        self.scheduler.bind(pool)
        self.half = self.scheduler.start(described, handed_over=handed_over)
        self.free = list(range(1, blocks))
        self.entries: dict[str, Entry] = {}
        self.reports: dict[str, dict[str, Any] | None] = {}
        """What the answer of each request says of its prompt."""
        self.loaded = 0
        self.read = 0
        self.steps = 0

    # ---- actions of a user

    def add(
        self,
        tokens: Sequence[int],
        *,
        length: int | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Request:
        request = Request(f"r{len(self.entries)}-{self.steps}", tokens)
        request.kv_transfer_params = kv_transfer_params
        request.trace_headers = trace_headers
        self.arrive(request, length)
        return request

    def arrive(self, request: Request, length: int | None = None) -> None:
        self.entries[request.request_id] = Entry(request, length or len(request.tokens) + 1)
        self.half.arrived(request)

    def abort(self, request_id: str) -> None:
        entry = self.entries[request_id]
        self._finished(entry.request)
        if entry.state == "loading":
            entry.state = "aborted"  # its blocks are still being written to
        else:
            self._drop(entry)

    def _finished(self, request: Request) -> None:
        self.reports[request.request_id] = self.half.finished(request)

    def preempt(self, request_id: str) -> None:
        self._give_way(self.entries[request_id])

    def _give_way(self, entry: Entry) -> None:
        assert entry.state in {"running", "waiting"}
        self._free(entry)
        entry.request.num_computed_tokens = 0
        entry.state, entry.resumed = "waiting", not entry.new

    def run(self, steps_max: int = 2000) -> None:
        """Step until every request has ended and all copies are done."""
        for _ in range(steps_max):
            if not self.entries and not self.half.busy:
                return
            self.step()
        raise AssertionError(f"not over after {steps_max} steps: {self.entries}")

    # ---- one step

    def step(self, budget: int = 24) -> Any:
        """Schedule, execute, and process the output."""
        self.steps += 1
        scheduled: dict[str, int] = {}
        for entry in self.entries.values():
            if entry.state == "running" and budget > 0:
                budget -= self._schedule(entry, scheduled, budget)
        for entry in list(self.entries.values()):
            if entry.state == "waiting" and budget > 0:
                budget -= self._admit(entry, scheduled, budget)
        step = self._built(scheduled)
        for worker in self.workers:
            worker.begin(step)
        by_layer, waits = self.way == "layers", any(load.sync for load in step.loads)
        if waits:
            self._load(step, by_layer=by_layer)
        garbled = self._forward(scheduled)
        if not waits:
            self._load(step, by_layer=False)
        self._each("save", step)
        self._require_bad(garbled)
        bad = set[int]().union(*(worker.bad_blocks() for worker in self.workers))
        received = [worker.received() for worker in self.workers]
        bad |= set[int]().union(*(worker.bad_blocks() for worker in self.workers))
        self._take(scheduled, received, bad)
        self.half.unfilled(bad)
        reports = [r for r in (worker.report() for worker in self.workers) if r is not None]
        if reports:
            whole = reports[0]
            for other in reports[1:]:
                whole = whole.aggregate(other)
            self.half.report(whole)
        self.half.check()
        return step

    def _built(self, scheduled: dict[str, int]) -> Any:
        """Build a step as the connector does, which outlives an error that the test expects."""
        try:
            return self.half.build(self._output(scheduled))
        except RuntimeError as error:
            if not self.expects(error):
                raise
            return self.half.failed()

    def _each(self, name: str, step: Any) -> None:
        for worker in self.workers:
            getattr(worker, name)(step)

    def _load(self, step: Any, *, by_layer: bool) -> None:
        for worker in self.workers:
            worker.load(step, by_layer=by_layer)

    def _require_bad(self, garbled: Sequence[str]) -> None:
        """Check that a request that read another token's KV was told that its blocks are bad."""
        bad = set[int]().union(*(worker._bad_blocks for worker in self.workers))
        for request_id in garbled:
            assert bad & set(self.entries[request_id].table), (
                f"step {self.steps}: {request_id} reads another token's KV"
            )

    def _room(self, entry: Entry, tokens: int) -> bool:
        """Give ``entry`` blocks for its first ``tokens`` tokens, all or none."""
        wanted = -(-tokens // TOKENS) - len(entry.table)
        if wanted > len(self.free):
            return False
        for _ in range(wanted):
            block = self.free.pop(self.random.randrange(len(self.free)))
            entry.table.append(block)
            entry.fresh.append(block)
        return True

    def _schedule(self, entry: Entry, scheduled: dict[str, int], budget: int) -> int:
        """Let a running request continue as far as there is room, preempting younger ones."""
        request = entry.request
        if request.num_computed_tokens == len(entry.table) * TOKENS and not self.free:
            self._make_room(entry, scheduled)
            if not self.free:
                return 0
        room = (len(entry.table) + len(self.free)) * TOKENS - request.num_computed_tokens
        count = min(budget, request.num_tokens - request.num_computed_tokens, room)
        assert self._room(entry, request.num_computed_tokens + count)
        scheduled[request.request_id] = count
        return count

    def _make_room(self, entry: Entry, scheduled: dict[str, int]) -> None:
        """Preempt the youngest other request that holds blocks, unless it is loading."""
        for victim in reversed(self.entries.values()):
            if victim.table and victim is not entry and victim.state in {"running", "waiting"}:
                scheduled.pop(victim.request.request_id, None)
                self._give_way(victim)
                return

    def _admit(self, entry: Entry, scheduled: dict[str, int], budget: int) -> int:
        """Let a waiting request run or load once there is room for all of it."""
        request = entry.request
        external, is_async = 0, False
        if request.num_computed_tokens == 0:
            found, is_async = self.half.ask(request, 0)
            if found is None:
                return 0
            assert self.way == "layers" or is_async == (found > 0 and self.way == "async")
            external = found
        computed = request.num_computed_tokens + external
        count = 0 if is_async else min(budget, request.num_tokens - computed)
        if not self._room(entry, computed + count):
            if entry.table and not any(e.state == "running" for e in self.entries.values()):
                self._make_room(entry, scheduled)
            return 0
        self.half.allocated(request, [list(entry.table)], external)
        request.num_computed_tokens = computed
        self.loaded += external // TOKENS
        entry.state = "loading" if is_async else "running"
        if count:
            scheduled[request.request_id] = count
        return count

    def _output(self, scheduled: dict[str, int]) -> Any:
        new: list[Any] = []
        cached = SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        )
        for request_id in scheduled:
            entry = self.entries[request_id]
            computed = entry.request.num_computed_tokens
            if entry.new:
                one = SimpleNamespace(req_id=request_id, num_computed_tokens=computed)
                one.block_ids = [list(entry.table)]
                new.append(one)
            else:
                whole = entry.table if entry.resumed else entry.fresh
                cached.req_ids.append(request_id)
                cached.new_block_ids.append((list(whole),) if whole else None)
                cached.num_computed_tokens.append(computed)
                if entry.resumed:
                    cached.resumed_req_ids.add(request_id)
            entry.new = entry.resumed = False
            entry.fresh.clear()
        tables = {request_id: (list(self.entries[request_id].table),) for request_id in scheduled}
        return SimpleNamespace(
            num_scheduled_tokens=dict(scheduled),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            new_block_ids_to_zero=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )

    def _forward(self, scheduled: dict[str, int]) -> list[str]:
        """Read all earlier tokens by layer and write new ones; return requests with garbage."""
        garbled: set[str] = set()
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.await_layer(f"l{layer}")
            garbled |= {one for one in scheduled if not self._reads_well(one, layer)}
        for request_id, count in scheduled.items():
            entry = self.entries[request_id]
            request, start = entry.request, entry.request.num_computed_tokens
            for position in range(start, start + count):
                value = -1 if request_id in garbled else request.content(position)
                for kv in self.kv:
                    kv[:, entry.table[position // TOKENS], 0, position % TOKENS, 0] = value
        return [*garbled]

    def _reads_well(self, request_id: str, layer: int) -> bool:
        entry = self.entries[request_id]
        request = entry.request
        computed = request.num_computed_tokens
        wanted = torch.tensor([request.content(position) for position in range(computed)])
        self.read += computed
        blocks = entry.table[: -(-computed // TOKENS)]
        found = (kv[layer, blocks, 0, :, 0].flatten()[:computed] for kv in self.kv)
        return all(torch.equal(one, wanted) for one in found)

    def _take(self, scheduled: dict[str, int], received: Sequence[set[str]], bad: set[int]) -> None:
        for request_id, count in scheduled.items():
            entry = self.entries[request_id]
            request = entry.request
            request.num_computed_tokens += count
            failed = [i for i, block in enumerate(entry.table) if block in bad]
            if failed:
                request.num_computed_tokens = failed[0] * TOKENS
            elif request.num_computed_tokens == request.num_tokens:
                request.tokens.append(self.random.randrange(50))
                request.hash()
                if request.num_tokens >= entry.length:
                    self._finished(request)
                    self._drop(entry)
        for request_id in [request_id for rank in received for request_id in rank]:
            entry = self.entries[request_id]
            failed = [i for i, block in enumerate(entry.table) if block in bad]
            if failed:
                computed = min(entry.request.num_computed_tokens, failed[0] * TOKENS)
                entry.request.num_computed_tokens = computed
            entry.arrivals += 1
            if entry.arrivals == len(self.workers):
                self._received(entry)

    def _received(self, entry: Entry) -> None:
        entry.arrivals = 0
        if entry.state == "aborted":
            self._drop(entry)
            return
        assert entry.state == "loading"
        entry.state = "waiting"
        if entry.request.num_computed_tokens == 0:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        self.free += entry.table
        entry.table.clear()
        entry.fresh.clear()

    def _drop(self, entry: Entry) -> None:
        self._free(entry)
        del self.entries[entry.request.request_id]

    def close(self) -> None:
        """End it as vLLM does, the workers first."""
        for worker in self.workers:
            worker.close()
        self.half.close()
