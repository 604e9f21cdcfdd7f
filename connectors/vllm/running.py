"""The scheduler half once the cache is open: it decides on loads and saves, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.facts import EngineFacts
from kvladder.connectors.vllm.holds import Holds
from kvladder.connectors.vllm.identity.weights import MODEL, Weights
from kvladder.connectors.vllm.loads import RequestLoads
from kvladder.connectors.vllm.reports.events import KVEvents, NoKVEvents
from kvladder.connectors.vllm.requests.answers import Answers
from kvladder.connectors.vllm.requests.computing import Computing
from kvladder.connectors.vllm.requests.hints import answer_of, begin_hints, end_hints
from kvladder.connectors.vllm.requests.sessions import begin_in_session, end_in_session
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.connectors.vllm.saves import Saver, Writes, copies_of, part_tails
from kvladder.connectors.vllm.start import overwrites
from kvladder.connectors.vllm.step import Attach, Report, StepMetadata
from kvladder.connectors.vllm.worker import WorkerHalf
from kvladder.keys import BlockKey
from kvladder.manager import FLUSH_TIMEOUT_S
from kvladder.metrics import Stats
from kvladder.traces.recorder import Recorder
from kvladder.traces.recording import recorder_of

Tables = Sequence[Sequence[int]]
"""A request's block table in vLLM for each group."""


