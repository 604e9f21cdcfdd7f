"""The scheduler half of the vLLM connector: it owns the cache, and decides on loads and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

from kvladder.compose import open_manager
from kvladder.config.stack import StackConfig
from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.groups import groups_of
from kvladder.connectors.vllm.holds import Holds
from kvladder.connectors.vllm.identity.contents import contents_of
from kvladder.connectors.vllm.identity.weights import MODEL, Weights
from kvladder.connectors.vllm.lost import LostLoads
from kvladder.connectors.vllm.options import Policies, VllmOptions
from kvladder.connectors.vllm.reports.events import KVEvents, enabled
from kvladder.connectors.vllm.reports.log import say_ready
from kvladder.connectors.vllm.requests import (
    Computing,
    Find,
    RequestState,
    held_by_vllm,
    reads,
    waits_for_adapter,
)
from kvladder.connectors.vllm.saves import Saver, Writes, copies_of, part_tails
from kvladder.connectors.vllm.sessions import begin_in_session, end_in_session
from kvladder.connectors.vllm.start import instance_of, layout_of, overwrites, runs_v2
from kvladder.connectors.vllm.step import Attach, Load, RankDescription, Report, StepMetadata
from kvladder.errors import ConfigError
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.keys import BlockKey
from kvladder.manager import FLUSH_TIMEOUT_S
from kvladder.metrics import Stats
from kvladder.notices import Notices

Tables = Sequence[Sequence[int]]
"""A request's block table in vLLM for each group."""

EARLY_SHARE = 0.5
"""Share of the arena's slots that may be pinned before new requests are not fetched early."""


