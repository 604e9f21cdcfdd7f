"""The scheduler half of the vLLM connector: owns the cache, decides what is loaded and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from kvladder.config import StackConfig
from kvladder.connectors.vllm_checks import block_tokens
from kvladder.connectors.vllm_options import Options
from kvladder.connectors.vllm_requests import Adapters, RequestState
from kvladder.connectors.vllm_start import Assembled, assemble
from kvladder.connectors.vllm_step import Load, RankDescription, Report, Step, StepConnector
from kvladder.errors import ConfigError
from kvladder.gpu.copy import CopyJob, JobId
from kvladder.keys import BlockKey
from kvladder.metrics import Stats
from kvladder.notices import Notices

EARLY_SHARE = 0.5
"""How much of the arena may be pinned before a request that arrives has to wait its turn."""


class SchedulerHalf:
    """One per engine, called by its thread. Nothing here waits for a tier, but ``close``."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        options: Options,
        config: StackConfig,
        notices: Notices,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._config = config
        self._notices = notices
        self._tokens = block_tokens(kv_cache_config)
        self._adapters = Adapters()
        self._states: dict[str, RequestState] = {}
        self._loads: dict[JobId, Load] = {}
        self._lost: list[Load] = []
        self._lost_ids = count(-1, -1)
        self._pins = 0
        self._awaited = False
        self._pool: Any = None
        self._parts: Assembled | None = None
        self._connector: StepConnector | None = None
        self._copied = {"offload_bytes": 0, "offload_s": 0.0, "onboard_bytes": 0, "onboard_s": 0.0}

    # ---- at start

    def start(self, ranks: Mapping[int, RankDescription]) -> None:
        """Open the cache, now that every rank has described its KV tensors.

        Raises
        ------
        ConfigError
            It cannot be had; says where, what and what instead.
        """
        parts = assemble(ranks, self._vllm_config, self._kv_cache_config, self._config)
        self._parts = parts
        self._connector = StepConnector(parts.manager, ranks=len(ranks))

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to see what it holds itself."""
        self._pool = block_pool

    @property
    def connector(self) -> StepConnector:
        """The loads and saves; there once all workers described their KV tensors."""
        if self._connector is None:
            raise ConfigError(
                "this vLLM has not handed over what its workers described",
                hint="use vLLM 0.32 or later",
            )
        return self._connector

    # ---- a request's way

    def arrived(self, request: Any) -> None:
        """A request is new: begin to bring up what the cache has for it."""
        self.settle()
        state = RequestState(request)
        self._states[request.request_id] = state
        try:
            state.adapter = self._adapters.digest(getattr(request, "lora_request", None))
        except ConfigError as error:
            self._notices.say("adapter", f"not cached: {error}")
            state.apart = True
        manager = self.connector.manager
        if state.apart or request.skip_reading_prefix_cache:
            return
        if self._pins >= EARLY_SHARE * manager.arena.slots:
            return
        first = self._held_by_vllm(request)
        keys = state.keys(first, self._loadable(request))
        found = manager.lookup(keys).total
        if found:
            self._hold(state, first, keys[:found])

    def _held_by_vllm(self, request: Any) -> int:
        """How many of a request's leading blocks are in vLLM's own prefix cache now."""
        find = getattr(self._pool, "get_cached_block", None)
        if find is None:
            return 0
        end = self._loadable(request)
        for index, block_hash in enumerate(request.block_hashes[:end]):
            if not find(block_hash, [0]):
                return index
        return min(end, len(request.block_hashes))

    def _loadable(self, request: Any) -> int:
        """How many of its blocks may come from the cache: one token is always computed."""
        tokens: int = request.num_tokens
        return (tokens - 1) // self._tokens

    def ask(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed`` the cache has; None: ask again in the next step.

        Asked in every step in which the request could run, so the answer is kept.
        """
        state = self._states.get(request.request_id)
        if state is None or state.computes or state.apart or request.skip_reading_prefix_cache:
            return 0, False
        own, rest = divmod(computed, self._tokens)
        if rest:
            return 0, False
        if state.loading is not None:
            return None, False
        if state.answer is None or state.answer[0] != own:
            found = self._find(state, own)
            if found is None:
                self._awaited = True
                return None, False
            state.answer = (own, found)
        blocks = state.answer[1]
        return blocks * self._tokens, blocks > 0 and self._options.load == "async"

    def _find(self, state: RequestState, own: int) -> int | None:
        """How many blocks after the first ``own`` the cache has in host slots; None: not yet."""
        end = self._loadable(state.request)
        for _ in range(2):  # what was held early may begin or end in the wrong place
            if state.match is None or state.first > own:
                keys = state.keys(own, end)
                if not keys:
                    return 0
                self._hold(state, own, keys)
            match = state.match
            assert match is not None
            if not match.done:
                return None
            self._pins += match.blocks - state.pins
            state.pins = match.blocks
            found = min(state.first + match.blocks, end) - own
            if found > 0:
                return found
            begun_here = state.first == own
            self._let_go(state)
            if begun_here:
                break
        return 0

    def _hold(self, state: RequestState, first: int, keys: Sequence[BlockKey]) -> None:
        self._let_go(state)
        state.match = self.connector.match(keys)
        state.first = first
        state.pins = len(keys)
        self._pins += len(keys)

    def _let_go(self, state: RequestState) -> None:
        if state.match is not None:
            self.connector.release(state.match)
            state.match = None
        self._pins -= state.pins
        state.pins = 0

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """A request has got its blocks from vLLM; ``external`` of its tokens are to be loaded.

        ``blocks`` is the request's whole table. Called again with 0 once a load has ended.
        """
        state = self._states.get(request.request_id)
        if state is None:
            return
        answer, state.answer = state.answer, None
        if answer is not None and answer[0]:
            self.connector.manager.touch(state.keys(0, answer[0]))
        if not external:
            self._let_go(state)
            return
        own = 0 if answer is None else answer[0]
        targets = tuple(blocks[own : own + external // self._tokens])
        is_sync = self._options.load == "sync"
        try:
            self._load(state, own, targets, sync=is_sync)
        except Exception:  # vLLM counts on these blocks by now: tell it that they are not there
            state.computes = True
            job = CopyJob(JobId(next(self._lost_ids)), "onboard", targets, ())  # fails: no slots
            self._lost.append(Load(job, request.request_id, is_sync))
            raise

    def _load(self, state: RequestState, own: int, targets: tuple[int, ...], *, sync: bool) -> None:
        match, first = state.match, own - state.first
        assert match is not None
        state.sources = match.sources[first : first + len(targets)]
        state.match = None
        self._let_go(state)
        state.loading = self.connector.load(match, targets, first=first)
        job = CopyJob(state.loading, "onboard", targets, ())
        self._loads[state.loading] = Load(job, state.request.request_id, sync)

    def sources(self, request: Any) -> list[str]:
        """The types of the levels that the blocks of a request's last load came from."""
        state = self._states.get(request.request_id)
        kinds = {self._config.host.name: "host"}
        kinds.update((level.name, level.type) for level in self._config.levels)
        return [] if state is None else [kinds.get(name, "") for name in state.sources]

    def finished(self, request: Any) -> None:
        """A request is over, or aborted; what is being copied for it ends by itself."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._let_go(state)
            if state.saved:  # it was saved head first: now its tail is the first to go
                self.connector.manager.touch(state.keys(0, state.saved))

    # ---- a step

    def build(self, output: Any) -> Step:
        """What the workers have to do in the step that vLLM has just scheduled."""
        try:
            return self._build(output)
        except BaseException:
            self._withdraw()
            raise

    def _build(self, output: Any) -> Step:
        connector = self.connector
        step = Step()
        if connector.saving:
            step.fence = connector.reading(self._written(output))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and not state.apart:
                self._save(state, output, state.request.num_computed_tokens + scheduled)
        step.loads, self._lost = self._lost, []
        for job in connector.take():
            if job.direction == "offload":
                step.saves.append(job)
            else:
                step.loads.append(replace(self._loads[job.id], job=job))
        step.idle = not output.num_scheduled_tokens and (self._awaited or bool(self._loads))
        self._awaited = False
        if step.loads or step.saves:
            assert self._parts is not None
            step.attach = self._parts.attach
        return step

    def _withdraw(self) -> None:
        """No step could be made: its saves would come too late, its loads go with the next one."""
        for job in self.connector.take():
            if job.direction == "offload":
                self.connector.give_up(job.id)
            else:
                self._lost.append(replace(self._loads[job.id], job=job))

    def _written(self, output: Any) -> Iterator[int]:
        """Blocks that the step may write to and no step before wrote to for the same request."""
        for new in output.scheduled_new_reqs:
            yield from new.block_ids[0][new.num_computed_tokens // self._tokens :]
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks:
                resumed = request_id in cached.resumed_req_ids  # then it is the whole table
                yield from blocks[0][computed // self._tokens if resumed else 0 :]
        for load in self._loads.values():
            yield from load.job.blocks
        yield from output.new_block_ids_to_zero or ()
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            yield copy.dst_block_id

    def _save(self, state: RequestState, output: Any, computed: int) -> None:
        """Save the blocks that are full once ``computed`` tokens are."""
        if not self._options.save_decode:
            computed = min(computed, state.request.num_prompt_tokens)
        full = min(len(state.request.block_hashes), computed // self._tokens)
        if full <= state.saved:
            return
        start, state.saved = state.saved, full
        table = output.kv_connector_block_state.get_block_ids(state.request.request_id)
        blocks = table[0][start:full]
        if 0 in blocks:  # vLLM's null block: nothing is kept from there on
            blocks = blocks[: blocks.index(0)]
        self.connector.save(state.keys(start, start + len(blocks)), blocks)

    def report(self, report: Report) -> None:
        """Take in which copies ended."""
        connector = self.connector
        connector.report(report)
        for finished in connector.poll():
            load = self._loads.pop(finished.id, None)
            name = "offload" if load is None else "onboard"
            self._copied[f"{name}_bytes"] += finished.bytes
            self._copied[f"{name}_s"] += finished.seconds
            state = None if load is None else self._states.get(load.request_id)
            if state is not None and state.loading == finished.id:
                state.loading = None
                if not finished.ok:
                    state.computes = True
                    state.saved = 0

    def settle(self) -> None:
        """Take in saves that ended on a worker in this process and were not reported yet."""
        if self._parts is not None and self._parts.worker is not None:
            self.report(self._parts.worker.saved())

    # ---- the rest

    @property
    def busy(self) -> bool:
        """Whether copies are under way whose end is to be reported."""
        return self._connector is not None and self._connector.busy

    @property
    def started(self) -> bool:
        """Whether the cache is open."""
        return self._connector is not None

    @property
    def serving(self) -> bool:
        """Whether any request is not over."""
        return bool(self._states)

    def clear(self) -> None:
        """Forget every block in every level."""
        self.settle()
        for state in self._states.values():
            self._let_go(state)
            state.answer = None
        self.connector.manager.clear()

    def describe(self) -> str:
        """The resolved stack."""
        return self.connector.manager.describe()

    def stats(self) -> Stats:
        """Counters by level, of the arena, and of copies between it and vLLM's KV cache."""
        return {**self.connector.manager.stats(), "copies": dict(self._copied)}

    def close(self) -> None:
        """End everything; the workers were closed before. May be called again."""
        if self._connector is not None:
            self.settle()
            for state in self._states.values():
                self._let_go(state)
            self._states.clear()
            self._connector.close()
            self._connector.manager.close()
