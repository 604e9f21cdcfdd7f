"""The scheduler half of the vLLM connector: from vLLM's scheduler to the open cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvladder.compose import open_manager
from kvladder.config.stack import StackConfig
from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.facts import EngineFacts
from kvladder.connectors.vllm.groups import groups_of
from kvladder.connectors.vllm.identity.contents import contents_of
from kvladder.connectors.vllm.identity.weights import Weights
from kvladder.connectors.vllm.options import Policies, VllmOptions
from kvladder.connectors.vllm.reports.events import KVEvents, NoKVEvents, enabled
from kvladder.connectors.vllm.reports.log import say_ready
from kvladder.connectors.vllm.requests.naming import PromptNames
from kvladder.connectors.vllm.running import RunningScheduler
from kvladder.connectors.vllm.start import instance_of, layout_of, runs_v2
from kvladder.connectors.vllm.step import Attach, RankDescription
from kvladder.errors import ConfigError
from kvladder.hints import HintExecutor
from kvladder.manager import CacheManager
from kvladder.notices import Notices


class SchedulerHalf:
    """The scheduler half, one per engine, called by its thread.

    vLLM makes it first, then binds its block pool, and then hands over the workers' descriptions.
    ``start`` opens the cache with these. From then on ``running`` decides on loads and saves.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        options: VllmOptions,
        config: StackConfig,
        notices: Notices,
    ) -> None:
        self._facts = EngineFacts(
            vllm_config,
            kv_cache_config,
            options,
            config,
            notices,
            groups_of(kv_cache_config, model=str(vllm_config.model_config.model)),
            contents_of(vllm_config),
            Policies(config, map_priority=options.map_priority, notices=notices),
            runs_v2(vllm_config),
        )
        self._pool: Any = None
        self._running: RunningScheduler | None = None

    def bind(self, block_pool: Any) -> None:
        """Keep vLLM's block pool for ``start``.

        Raises
        ------
        ConfigError
            The cache is open already.
        """
        if self._running is not None:
            what = "this version of vLLM passes on its block pool after the workers' descriptions"
            raise ConfigError(what, hint="use vLLM 0.32 or 0.33")
        self._pool = block_pool

    def start(
        self, ranks: Mapping[int, RankDescription], *, handed_over: bool = False
    ) -> RunningScheduler:
        """Open the cache, now that every rank has described its KV tensors, and log it.

        ``handed_over`` is True if another connector, which may bring blocks itself, stands beside.

        Raises
        ------
        ConfigError
            The cache cannot be opened; says where, what and what instead.
        """
        facts = self._facts
        layout, offsets = layout_of(
            ranks,
            facts.vllm_config,
            facts.kv_cache_config,
            facts.groups,
            fingerprint=facts.config.model.fingerprint,
        )
        instance = instance_of(facts.vllm_config.parallel_config)
        nodes = {told.numa for told in ranks.values() if told.numa is not None}
        manager = open_manager(facts.config, layout, instance=instance, nodes=nodes)
        try:
            self._running = self._opened(manager, ranks, offsets, handed_over=handed_over)
        except BaseException:
            manager.close()
            raise
        say_ready(manager, facts.config)
        return self._running

    def _opened(
        self,
        manager: CacheManager,
        ranks: Mapping[int, RankDescription],
        offsets: tuple[tuple[int, ...], ...],
        *,
        handed_over: bool,
    ) -> RunningScheduler:
        """Return the running half over an open cache; ``offsets`` are those of a slot's parts."""
        facts = self._facts
        events: KVEvents | NoKVEvents = NoKVEvents()
        if enabled(facts.vllm_config):
            events = KVEvents(manager, facts.config, facts.groups, facts.kv_cache_config)
        attach = Attach(manager.arena.handle, offsets)
        for rank, told in ranks.items():
            if told.registers:
                manager.arena.admit(rank, 0)
        beside = [ranks[0].worker] if len(ranks) == 1 and ranks[0].worker is not None else []
        for worker in beside:
            worker.attach(attach)
        weights = Weights([described.weights for _, described in sorted(ranks.items())])
        names = PromptNames(facts.vllm_config, facts.groups, lambda: weights.mark)
        HintExecutor.of(manager).name_blocks = names
        return RunningScheduler(
            facts,
            StepConnector(manager, ranks=len(ranks)),
            weights,
            attach=attach,
            events=events,
            beside=beside,
            pool=self._pool,
            handed_over=handed_over,
        )

    @property
    def started(self) -> bool:
        """True if the cache is open."""
        return self._running is not None

    @property
    def running(self) -> RunningScheduler:
        """The loads and saves; raises ConfigError before all workers described their tensors."""
        if self._running is None:
            what = "this version of vLLM has not passed on the descriptions of its workers"
            raise ConfigError(what, hint="use vLLM 0.32 or later")
        return self._running

    def close(self) -> None:
        """Close the cache if it is open; the workers must be closed before. May be called again."""
        if self._running is not None:
            self._running.close()
