"""The part of SGLang that the connector imports, for tests without SGLang.

``test_sglang_signatures.py`` compares it with the pinned version.
"""

from __future__ import annotations

import hashlib
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

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

    def end_weight_update(self, *, run_post_load):
        self.calls.append("end")

    def update_weights_from_disk(self, model_path, load_format):
        self.calls.append(model_path)
        return True, "Succeeded"

    def load_weights_from_distributed(self, weights):
        self.calls.append("distributed")

    def update_weights_from_tensor(self, named_tensors, load_format=None):
        self.calls.append("tensor")

    def update_weights_from_ipc(self, recv_req):
        self.calls.append("ipc")


class WeightChecker:
    """Compares weights, and overwrites them for that."""

    def handle(self, action, allow_quant_error=False, skip_tensor_list=None, *, role):
        return action


class MemorySaver:
    """Gives memory back that an engine does not use for a while."""

    def pause(self, tag):
        return tag

    def resume(self, tag):
        return tag


class Config:
    """The configuration of a model."""

    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return dict(self.values)


class ModelRunner:
    """Runs a model."""

    is_draft_worker = False

    def __init__(self, seed=0):
        self.model = nn.Linear(4, 4)
        nn.init.constant_(self.model.weight, seed)
        nn.init.constant_(self.model.bias, seed)
        self.model_config = SimpleNamespace(hf_config=Config(rope_theta=1.0))


@dataclass
class LoRARef:
    """The name of an adapter."""

    lora_id: str
    lora_name: str
    lora_path: str

    @staticmethod
    def deterministic_id(lora_name, lora_path):
        return f"{lora_name} {lora_path}"


class LoRAManager:
    """Holds adapters."""

    def __init__(self):
        self.lora_refs = {}
        self.loras = {}

    def load(self, name, path, seed, lora_id=None):
        """Load an adapter with weights of this seed."""
        ref = LoRARef(lora_id or LoRARef.deterministic_id(name, path), name, path)
        self.lora_refs[ref.lora_id] = ref
        layer = SimpleNamespace(weights={"lora_A": torch.full((2, 2), float(seed))})
        self.loras[ref.lora_id] = SimpleNamespace(
            config=SimpleNamespace(r=2, lora_alpha=4, hf_config={"r": 2}),
            layers=[layer],
            embedding_layers={},
            added_tokens_embeddings={},
        )


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
    """The part of a prefix that the pools hold."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class RadixKey:
    """The tokens of a prefix, and what keeps them apart from others."""

    def __init__(self, token_ids, extra_key=None, is_bigram=False, limit=None, cache_salt=None):
        assert not is_bigram
        assert limit is None
        self.token_ids = token_ids
        self.extra_key = extra_key
        self.cache_salt = cache_salt

    def __len__(self):
        return len(self.token_ids)


def get_storage_hash_str(key, prior_hash=None, page_size=None):
    """Return the digest of each page, and of the rest behind the last whole one."""
    assert prior_hash is None
    last, found = hashlib.sha256(repr((key.extra_key, key.cache_salt)).encode()).digest(), []
    for at in range(0, len(key), page_size):
        page = b"".join(one.to_bytes(4, "little") for one in key.token_ids[at : at + page_size])
        last = hashlib.sha256(last + page).digest()
        found.append(last.hex())
    return found


class Streamer:
    """Makes answers."""

    def get_cached_tokens_details(self, req):
        return None


class Core:
    """The core of the tree: the pages of each node, and their owners."""

    def __init__(self):
        self.nodes = {}

    def build_storage_backup_spec(self, node_id, pass_prefix_keys):
        keys, _ = self.nodes[node_id]
        return SimpleNamespace(hash_value=keys)

    def prefetch_anchor_info(self, node_id):
        return None, self.nodes[node_id][1]


class UnifiedRadixCache:
    """The part of the tree that hands pages to the storage."""

    def __init__(self, params):
        self.params = params
        self.tree_core = Core()
        self.cache_controller = params
        self.buffer_pipeline: Any = None

    def reset(self):
        """Nothing is cached any more."""
        self.tree_core.nodes.clear()

    def checkpoint_into_tree(self, req, *, up_to, **kwargs):
        """Insert a request's pages as a node of their own."""
        self.tree_core.nodes[req.rid] = (req.keys[:up_to], req.cache_salt)
        self._execute_and_commit_kv_backup(SimpleNamespace(node_ids=[req.rid]))

    def match_prefix(self, params):
        """Find what is cached of a prompt."""
        return params.key

    def release_session(self, session_id):
        """Forget a streaming session."""

    def release_radix_session(self, session_id):
        """Forget a session."""
        return 0

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
        """Read the pages that were found for requests."""
        while not self.cache_controller.prefetch_hit_queue.empty():
            self.cache_controller.read(self.cache_controller.prefetch_hit_queue.get())