class SchedulerHalf:
    """The scheduler half, one per engine, called by its thread. Only ``close`` waits for tiers."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        options: VllmOptions,
        config: StackConfig,
        notices: Notices,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._config = config
        self._notices = notices
        self._groups = groups_of(kv_cache_config, model=str(vllm_config.model_config.model))
        self._contents = contents_of(vllm_config)
        cache = getattr(vllm_config, "cache_config", None)
        self._waits = bool(getattr(cache, "enable_prefix_caching", False))
        """True if a request waits for another's load, to find it in vLLM's own prefix cache."""
        self._role = str(vllm_config.kv_transfer_config.kv_role)
        self._filling: dict[str, frozenset[BlockKey]] = {}
        """Keys of the blocks being copied into vLLM's memory, by request."""
        self._policies = Policies(config, map_priority=options.map_priority, notices=notices)
        self._states: dict[str, RequestState] = {}
        self._loads: dict[JobId, Load] = {}
        self._owners: dict[JobId, int] = {}
        """Number of the request's adapter, if it has one, by copy of the step being built."""
        self._lost = LostLoads()
        self._writes = Writes(self._groups)
        self._v2 = runs_v2(vllm_config)
        self._overwrites = overwrites(kv_cache_config)
        self._holds = Holds(wanted=self._v2 and self._overwrites)
        self._pins = 0
        self._awaited = False
        self._layered = False
        """True if the step being built has a load by layer."""
        scheduling = getattr(vllm_config, "scheduler_config", None)
        self._step_tokens: float = getattr(scheduling, "max_num_batched_tokens", inf)
        self._pool: Any = None
        self._attach: Attach | None = None
        self._beside: Any = None
        """The worker half, if it is in this process."""
        self._connector: StepConnector | None = None
        self.events: KVEvents | None = None
        """The KV events; None unless vLLM publishes them."""

    # ---- at start

    def start(self, ranks: Mapping[int, RankDescription], *, handed_over: bool = False) -> None:
        """Open the cache, now that every rank has described its KV tensors, and log it.

        ``handed_over`` is True if another connector, which may bring blocks itself, stands beside.

        Raises
        ------
        ConfigError
            The cache cannot be opened; says where, what and what instead.
        """
        layout, offsets = layout_of(
            ranks,
            self._vllm_config,
            self._kv_cache_config,
            self._groups,
            fingerprint=self._config.model.fingerprint,
        )
        instance = instance_of(self._vllm_config.parallel_config)
        nodes = {told.numa for told in ranks.values() if told.numa is not None}
        manager = open_manager(self._config, layout, instance=instance, nodes=nodes)
        self._attach = Attach(manager.arena.handle, offsets)
        self._beside = ranks[0].worker if len(ranks) == 1 else None
        for rank, told in ranks.items():
            if told.registers:
                manager.arena.admit(rank, 0)
        if self._beside is not None:
            self._beside.attach(self._attach)
        self._connector = StepConnector(manager, ranks=len(ranks))
        self._computing = Computing(manager.ladder.clock.now, manager.prefilled)
        self._weights = Weights([described.weights for _, described in sorted(ranks.items())])
        self._saver = Saver(
            self._groups,
            self._connector,
            default=self._role != "kv_consumer",
            decode=self._options.save_decode,
            interval=getattr(self._kv_cache_config, "prefix_cache_retention_interval", None),
            owners=self._owners,
        )
        self._handed_over = handed_over
        if enabled(self._vllm_config):
            self.events = KVEvents(manager, self._config, self._groups, self._kv_cache_config)
        say_ready(manager, self._config)

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to look up what it holds and to hold the blocks of saves."""
        self._pool = block_pool
        self._holds.bind(block_pool)

    @property
    def connector(self) -> StepConnector:
        """The loads and saves; raises ConfigError before all workers described their tensors."""
        if self._connector is None:
            what = "this vLLM has not handed over what its workers described"
            raise ConfigError(what, hint="use vLLM 0.32 or later")
        return self._connector

    # ---- the life of a request

    def arrived(self, request: Any) -> None:
        """Record a new request, and begin to fetch what the cache has for it."""
        self.settle()
        policy, items = self._policies.of(request), self._contents.of(request)
        policy = begin_in_session(self.connector, self._policies, request, policy)
        mark = lambda: self._weights.mark  # noqa: E731
        state = RequestState(request, self._groups, items=items, policy=policy, mark=mark)
        self._states[request.request_id] = state
        if self.events is not None:
            state.describe = self.events.describe
        if state.lora is not None:
            state.adapter = None
            if state.lora.load_inplace:
                self._weights.doubt_adapter(state.number)
        self._early(state)
        self._computing.expect(state, request.num_tokens)

    def _early(self, state: RequestState) -> None:
        """Begin to fetch what a new request will ask for, unless too much is pinned already."""
        request, slots = state.request, self.connector.manager.arena.slots
        if not self._named(state) or not self._reads(request) or not self._usable:
            return
        if self._pins >= EARLY_SHARE * slots:
            return
        held = held_by_vllm(self._pool, request, self._groups.main, self._loadable(request))
        self._hold(state, self._groups.aligned(held), behind=self._computing.waiting)
        if not state.pins:
            self._let_go(state)

    def _reads(self, request: Any) -> bool:
        """Return whether the cache is searched for its blocks: not by producers; see ``reads``."""
        return self._role != "kv_producer" and reads(request, handed_over=self._handed_over)

    def _named(self, state: RequestState) -> bool:
        """Return whether a request's blocks have keys: not before its adapter is known."""
        if state.adapter is None and not state.apart:
            state.adapter = self._weights.adapter(state.number)
        return state.adapter is not None and not state.apart

    def _loadable(self, request: Any) -> int:
        """Return how many of its tokens may be loaded; at least one is always computed."""
        return self._groups.aligned(request.num_tokens - 1)

    def ask(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after ``computed`` the cache has, and whether the load is async.

        None: ask again. vLLM asks in every step that could run the request, so the answer is kept.
        """
        state = self._states.get(request.request_id)
        found = 0 if state is None else self._answer(state, computed)
        self._awaited = self._awaited or found is None
        if not found or state is None:
            return found, False
        state.sync = self._step_waits(state.request.num_tokens - computed - found, found)
        return found, not state.sync

    def _step_waits(self, left: int, found: int) -> bool:
        """Return whether the step that computes ``left`` tokens waits for the ``found`` ones.

        By layer, it waits if no other request is delayed, or if computing hides the copies. Only
        one load per step goes by layer: a second one would begin only after all of the first.
        """
        if self._options.load != "layers":
            return self._options.load == "sync"
        if len(self._states) == 1:
            return True
        copies_s = self.connector.loading_s(found // self._groups.main.tokens)
        computes_s = self.connector.manager.computing_s(int(min(left, self._step_tokens)))
        if self._layered or copies_s is None or computes_s is None:
            return False
        return copies_s <= computes_s

    def _answer(self, state: RequestState, computed: int) -> int | None:
        state.own = state.told = computed
        if waits_for_adapter(state, self._weights, self._notices):
            return None
        named = self._named(state)
        # vLLM's blocks of it were made by other weights: no key fits what follows them.
        if computed and self._outdated(state):
            state.apart = True
        if state.computes or state.apart or not named or not self._reads(state.request):
            return 0
        if computed % self._groups.step:
            return 0
        # No key is used before all ranks have looked at their weights.
        if not self._weights.known:
            self._weights.awake()
            return None if self._weights.patient else 0
        if self.connector.manager.resetting:
            return 0
        if state.loading:
            return None
        # vLLM asks for the first time, or has a different number of its tokens by now.
        if state.answer is None or state.answer[0] != computed:
            found = self._find(state, computed)
            if found is None:
                return None
            state.answer = (computed, found)
            self.connector.manager.missed(state.unasked // self._groups.main.tokens)
        found = state.answer[1]
        # Another request's load may be filling its first block: then vLLM will have it itself.
        if found and self._filling:
            main, first = self._groups.main, computed // self._groups.main.tokens
            needed = state.keys(main, first, first + 1)
            if not all(map(frozenset(needed).isdisjoint, self._filling.values())):
                return None
        return found

    def _outdated(self, state: RequestState) -> bool:
        """Return whether vLLM's own prefix cache may have KV of other weights than a request's."""
        return self._weights.outdated(self._own_cache, state.lora, state.adapter)

    @property
    def _usable(self) -> bool:
        """True if keys may be used now: the weights are known, and no reset is in progress."""
        return self._weights.known and not self.connector.manager.resetting

    @property
    def _own_cache(self) -> object:
        """The prefix cache of vLLM itself; a new object each time it has been emptied."""
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def _find(self, state: RequestState, own: int) -> int | None:
        """Return how many tokens after the first ``own`` are in host; None while still fetching."""
        limit = self._loadable(state.request)
        if state.find is not None and state.find.own > own:
            self._let_go(state)
        for _ in range(2):  # an early search may end where vLLM's own blocks end by now
            if state.find is None:
                self._hold(state, own)
            find = state.find
            assert find is not None
            if not find.done:
                return None
            self._count(state)
            if own < find.end <= limit:
                return find.end - own
            begun_here = find.own == own
            self._let_go(state)
            if begun_here:
                break
        return 0

    def _hold(self, state: RequestState, own: int, *, behind: int = 0) -> None:
        """Search for what follows the first ``own`` tokens, and pin it.

        ``behind`` is the number of tokens of other requests that are computed first.
        """
        state.find = Find(
            self._groups,
            state.keys,
            match=lambda keys, saves: self.connector.match(
                keys,
                levels=state.policy.tiers.load,
                salt=state.salt,
                saves=saves,
                session=state.policy.session,
            ),
            lookup=lambda keys: self.connector.manager.reach(keys, levels=state.policy.tiers.load),
            own=own,
            limit=self._loadable(state.request),
            behind=behind,
        )
        state.unasked = state.find.unasked
        self._count(state)

    def _count(self, state: RequestState) -> None:
        pins = 0 if state.find is None else state.find.pins
        self._pins += pins - state.pins
        state.pins = pins

    def _let_go(self, state: RequestState) -> None:
        state.answer = None  # the answer was about the released search
        if state.find is not None:
            state.find.release()
            state.find = None
        self._count(state)

    def allocated(self, request: Any, tables: Tables, external: int) -> None:
        """Begin to load ``external`` tokens into the blocks that vLLM has given to a request.

        ``tables`` are its block tables, by group. Called again with 0 once a load has ended.
        """
        state = self._states.get(request.request_id)
        if self.connector.saving:
            own = 0 if state is None else state.own
            self._writes.give(tables, max(own, request.num_computed_tokens))
        if state is None:
            return
        state.begun = True
        if state.lora is not None:
            known = self._weights.adapter(state.number)
            self._weights.begins(state.lora, known, self._own_cache)
        answer, state.answer = state.answer, None
        computed = max(request.num_computed_tokens, state.own + external)
        self._computing.expect(state, max(0, request.num_tokens - computed))
        if answer is not None and answer[0]:
            for keys in state.read(answer[0]):
                self.connector.manager.touch(keys, session=state.policy.session)
        if not external:
            self._let_go(state)
            return
        state.told = state.own + external
        own = 0 if answer is None else answer[0]
        self._layered = self._layered or (state.sync and self._options.load == "layers")
        try:
            self._load(state, own, own + external, tables, sync=state.sync)
        except Exception:  # vLLM already relies on these blocks: report a failed load to it
            state.computes = True
            main = self._groups.main
            lost = tables[main.index][own // main.tokens : (own + external) // main.tokens]
            self._lost.fail(request.request_id, lost, sync=state.sync)
            raise

    def _load(self, state: RequestState, own: int, end: int, tables: Tables, *, sync: bool) -> None:
        find, state.find, state.sources = state.find, None, []
        assert find is not None
        found = find.end
        held = find.take()
        self._count(state)
        try:
            assert found == end, f"{end} tokens are to be loaded, {found} were found"
            for group in self._groups:
                start, stop = max(group.first(end), own // group.tokens), end // group.tokens
                targets = tuple(tables[group.index][start:stop])
                if not targets:
                    continue
                assert len(targets) == stop - start, "blocks are missing in vLLM's table"
                assert 0 not in targets, "a block that is read is null in vLLM's table"
                mine = held.pop(group.index)
                first = start - mine.first
                if group is self._groups.main:
                    state.sources = mine.match.sources[first : first + len(targets)]
                job_id = self.connector.load(mine.match, targets, first=first, group=group.index)
                state.loading.add(job_id)
                job = CopyJob(job_id, "onboard", targets, (), group.index)
                self._loads[job_id] = Load(job, state.request.request_id, sync)
                if state.number:
                    self._owners[job_id] = state.number
                if group is self._groups.main and self._waits:
                    keys = state.keys(group, start, stop)
                    self._filling[state.request.request_id] = frozenset(keys)
        finally:
            for left in held.values():
                left.match.release()

    def sources(self, request: Any) -> Counter[str]:
        """Return the number of tokens of a request's last load by type of level."""
        state = self._states.get(request.request_id)
        kinds = {tier.name: tier.type for tier in (self._config.host, *self._config.levels)}
        blocks = Counter(kinds[name] for name in ([] if state is None else state.sources))
        return Counter({kind: n * self._groups.main.tokens for kind, n in blocks.items()})

    def finished(self, request: Any) -> None:
        """Forget a request that has finished or was aborted; its copies in flight still end."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return
        self._let_go(state)
        self._computing.expect(state, 0)
        if self._named(state):
            end_in_session(self.connector, self._groups, state)
            main = self._groups.main
            for keys in state.read(self._groups.aligned(state.saved[main.index] * main.tokens)):
                # blocks are saved head first; after this the tail is evicted first
                self.connector.manager.touch(keys, session=state.policy.session)

    # ---- a step

    def build(self, output: Any) -> StepMetadata:
        """Return the workers' tasks for the step that vLLM has just scheduled."""
        try:
            return self._build(output)
        except BaseException:
            self._holds.release_all()
            self._lost.defer(replace(self._loads[j.id], job=j) for j in self.connector.withdraw())
            raise

    def failed(self) -> StepMetadata:
        """Return the tasks of a step that could not be built: its sync loads, which fail."""
        loads = self._lost.due()
        return StepMetadata(loads=loads, attach=self._attach if loads else None)

    def _build(self, output: Any) -> StepMetadata:
        connector = self.connector
        step = StepMetadata()
        if self.events is not None:
            self.events.watch(getattr(self._pool, "kv_event_queue", ()))
        writes = self._writes.take(output)
        if connector.saving:
            lost = (load.job.blocks for load in self._lost)
            step.fence = connector.reading(chain(writes, *lost))
            before = self._overwrites or output.new_block_ids_to_zero or copies_of(output)
            step.late = self._v2 and bool(before)
        outdated = {i: state for i, state in self._states.items() if self._outdated(state)}
        if outdated:
            part_tails(outdated, output)
        if self._usable:
            self._save(output)
        step.loads = [*self._lost]
        for job in connector.begun:
            if job.direction == "offload":
                self._holds.take(job)
                step.saves.append(job)
            else:
                step.loads.append(replace(self._loads[job.id], job=job))
        scheduled = [(self._states.get(i), n) for i, n in output.num_scheduled_tokens.items()]
        step.number = self._computing.begin(scheduled, timed=not any(i.sync for i in step.loads))
        runs = bool(output.num_scheduled_tokens)
        step.idle = not runs and (self._awaited or bool(self._loads) or self.freeing)
        self._awaited = self._layered = False
        step.owners.update(self._owners)
        kept = (state.number for state in self._states.values() if state.begun)
        self._weights.prepare(step, runs=runs, cache=self._own_cache, kept=kept)
        arena = connector.manager.arena
        if step.loads or step.saves or arena.admitted < arena.slots:
            step.attach = self._attach
        connector.take()  # last: a step that could not be built withdraws its jobs
        self._lost.clear()
        self._owners.clear()
        return step

    def _save(self, output: Any) -> None:
        """Begin to save the blocks that the step completes."""
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and self._named(state):
                computed = state.request.num_computed_tokens + scheduled
                if computed >= state.due:
                    self._saver.full(state, output, computed)
        self._saver.handed(self._states, output)

    def unfilled(self, blocks: Collection[int]) -> None:
        """Let saves fail if a step may have read ``blocks``, which a load did not fill."""
        if not blocks:
            return
        # our async loads do no harm: no step reads their blocks before vLLM knows of the failure
        ours = (load.job.blocks for load in self._loads.values() if not load.sync)
        if set(blocks).difference(*ours):
            self.connector.distrust()
            for state in self._states.values():
                state.offer_again()

    def report(self, report: Report) -> None:
        """Record which copies ended, and what the ranks saw of their weights."""
        connector = self.connector
        for rank, slots in report.registered.items():
            connector.manager.arena.admit(rank, slots)
        changed = self._weights.report(report)
        if changed:
            self._renamed(changed)
        connector.report(report.ended)
        self._computing.end(report.step)
        for finished in connector.poll():
            self._holds.release(finished.id)
            load = self._loads.pop(finished.id, None)
            state = None if load is None else self._states.get(load.request_id)
            if load is not None and (state is None or state.loading <= {finished.id}):
                self._filling.pop(load.request_id, None)
            if state is not None:
                state.loaded(finished.id, ok=finished.ok)

    def _renamed(self, changed: Collection[int]) -> None:
        """Drop the searches of requests after their model's or adapter's weights have changed.

        ``changed`` has the numbers of adapters; MODEL among them concerns all requests.

        vLLM continues with a request's blocks in its memory. No key fits the KV computed from them,
        so nothing more is saved for the request, nor for others that begin with these blocks.
        """
        self.connector.excuse()
        for state in self._states.values():
            if MODEL in changed or state.number in changed:
                self._let_go(state)
                state.apart = state.apart or state.begun
                state.adapter = None if state.number else b""
        if self.events is not None and MODEL in changed:
            self.events.rename(self._weights.mark)

    def settle(self) -> None:
        """Record saves that ended on a worker in this process and were not reported yet."""
        if self._beside is not None:
            self.report(self._beside.saved())

    # ---- the rest

    @property
    def busy(self) -> bool:
        """True while copies are in flight."""
        return self._connector is not None and self._connector.busy

    @property
    def started(self) -> bool:
        """True if the cache is open."""
        return self._connector is not None

    @property
    def pending(self) -> bool:
        """True if steps are needed even without requests: copies or events are pending."""
        return self.busy or (self.events is not None and self.events.pending)

    @property
    def freeing(self) -> bool:
        """True if vLLM gets blocks back as soon as their saves end."""
        return self._holds.pending

    @property
    def serving(self) -> bool:
        """True if more steps follow: a request is not finished, or something is ``pending``."""
        return bool(self._states) or self.pending

    def reset(self) -> None:
        """Use no key until all ranks have looked at their weights, because these may have changed.

        Also forget the blocks that no other engine has, unless ``on_reset`` is ``keep``.
        """
        self.settle()
        for state in self._states.values():
            self._let_go(state)
        self._weights.doubt()
        if self._options.on_reset == "forget":
            self.connector.manager.reset()

    def stats(self) -> Stats:
        """Return counters by level, of the arena, and of copies to and from vLLM's KV cache."""
        return {**self.connector.manager.stats(), "copies": dict(self.connector.copied)}

    def close(self) -> None:
        """Close the cache; the workers must be closed before. May be called again.

        Blocks that only host memory holds are written below. The time limit is vLLM's shutdown
        timeout, but at least ``FLUSH_TIMEOUT_S``.
        """
        if self._connector is not None:
            self.settle()
            for state in self._states.values():
                self._let_go(state)
            self._states.clear()
            self._holds.release_all()
            self._connector.close()
            manager = self._connector.manager
            given_s = getattr(self._vllm_config, "shutdown_timeout", 0)
            manager.close(timeout_s=max(FLUSH_TIMEOUT_S, given_s))