class RunningScheduler:
    """The scheduler half from its start on; the engine's thread calls it.

    Only ``close`` waits for tiers.

    Parameters
    ----------
    connector:
        The loads and saves, over the open cache. ``close`` closes both.
    weights:
        The state of all ranks' weights.
    attach:
        The way for workers to map the arena.
    events:
        The KV events; those of a class without any unless vLLM publishes them.
    beside:
        The worker half if it is in this process; else empty.
    pool:
        vLLM's block pool, to look up what it holds and to hold the blocks of saves; None if vLLM
        has handed none over.
    handed_over:
        True if another connector, which may bring blocks itself, stands beside.
    """

    def __init__(
        self,
        facts: EngineFacts,
        connector: StepConnector,
        weights: Weights,
        *,
        attach: Attach,
        events: KVEvents | NoKVEvents,
        beside: Sequence[WorkerHalf],
        pool: Any,
        handed_over: bool,
    ) -> None:
        self._vllm_config = facts.vllm_config
        self._options = facts.options
        self._config = facts.config
        self._groups = facts.groups
        self._contents = facts.contents
        self._policies = facts.policies
        self._v2 = facts.v2
        self._overwrites = overwrites(facts.kv_cache_config)
        self.connector = connector
        """The loads and saves."""
        self._weights = weights
        self._attach = attach
        self.events = events
        self._beside = beside
        self._pool = pool
        self._states: dict[str, RequestState] = {}
        self._writes = Writes(self._groups)
        self._holds = Holds(pool if self._v2 and self._overwrites else None)
        self._awaited = False
        manager = connector.manager
        self._computing = Computing(manager.ladder.clock.now, manager.prefilled)
        self._recorder = recorder_of(manager)
        self._answers = Answers(
            self._groups,
            connector,
            weights,
            facts.notices,
            pool=pool,
            reads=facts.role != "kv_producer",
            handed_over=handed_over,
        )
        self._loads = RequestLoads(facts, connector, self._answers)
        self._saver = Saver(
            self._groups,
            connector,
            default=facts.role != "kv_consumer",
            decode=facts.options.save_decode,
            interval=getattr(facts.kv_cache_config, "prefix_cache_retention_interval", None),
            owners=self._loads.owners,
        )

    # ---- the life of a request

    def arrived(self, request: Any) -> None:
        """Record a new request, and begin to fetch what the cache has for it."""
        self.settle()
        policy, items = self._policies.of(request), self._contents.of(request)
        policy = begin_in_session(self.connector, self._policies, request, policy)
        policy, hints = begin_hints(self.connector, request, policy)
        state = RequestState(
            request,
            self._groups,
            items=items,
            policy=policy,
            hints=hints,
            mark=lambda: self._weights.mark,
            describe=self.events.describe,
        )
        self._states[request.request_id] = state
        if self.connector.manager.tracer is not None:
            state.trace = request.trace_headers
        if state.lora is not None:
            state.adapter = None
            if state.lora.load_inplace:
                self._weights.doubt_adapter(state.number)
        if self._recorder is not None:
            prompt = self._prompt(state)
            self._recorder.arrived(request.request_id, prompt, request.num_prompt_tokens)
        self._answers.early(state, behind=self._computing.waiting)
        self._computing.expect(state, request.num_tokens)

    def ask(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after ``computed`` the cache has, and whether the load is async.

        None: ask again. vLLM asks in every step that could run the request, so the answer is kept.
        """
        state = self._states.get(request.request_id)
        found = 0 if state is None else self._answers.answer(state, computed)
        self._awaited = self._awaited or found is None
        if not found or state is None:
            return found, False
        left = state.request.num_tokens - computed - found
        state.sync = self._loads.step_waits(left, found, alone=len(self._states) == 1)
        return found, not state.sync

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
            self._weights.begins(state.lora, known, self._answers.own_cache)
        answer = state.lookup.answer
        computed = max(request.num_computed_tokens, state.own + external)
        self._computing.expect(state, max(0, request.num_tokens - computed))
        if answer is not None and answer[0]:
            for keys in state.read(answer[0]):
                self.connector.manager.touch(keys, session=state.policy.session)
        if not external:
            self._answers.drop(state)
            return
        state.told = state.own + external
        own = 0 if answer is None else answer[0]
        if state.sync and self._options.load == "layers":
            self._loads.layered = True
        try:
            self._loads.begin(state, own, own + external, tables, sync=state.sync)
        except Exception:  # vLLM already relies on these blocks: report a failed load to it
            self._answers.drop(state)
            state.lookup.fail()
            main = self._groups.main
            lost = tables[main.index][own // main.tokens : (own + external) // main.tokens]
            self._loads.lost.fail(request.request_id, lost, sync=state.sync)
            raise

    def sources(self, request: Any) -> Counter[str]:
        """Return the number of tokens of a request's last load by type of level."""
        state = self._states.get(request.request_id)
        kinds = {tier.name: tier.type for tier in (self._config.host, *self._config.levels)}
        blocks = Counter(kinds[name] for name in ([] if state is None else state.sources))
        return Counter({kind: n * self._groups.main.tokens for kind, n in blocks.items()})

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request that has finished or was aborted; its copies in flight still end.

        Returns the report for its answer, None if it has none.
        """
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        if self._recorder is not None:
            self._record_end(self._recorder, request, state)
        self._answers.drop(state)
        if state.lookup_span is not None:  # aborted before vLLM had an answer
            state.lookup_span.ended(request.num_prompt_tokens, state.own, 0, ())
        self._computing.expect(state, 0)
        if self._answers.named(state):
            end_in_session(self.connector, self._groups, state)
            end_hints(self.connector, self._groups, state)
            main = self._groups.main
            for keys in state.read(self._groups.aligned(state.saved[main.index] * main.tokens)):
                # blocks are saved head first; after this the tail is evicted first
                self.connector.manager.touch(keys, session=state.policy.session)
        return answer_of(state)

    def _record_save(self, recorder: Recorder, state: RequestState, before: int) -> None:
        """Record that a prompt is saved, if its last whole block is among those just offered."""
        main = self._groups.main
        whole = state.request.num_prompt_tokens // main.tokens
        if before < whole <= state.saved[main.index]:
            recorder.saved(state.request.request_id)

    def _record_end(self, recorder: Recorder, request: Any, state: RequestState) -> None:
        """Record what a finished request has asked for, computed and saved."""
        main, is_named = self._groups.main, self._answers.named(state)
        first, saved = request.num_prompt_tokens // main.tokens, state.saved[main.index]
        recorder.finished(
            request.request_id,
            self._prompt(state),
            request.num_tokens - request.num_prompt_tokens,
            asked=state.asked or (0, 0),
            answer=state.keys(main, first, saved) if is_named and first < saved else (),
        )

    def _prompt(self, state: RequestState) -> list[BlockKey]:
        """Return the keys of the main group's blocks of a prompt; none if they have no names."""
        if not self._answers.named(state):
            return []
        main = self._groups.main
        return state.keys(main, 0, state.request.num_prompt_tokens // main.tokens)

    # ---- a step

    def build(self, output: Any) -> StepMetadata:
        """Return the workers' tasks for the step that vLLM has just scheduled."""
        try:
            return self._build(output)
        except BaseException:
            self._holds.release_all()
            begun = self._loads.in_flight
            self._loads.lost.defer(replace(begun[j.id], job=j) for j in self.connector.withdraw())
            raise

    def failed(self) -> StepMetadata:
        """Return the tasks of a step that could not be built: its sync loads, which fail."""
        loads = self._loads.lost.due()
        return StepMetadata(loads=loads, attach=self._attach if loads else None)

    def _build(self, output: Any) -> StepMetadata:
        connector = self.connector
        step = StepMetadata()
        self.events.watch(getattr(self._pool, "kv_event_queue", ()))
        writes = self._writes.take(output)
        if connector.saving:
            lost = (load.job.blocks for load in self._loads.lost)
            step.fence = connector.reading(chain(writes, *lost))
            before = self._overwrites or output.new_block_ids_to_zero or copies_of(output)
            step.late = self._v2 and bool(before)
        outdated = {i: one for i, one in self._states.items() if self._answers.outdated(one)}
        if outdated:
            part_tails(outdated, output)
        if self._answers.usable:
            self._save(output)
        step.loads = [*self._loads.lost]
        for job in connector.begun:
            if job.direction == "offload":
                self._holds.take(job)
                step.saves.append(job)
            else:
                step.loads.append(replace(self._loads.in_flight[job.id], job=job))
        scheduled = [(self._states.get(i), n) for i, n in output.num_scheduled_tokens.items()]
        step.number = self._computing.begin(scheduled, timed=not any(i.sync for i in step.loads))
        runs = bool(output.num_scheduled_tokens)
        step.idle = not runs and (self._awaited or bool(self._loads.in_flight) or self.freeing)
        self._awaited = self._loads.layered = False
        step.owners.update(self._loads.owners)
        kept = (state.number for state in self._states.values() if state.begun)
        self._weights.prepare(step, runs=runs, cache=self._answers.own_cache, kept=kept)
        arena = connector.manager.arena
        if step.loads or step.saves or arena.admitted < arena.slots:
            step.attach = self._attach
        connector.take()  # last: a step that could not be built withdraws its jobs
        self._loads.lost.clear()
        self._loads.owners.clear()
        return step

    def _save(self, output: Any) -> None:
        """Begin to save the blocks that the step completes."""
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and self._answers.named(state):
                computed = state.request.num_computed_tokens + scheduled
                if computed >= state.due:
                    before = state.saved[self._groups.main.index]
                    self._saver.full(state, output, computed)
                    if self._recorder is not None:
                        self._record_save(self._recorder, state, before)
        self._saver.handed(self._states, output)

    def unfilled(self, blocks: Collection[int]) -> None:
        """Let saves fail if a step may have read ``blocks``, which a load did not fill."""
        if not blocks:
            return
        # our async loads do no harm: no step reads their blocks before vLLM knows of the failure
        ours = (load.job.blocks for load in self._loads.in_flight.values() if not load.sync)
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
            load = self._loads.in_flight.pop(finished.id, None)
            state = None if load is None else self._states.get(load.request_id)
            if load is not None and (state is None or state.lookup.loading <= {finished.id}):
                self._answers.filled(load.request_id)
            if state is not None:
                state.loaded(finished.id, ok=finished.ok)
                self._answers.waited(state)

    def _renamed(self, changed: Collection[int]) -> None:
        """Drop the searches of requests after their model's or adapter's weights have changed.

        ``changed`` has the numbers of adapters; MODEL among them concerns all requests.

        vLLM continues with a request's blocks in its memory. No key fits the KV computed from them,
        so nothing more is saved for the request, nor for others that begin with these blocks.
        """
        self.connector.excuse()
        for state in self._states.values():
            if MODEL in changed or state.number in changed:
                self._answers.drop(state)
                state.apart = state.apart or state.begun
                state.adapter = None if state.number else b""
        if MODEL in changed:
            self.events.rename(self._weights.mark)

    def settle(self) -> None:
        """Record saves that ended on a worker in this process and were not reported yet."""
        for worker in self._beside:
            self.report(worker.saved())

    # ---- the rest

    @property
    def busy(self) -> bool:
        """True while copies are in flight."""
        return self.connector.busy

    @property
    def pending(self) -> bool:
        """True if steps are needed even without requests: copies or events are pending."""
        return self.busy or self.events.pending

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
            self._answers.drop(state)
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
        self.settle()
        for state in self._states.values():
            self._answers.drop(state)
        self._states.clear()
        self._holds.release_all()
        self.connector.close()
        given_s = getattr(self._vllm_config, "shutdown_timeout", 0)
        self.connector.manager.close(timeout_s=max(FLUSH_TIMEOUT_S, given_s))

    def check(self) -> None:
        """Assert that each request's lookup is in a possible state; for tests."""
        for state in self._states.values():
            state.check()
        self._answers.check(self._states.values())
