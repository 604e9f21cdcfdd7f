"""kvladder as a KV connector of vLLM.

    --kv-transfer-config '{"kv_connector": "KVLadderConnector",
        "kv_connector_module_path": "kvladder.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": "stack.yaml"}}'

vLLM makes one object per worker and one for its scheduler. The scheduler's object owns the cache;
the workers' objects only copy. An error at start is raised; a later one is a miss.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvladder.connectors.vllm.identity.fingerprint import vllm_version
from kvladder.connectors.vllm.layouts import wanted_layout
from kvladder.connectors.vllm.options import parse
from kvladder.connectors.vllm.plugin import register
from kvladder.connectors.vllm.reports.log import logger, route, warn
from kvladder.connectors.vllm.reports.metrics import Changes, KVLadderStats, PromMetrics
from kvladder.connectors.vllm.running import RunningScheduler
from kvladder.connectors.vllm.scheduler import SchedulerHalf
from kvladder.connectors.vllm.start import (
    check_engine,
    check_features,
    check_groups,
    check_layers,
    check_recompute,
    check_roles,
    runs_layers,
)
from kvladder.connectors.vllm.step import RankDescription, Report, StepMetadata, carried, carry
from kvladder.connectors.vllm.worker import WorkerHalf
from kvladder.errors import ConfigError
from kvladder.notices import Notices
from kvladder.preflight import preflight
from kvladder.runtime import SystemClock

register()  # MultiConnector finds the class for its statistics by the registered name

F = TypeVar("F", bound=Callable[..., Any])

_HIT_SOURCES = {"host": "HOST", "memory": "HOST", "files": "DISK"}
"""vLLM's names for the media of hits, by type of tier."""


def _say(connector: KVLadderConnector, hook: str, error: Exception) -> None:
    """Log that a hook failed; called while ``error`` is handled."""
    connector.notices.say(hook, f"{hook} failed: {error!r}")
    logger.debug("%s failed", hook, exc_info=True)