WATCHED = (
    (WeightUpdater, "begin_weight_update"), (WeightUpdater, "end_weight_update"),
    (WeightUpdater, "update_weights_from_disk"), (WeightUpdater, "load_weights_from_distributed"),
    (WeightUpdater, "update_weights_from_tensor"), (WeightUpdater, "update_weights_from_ipc"),
    (WeightChecker, "handle"), (MemorySaver, "pause"), (MemorySaver, "resume"),
    (UnifiedRadixCache, "reset"),
)  # fmt: skip


def forget_watches(monkeypatch):
    """Undo a test's changes to these classes when it ends."""
    for kind, name in WATCHED:
        monkeypatch.setattr(kind, name, getattr(kind, name))


class Bag:
    """A namespace of settings."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def paths(self, namespace):
        """Return the namespace of each setting in it and below it, by name."""
        found: dict[str, str] = {}
        for name, value in vars(self).items():
            if isinstance(value, Bag):
                found |= value.paths(f"{namespace}.{name}")
            else:
                found[name] = namespace
        return found


class Envs:
    """Environment variables."""

    SGLANG_OPT_NEW_KERNEL = None
    USE_TRITON_W8A8_FP8_KERNEL = None


NAMESPACES = (
    "device", "disagg", "exec", "lora", "memory", "mm", "model", "observability", "parallel",
    "schedule", "serving", "spec",
)  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    "exec": {
        "moe": Bag(kt_weight_path=None, enable_paged_experts=False),
        "offload": Bag(ple_offload_embedding=None),
        "features": Bag(enable_weights_cpu_backup=False),
    },
    "lora": {"lora_paths": None},
    "memory": {"hicache_storage_backend": "dynamic"},
    "model": {
        "revision": None, "dtype": "float32", "quantization": None, "load_format": "auto",
    },
    "observability": {"forward_hooks": None},
}  # fmt: skip
"""SGLang's default settings."""
registry: dict[str, Any] = {}
bags: dict[str, Bag] = {}
target = ModelRunner()
"""The model runner of this process, as in SGLang's scheduler."""


def give(model_path: str, **changes: Any) -> None:
    """Have the engine run this model with these settings, given by namespace."""
    context = sys.modules["sglang.srt.runtime_context"]
    for name in NAMESPACES:
        said = deepcopy({**GIVEN.get(name, {}), **changes.get(name, {})})
        if name == "model":
            said["model_path"] = model_path
        bags[name] = Bag(**said)
        setattr(context, f"get_{name}", lambda name=name: bags[name])


class ServerArgs:
    """The arguments of the server."""


DERIVED = frozenset(("dp_rank", "num_dp_ranks"))
"""Settings that are no server arguments."""


def namespace_of(kind):
    """Return the namespace of each server argument, by name."""
    assert kind is ServerArgs
    paths = {field: at for name, bag in bags.items() for field, at in bag.paths(name).items()}
    return {field: at for field, at in paths.items() if field not in DERIVED}


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
    context = SimpleNamespace(server_args=ServerArgs(), config_bag=bags.__getitem__)
    _module("sglang.srt.runtime_context", get_context=lambda: context)
    _module("sglang.srt.arg_groups")
    _module("sglang.srt.arg_groups.arg_utils", namespace_of=namespace_of)
    _module("sglang.srt.environ", Envs=Envs)
    _module("sglang.srt.lora")
    _module("sglang.srt.lora.lora_manager", LoRAManager=LoRAManager)
    _module("sglang.srt.model_executor.model_runner", ModelRunner=ModelRunner)
    _module("sglang.srt.utils")
    _module("sglang.srt.utils.weight_checker", WeightChecker=WeightChecker)
    _module("sglang.srt.utils.torch_memory_saver_adapter", _TorchMemorySaverAdapterReal=MemorySaver)
    give("model")
    _module(
        "sglang.srt.mem_cache.hicache_storage",
        HiCacheStorage=HiCacheStorage,
        PoolHitPolicy=PoolHitPolicy,
        PoolTransferResult=PoolTransferResult,
        STORAGE_BATCH_SIZE=BATCH,
    )
    _module("sglang.srt.mem_cache.radix_cache", RadixKey=RadixKey)
    _module("sglang.srt.mem_cache.utils", get_storage_hash_str=get_storage_hash_str)
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
