"""As much of SGLang as the connector imports, where SGLang itself is not wanted.

``test_sglang_signatures.py`` compares it with the version that is pinned.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.5.23"
BATCH = 128


class HiCacheStorage:
    """The base of storages."""

    registered_pools: dict[Any, Any]

    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        if not hasattr(self, "registered_pools"):
            self.registered_pools = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self):
        pass


class WeightUpdater:
    """Changes weights while the engine runs."""

    def __init__(self):
        self.calls = []

    def begin_weight_update(self):
        self.calls.append("begin")

    def update_weights_from_disk(self, model_path, load_format):
        self.calls.append(model_path)
        return True, "Succeeded"

    def load_weights_from_distributed(self, weights):
        self.calls.append("distributed")

    def update_weights_from_tensor(self, named_tensors, load_format=None):
        self.calls.append("tensor")

    def update_weights_from_ipc(self, recv_req):
        self.calls.append("ipc")


@dataclass
class StorageMetrics:
    """Figures of a storage."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class PoolHitPolicy(StrEnum):
    """Which pages of a pool count for a prefix."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """Pages of one pool."""

    name: str
    host_indices: Any = None
    keys: Any = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    """What the pools have of a prefix."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class Core:
    """The core of the tree: which pages a node has, and whose they are."""

    def __init__(self):
        self.nodes = {}

    def build_storage_backup_spec(self, node_id, pass_prefix_keys):
        keys, _ = self.nodes[node_id]
        return SimpleNamespace(hash_value=keys)

    def prefetch_anchor_info(self, node_id):
        return None, self.nodes[node_id][1]


class UnifiedRadixCache:
    """The tree, as far as pages are handed from it to the storage."""

    def __init__(self, params):
        self.params = params
        self.tree_core = Core()
        self.cache_controller = params
        self.buffer_pipeline: Any = None

    def checkpoint_into_tree(self, req, *, up_to, **kwargs):
        """A request's pages come in as a node of their own."""
        self.tree_core.nodes[req.rid] = (req.keys[:up_to], req.cache_salt)
        self._execute_and_commit_kv_backup(SimpleNamespace(node_ids=[req.rid]))

    def _execute_and_commit_kv_backup(self, action, write_back=False):
        return len(action.node_ids)

    def write_backup_storage(self, node_id):
        keys, _ = self.tree_core.nodes[node_id]
        self.cache_controller.backup(keys)

    def _finish_write_through_ack(self, ack_id):
        """Pages are in the host pool."""
        if self.buffer_pipeline is None:
            self.write_backup_storage(ack_id)
            return
        entry = self.buffer_pipeline.ongoing_write_through.pop(ack_id)
        self.cache_controller.backup(entry.keys_by_pool["kv"])

    def drain_storage_control_queues(self):
        """What was found for requests is read."""
        while not self.cache_controller.prefetch_hit_queue.empty():
            self.cache_controller.read(self.cache_controller.prefetch_hit_queue.get())


class Bag:
    """A namespace of settings."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Envs:
    """Environment variables."""

    SGLANG_OPT_NEW_KERNEL = None
    USE_TRITON_W8A8_FP8_KERNEL = None


MODEL = {"revision": None, "dtype": "float32", "quantization": None}
registry: dict[str, Any] = {}


def give(model_path: str, **changes: Any) -> None:
    """Have the engine run this model with these settings, given by namespace."""
    context = sys.modules["sglang.srt.runtime_context"]
    for name in ("exec", "lora", "mm", "parallel", "model", "spec"):
        said = dict(changes.get(name, {}))
        if name == "model":
            said = {**MODEL, "model_path": model_path, **said}
        if name == "lora":
            said.setdefault("lora_paths", None)
        bag = Bag(**said)
        setattr(context, f"get_{name}", lambda bag=bag: bag)


def _module(name: str, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content, __path__=[])
    sys.modules[name] = made
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, made)


def install() -> None:
    """Put it in SGLang's place."""
    if "sglang" in sys.modules:
        return
    below = "sglang.srt.mem_cache", "sglang.srt.model_executor", "sglang.srt.observability"
    for name in ("sglang", "sglang.srt", *below):
        _module(name)
    _module("sglang.srt.model_executor.model_runner_components")
    _module("sglang.version", __version__=VERSION)
    _module("sglang.srt.runtime_context")
    _module("sglang.srt.environ", Envs=Envs)
    give("model")
    _module(
        "sglang.srt.mem_cache.hicache_storage",
        HiCacheStorage=HiCacheStorage,
        PoolHitPolicy=PoolHitPolicy,
        PoolTransferResult=PoolTransferResult,
        STORAGE_BATCH_SIZE=BATCH,
    )
    _module("sglang.srt.mem_cache.unified_radix_cache", UnifiedRadixCache=UnifiedRadixCache)
    _module(
        "sglang.srt.mem_cache.registry",
        register_radix_cache_backend=registry.__setitem__,
        get_radix_cache_factory=registry.get,
        create_unified_radix_cache=lambda context, cache_class: cache_class(context),
    )
    _module(
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        WeightUpdater=WeightUpdater,
    )
    _module("sglang.srt.observability.metrics_collector", StorageMetrics=StorageMetrics)


install()