def _harmless(answer: Callable[[], object]) -> Callable[[F], F]:
    """Return a decorator for hooks that logs their errors, and returns ``answer()`` instead."""

    def wrap(hook: F) -> F:
        @functools.wraps(hook)
        def run(self: KVLadderConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
                _say(self, hook.__name__, error)
                return answer()

        return run  # type: ignore[return-value]

    return wrap


_nothing = _harmless(lambda: None)


class KVLadderConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The class that vLLM loads; each method is one of its hooks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_features(KVConnectorBase_V1)
        super().__init__(vllm_config, role, kv_cache_config)
        route()
        check_engine(vllm_config)
        transfer = vllm_config.kv_transfer_config
        options, config = parse(transfer.kv_connector_extra_config)
        check_groups(vllm_config, kv_cache_config, load=options.load)
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        check_recompute(vllm_config, policy, load=options.load)
        self.notices = Notices(SystemClock().now)
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self._changes = Changes(SystemClock().now)
        self._load = options.load
        self._layers = options.load == "layers"
        if role == KVConnectorRole.WORKER:
            from vllm.distributed.parallel_state import get_pp_group, get_tp_group

            tensor, stage = get_tp_group(), get_pp_group()
            rank = stage.rank_in_group * tensor.world_size + tensor.rank_in_group
            self.worker = WorkerHalf(vllm_config, kv_cache_config, rank=rank, notices=self.notices)
            return
        warn(config, version=vllm_version(), vllm_config=vllm_config)
        self.scheduler = SchedulerHalf(
            vllm_config, kv_cache_config, options=options, config=config, notices=self.notices
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # this is a cache: vLLM recomputes blocks that are not delivered

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that this connector asks vLLM for, or None.

        vLLM uses it if its attention back end supports it. VLLM_KV_CACHE_LAYOUT overrides it.
        """
        try:
            return wanted_layout(vllm_config)
        except Exception as error:  # noqa: BLE001 - a wish must not keep an engine from its start
            logger.debug("no layout is requested from vLLM: %r", error)
            return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, after checking that the cache can open.

        With CUDA graphs, vLLM calls this before it loads the model, so errors show up early.

        Raises
        ------
        ConfigError
            The cache would not open.
        """
        _, config = parse(extra_config)
        errors = preflight(config).errors  # its warnings are logged when the cache opens
        if errors:
            raise errors[0]
        return False

    # ---- worker

    @property
    def _copies(self) -> WorkerHalf:
        assert self.worker is not None, "a worker's hook was called on the scheduler's half"
        return self.worker

    @property
    def _whole(self) -> Any:
        """The connector that vLLM made for this worker: this one, or a MultiConnector around it."""
        return get_kv_transfer_group() if has_kv_transfer_group() else self

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        return step if isinstance(step, StepMetadata) else StepMetadata()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        whole = self._whole._kv_transfer_config
        check_roles(self._kv_transfer_config.kv_role, whole.kv_role)
        policy = getattr(whole, "kv_load_failure_policy", "recompute")
        check_recompute(self._vllm_config, policy, load=self._load)
        if self._layers:
            check_layers(self._vllm_config, kv_caches)
        self._copies.register(kv_caches)
        self.get_handshake_metadata()  # lets an earlier connector's description carry ours

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self._copies.detach()

    def restore_kv_caches(self) -> None:
        self._copies.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        parts = getattr(self._whole, "sub_connectors", ())
        others = [one for one in parts if not isinstance(one, KVLadderConnector)]
        return carry(self._copies.describe(), others)

    @_nothing
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepMetadata):
            self._copies.begin(kv_connector_metadata)

    @_nothing
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        by_layer = self._layers and runs_layers(forward_context)
        self._copies.load(self._step, by_layer=by_layer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Make the layer wait for its blocks if loads go by layer; other loads have ended."""
        if self._layers:
            self._await_layer(layer_name)

    @_nothing
    def _await_layer(self, layer_name: str) -> None:
        self._copies.await_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are saved after the forward pass that fills them."""

    @_nothing
    def wait_for_save(self) -> None:
        self._copies.save(self._step)

    @_harmless(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._copies.received(), self._copies.failed()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @_harmless(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copies.bad_blocks()

    @_nothing
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._copies.report()

    # ---- scheduler

    @property
    def _half(self) -> SchedulerHalf:
        assert self.scheduler is not None, "a scheduler's hook was called on a worker's half"
        return self.scheduler

    @property
    def _decides(self) -> RunningScheduler:
        return self._half.running

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = carried(metadata.values())
        if metadata and not ranks:  # MultiConnector passes on the first connector's answer only
            what = "vLLM passed on the description of another connector, but not of this one"
            hint = "vLLM passes on only one description: leave the other connector out"
            raise ConfigError(what, path="kv_connector_extra_config.connectors", hint=hint)
        if any(described.taken for described in ranks.values()):
            what = "KVLadderConnector is listed twice"
            where = "kv_connector_extra_config.connectors"
            raise ConfigError(what, path=where, hint="use one, with the tiers of both")
        for described in ranks.values():
            described.taken = True
        beside = any(not isinstance(one, RankDescription) for one in metadata.values())
        self._half.start(ranks, handed_over=beside)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._half.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        _ = self._decides  # raises at the first request if the cache is not open
        self._arrived(request)

    @_nothing
    def _arrived(self, request: Any) -> None:
        self._decides.arrived(request)

    @_harmless(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._decides.ask(request, num_computed_tokens)

    @_nothing
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._decides.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @_harmless(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if not num_external_tokens:
            return {}
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        found: Counter[Any] = Counter()
        for kind, tokens in self._decides.sources(request).items():
            found[_HIT_SOURCES.get(kind, unknown.name)] += tokens
        # tokens before a window are not loaded, and a load may not have begun
        found[unknown.name] += num_external_tokens - found.total()
        return {CacheHitSource[name]: tokens for name, tokens in found.items() if tokens}

    @_harmless(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        try:
            return self._decides.build(scheduler_output)
        except Exception as error:  # noqa: BLE001 - vLLM computes this step in any case
            _say(self, "build_connector_meta", error)
            return self._decides.failed()

    @_nothing
    def update_connector_output(self, connector_output: Any) -> None:
        self._decides.unfilled(connector_output.invalid_block_ids)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._decides.report(report)

    @_harmless(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        report = self._decides.finished(request)
        return False, None if report is None else {"kvladder": report}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for a single group.

        MultiConnector calls this if one of its connectors supports only one group.
        """
        return self.request_finished_all_groups(request, (block_ids,))

    @_harmless(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._half.started and self._decides.pending

    @_harmless(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Return whether vLLM should wait for blocks instead of preempting a request."""
        return self._half.started and self._decides.freeing

    @_harmless(lambda: False)
    def reset_cache(self) -> bool | None:
        self._decides.reset()
        return True

    @_harmless(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._decides.events.take() if self._half.started else ()

    @_nothing
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.scheduler is None or not self.scheduler.started:
            return None
        half = self.scheduler.running
        return self._changes.take(half.stats, last=not half.serving)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        copied = {name: dict(values) for name, values in (data or {}).items()}
        return KVLadderStats(data=copied)  # a copy: vLLM adds to it while others read ``data``

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- both

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
        if self.scheduler is not None:
            self.scheduler.close()
