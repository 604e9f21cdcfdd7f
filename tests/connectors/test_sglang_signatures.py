"""The stand-ins for SGLang and the overridden methods match the pinned version."""

from __future__ import annotations

import ast
import inspect
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.connectors import sglang_stub

sglang_stub.install()
from kvladder.connectors.sglang import identity, options  # noqa: E402
from kvladder.connectors.sglang.storage import KVLadderStorage  # noqa: E402
from kvladder.connectors.sglang.tree import HOOKS, QUESTIONS, KVLadderRadixCache  # noqa: E402
from kvladder.connectors.sglang.weights import CHANGES, TREE, UPDATES  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCE = Path(sys.prefix) / "sglang" / "sglang"
PLACES = {
    "storage": "srt/mem_cache/hicache_storage.py",
    "tree": "srt/mem_cache/unified_radix_cache.py",
    "key": "srt/mem_cache/radix_cache.py",
    "core": "srt/mem_cache/unified_cache/unified_tree_core_interface.py",
    "controller": "srt/managers/cache_controller.py",
    "hybrid": "srt/mem_cache/hybrid_cache/hybrid_cache_controller.py",
    "weights": "srt/model_executor/model_runner_components/weight_updater.py",
    "metrics": "srt/observability/metrics_collector.py",
    "registry": "srt/mem_cache/registry.py",
    "plugins": "srt/plugins/__init__.py",
    "context": "srt/runtime_context.py",
    "environ": "srt/environ.py",
    "buffer": "srt/mem_cache/buffer_mode/pipeline.py",
    "arguments": "srt/arg_groups/arg_utils.py",
    "server": "srt/server_args.py",
    "formats": "srt/configs/load_config.py",
    "loader": "srt/model_loader/loader.py",
    "hooks": "srt/model_executor/hook_manager.py",
    "runner": "srt/model_executor/model_runner.py",
    "lora": "srt/lora/lora_manager.py",
    "adapter": "srt/lora/lora.py",
    "adapters": "srt/lora/lora_registry.py",
    "checker": "srt/utils/weight_checker.py",
    "saver": "srt/utils/torch_memory_saver_adapter.py",
    "updates": "srt/managers/scheduler_components/weight_updater.py",
    "scheduler": "srt/managers/scheduler.py",
    "lora requests": "srt/managers/tokenizer_control_mixin.py",
}

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="SGLang is not beside this Python")


@cache
def text(place):
    return (SOURCE / PLACES[place]).read_text()


@cache
def tree_of(place):
    return ast.parse(text(place))


def function(place, name, owner=None):
    """A function of SGLang's, or a method of one of its classes."""
    for node in ast.walk(tree_of(place)):
        if owner is not None and not (isinstance(node, ast.ClassDef) and node.name == owner):
            continue
        for one in ast.walk(node):
            if isinstance(one, ast.FunctionDef) and one.name == name:
                return one
    raise AssertionError(f"{place} has no {name}")


def class_of(place, name):
    """A class of SGLang's."""
    found = (n for n in ast.walk(tree_of(place)) if isinstance(n, ast.ClassDef) and n.name == name)
    return next(found)


def parameters(node):
    """Return the names of the parameters, and whether each is required."""
    given = node.args
    several = [*given.posonlyargs, *given.args]
    required = len(several) - len(given.defaults)
    found = [(one.arg, at < required) for at, one in enumerate(several) if one.arg != "self"]
    return found + [
        (one.arg, default is None)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]


def takes(ours, theirs):
    """Return whether a function can be called like SGLang's."""
    signature = inspect.signature(ours)
    kinds = {one.kind for one in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    own = [name for name in signature.parameters if name != "self"]
    return own == [name for name, _ in parameters(theirs)]


def test_the_version_is_the_one_that_is_pinned():
    version = (SOURCE.parent / "sglang-0.5.23.dist-info" / "METADATA").read_text()
    assert f"\nVersion: {sglang_stub.VERSION}\n" in version


CALLS = (
    "register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered",
    "batch_exists_v2", "batch_get_v2", "batch_set_v2", "batch_get_v1", "batch_set_v1",
    "batch_exists", "exists", "get", "batch_get", "set", "batch_set", "get_stats", "clear",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_storage_is_called_with_the_expected_arguments(name):
    theirs = function("storage", name, "HiCacheStorage")
    assert takes(getattr(KVLadderStorage, name), theirs)


def test_all_abstract_methods_are_implemented():
    base = class_of("storage", "HiCacheStorage")
    abstract = {
        one.name
        for one in ast.walk(base)
        if isinstance(one, ast.FunctionDef)
        and any(getattr(mark, "id", "") == "abstractmethod" for mark in one.decorator_list)
    }
    assert abstract
    assert all(callable(vars(KVLadderStorage).get(name)) for name in abstract)


def test_a_batch_is_as_large_as_we_announce():
    assert f"STORAGE_BATCH_SIZE = {sglang_stub.BATCH}\n" in text("storage")


def test_the_first_generation_of_calls_is_not_used():
    source = text("controller")
    assert 'bool(self.storage_config.extra_config.get("interface_v1", 0))' in source
    assert "self.storage_backend.batch_get_v1(" in source
    assert "self.storage_backend.batch_set_v1(" in source


@pytest.mark.parametrize("name", ["PoolHitPolicy", "PoolTransfer", "PoolTransferResult"])
def test_types_of_pools_match_the_stub(name):
    theirs = class_of("storage", name)
    names = {
        ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        for node in theirs.body
        if isinstance(node, ast.AnnAssign | ast.Assign)
    }
    ours = getattr(sglang_stub, name)
    assert {*getattr(ours, "__members__", getattr(ours, "__annotations__", ()))} <= names


def test_pools_are_asked_with_the_model_s_own_names():
    assert "self.storage_backend.batch_exists_v2(" in text("hybrid")
    assert "self.storage_backend.batch_get_v2(" in text("hybrid")
    assert "self.storage_backend.batch_set_v2(" in text("hybrid")
    pools = ast.unparse(class_of("storage", "PoolName"))
    for name in ("KV = 'kv'", "MAMBA = 'mamba'", "SWA = 'swa'", "INDEXER = 'indexer'"):
        assert name in pools
    # one rank stores replicated keys and values, and all ranks store states
    assert "transfer.name == PoolName.MAMBA" in ast.unparse(function("hybrid", "should_backup"))


def test_an_answer_of_false_ends_the_stored_part_of_a_prompt():
    backup = ast.unparse(function("controller", "_page_backup"))
    assert "if not success:" in backup
    assert "break" in backup
    zero_copy = ast.unparse(function("controller", "_page_set_zero_copy"))
    assert "all(self.storage_backend.batch_set_v1(" in zero_copy


def test_sglang_waits_for_its_threads_longer_than_a_call_lasts():
    stop = ast.unparse(function("controller", "_stop_storage_threads"))
    assert "timeout=10" in stop.replace(" ", "")
    assert options.CALL_S + options.DEADLINE_MAX < 10


def test_sglangs_own_keys_are_removed_from_the_extra_configuration():
    parse = ast.unparse(function("hybrid", "parse_storage_backend_extra_config"))
    for name in ("prefetch_threshold", "prefetch_timeout_base", "hicache_storage_pass_prefix_keys"):
        assert f"pop('{name}'" in parse
    assert "pop('tp_lcm_size'" in ast.unparse(function("controller", "_generate_storage_config"))


def test_the_storage_receives_its_rank():
    fields = {
        node.target.id
        for node in ast.walk(tree_of("storage"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    from tests.connectors.sglang_controller import config

    assert {*vars(config(None))} <= fields


@pytest.mark.parametrize("name", HOOKS)
def test_the_tree_has_the_overridden_methods(name):
    theirs = function("tree", name, "UnifiedRadixCache")
    ours = list(inspect.signature(getattr(KVLadderRadixCache, name)).parameters)[1:2]
    assert ours == [name for name, _ in parameters(theirs)][:1]


def test_found_pages_pass_a_queue_before_they_are_read():
    found = ast.unparse(function("controller", "prefetch_thread_func"))
    assert found.index("operation.hash_value =") < found.index("prefetch_hit_queue.put(operation)")
    read = ast.unparse(function("tree", "_drain_storage_control_queues_impl"))
    assert read.index("prefetch_buffer.put(") < read.index("cc.prefetch_hit_queue")
    assert "RadixKey(" in ast.unparse(function("tree", "prefetch_from_storage"))
    assert "cache_salt" in ast.unparse(class_of("key", "RadixKey"))


def test_staged_pages_are_stored_once_they_are_in_the_host_pool():
    stored = ast.unparse(function("buffer", "finish_backup_ack"))
    assert "entry = self.ongoing_write_through.pop(ack_id)" in stored
    assert "snapshot = intent.snapshot" in stored
    assert "entry.keys_by_pool[PoolName.KV]" in stored
    finished = ast.unparse(function("tree", "_finish_write_through_ack"))
    assert "self.buffer_pipeline.finish_backup_ack(ack_id)" in finished
    assert "self.buffer_pipeline: Optional[BufferModePipeline] = None" in text("tree")
    queued = [
        node.lineno
        for node in ast.walk(tree_of("buffer"))
        if isinstance(node, ast.Call) and "write_storage" in ast.unparse(node.func)
    ]
    assert len(queued) == 1


def test_requests_enter_the_tree_only_by_the_overridden_method():
    inserts = [
        node.name
        for node in ast.walk(tree_of("tree"))
        if isinstance(node, ast.FunctionDef) and "self.insert(" in ast.unparse(node)
    ]
    assert inserts == ["checkpoint_into_tree"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_core_has_the_methods_that_kvladder_calls(name):
    theirs, ours = function("core", name), getattr(sglang_stub.Core, name)
    assert takes(ours, theirs)


@pytest.mark.slow
def test_each_switch_names_pages_unless_it_is_left_out_by_its_whole_name(monkeypatch):
    known = {
        target.id
        for node in class_of("environ", "Envs").body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert len(known) > 700
    monkeypatch.setattr(identity, "Envs", type("Envs", (), dict.fromkeys(known)))
    for name in known:
        monkeypatch.setenv(name, "1")
    left_out = [name for names in identity.LEFT_OUT["switches"].values() for name in names.split()]
    assert len(left_out) == len({*left_out})
    assert known - {*identity._switches()} == known & {*left_out}
    sources = "".join(path.read_text() for path in (SOURCE / "srt").rglob("*.py"))
    assert [name for name in left_out if name not in sources] == []


def arguments():
    """The server's arguments, each below its namespace."""
    found = set()
    for path in (SOURCE / "srt/arg_groups/fields").glob("*.py"):
        for kind in ast.parse(path.read_text()).body:
            if isinstance(kind, ast.ClassDef):
                own = {
                    ast.unparse(node.targets[0]): node.value
                    for node in kind.body
                    if isinstance(node, ast.Assign)
                }
                namespace = ast.literal_eval(own["_NS_PATH"])
                fields = [ast.unparse(n.target) for n in kind.body if isinstance(n, ast.AnnAssign)]
                found |= {f"{namespace}.{name}" for name in fields}
    return found


def test_each_server_argument_names_pages_or_is_left_out_for_a_reason():
    known = arguments()
    assert len(known) > 500
    left_out = [name for names in identity.LEFT_OUT["settings"].values() for name in names.split()]
    assert len(left_out) == len({*left_out}), "each has one reason"
    assert [*identity.left_out("settings")] == left_out
    assert {*left_out} <= known, "what is left out is there"
    assert all(len(reason) > 20 for kind in identity.LEFT_OUT.values() for reason in kind)
    told: dict[str, str] = {}
    for path in known:
        namespace, _, name = path.rpartition(".")
        assert told.setdefault(name, namespace) == namespace
        bag = sglang_stub.bags.setdefault(path.partition(".")[0], sglang_stub.Bag())
        for part in namespace.split(".")[1:]:
            bag = vars(bag).setdefault(part, sglang_stub.Bag())
        vars(bag)[name] = "set"
    try:
        assert {*identity.settings()} & known == known - {*left_out}
    finally:
        sglang_stub.give("m")


@pytest.mark.slow
def test_groups_of_settings_match_those_of_sglang():
    tops = {path.partition(".")[0] for path in arguments()}
    assert tops == {*sglang_stub.NAMESPACES}
    assert [name for name, _ in parameters(function("arguments", "namespace_of"))] == ["cls"]
    function("context", "config_bag", "RuntimeContext")
    assert "def server_args(self)" in text("context")
    # the rest follows from the arguments, or is a rank
    for path in ("exec.moe.kt_weight_path", *identity.OUT_OF_SIGHT):
        assert path in arguments()
        assert path not in identity.left_out("settings"), "with a user's text it still counts"


def test_load_formats_that_count_as_one_read_safetensors():
    known = {
        ast.literal_eval(node.value)
        for node in class_of("formats", "LoadFormat").body
        if isinstance(node, ast.Assign)
    }
    assert known >= {*identity.SAFETENSORS, "dummy", "pt", "expert_pack"}
    files = ast.unparse(function("loader", "_prepare_weights", "DefaultModelLoader"))
    assert "allow_patterns = ['*.safetensors', '*.bin']" in files  # auto
    branch = files[files.index("LoadFormat.SAFETENSORS") : files.index("LoadFormat.MISTRAL")]
    for name in identity.SAFETENSORS - {"auto"}:
        assert f"LoadFormat.{name.upper()}" in branch
    assert "allow_patterns = ['*.safetensors']" in branch


def test_sglang_holds_models_and_adapters_where_kvladder_reads_them():
    loaded = ast.unparse(function("runner", "load_model", "ModelRunner"))
    assert "self.model = loaded.model" in loaded
    made = ast.unparse(class_of("runner", "ModelRunner"))
    for name in ("self.model_config = ", "self.is_draft_worker = "):
        assert name in made
    hooks = ast.unparse(function("hooks", "register_forward_hooks"))
    assert "spec.get('hook_factory')" in hooks
    manager = ast.unparse(class_of("lora", "LoRAManager"))
    for name in ("self.loras: Dict[str, LoRAAdapter]", "self.lora_refs: Dict[str, LoRARef]"):
        assert name in manager
    adapter = text("adapter")
    for name in ("self.weights: Dict", "self.embedding_layers: Dict", "self.layers: List"):
        assert name in adapter
    assert "self.added_tokens_embeddings: Dict[str, torch.Tensor]" in adapter


def test_adapters_that_are_loaded_later_have_random_ids():
    made = function("adapters", "deterministic_id", "LoRARef")
    assert [name for name, _ in parameters(made)] == ["lora_name", "lora_path"]
    assert "default_factory=lambda: uuid4().hex" in text("adapters")
    for node in ast.walk(tree_of("lora requests")):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LoRARef":
            assert "lora_id" not in [one.arg for one in node.keywords]


WATCHED = {
    "WeightUpdater": "weights",
    "WeightChecker": "checker",
    "_TorchMemorySaverAdapterReal": "saver",
    "UnifiedRadixCache": "tree",
}


@pytest.mark.parametrize("where", [*CHANGES, TREE])
def test_the_watched_methods_change_and_reset_weights(where):
    module, _, kind = where.partition(":")
    assert PLACES[WATCHED[kind]] == module.removeprefix("sglang.").replace(".", "/") + ".py"
    for name in CHANGES.get(where, ("reset",)):
        function(WATCHED[kind], name, kind)


def test_no_unwatched_method_changes_weights():
    updater = class_of("weights", "WeightUpdater")
    named = {
        one.name
        for one in updater.body
        if isinstance(one, ast.FunctionDef)
        and ("update_weights" in one.name or "load" in one.name or one.name.endswith("_update"))
    }
    assert {name for name in named if not name.startswith("_")} == {*UPDATES}
    checks = ast.unparse(function("checker", "handle", "WeightChecker"))
    assert "action == 'reset_tensors'" in checks
    released = ast.unparse(function("updates", "release_memory_occupation"))
    assert "self.memory_saver_adapter.pause(GPU_MEMORY_TYPE_WEIGHTS)" in released
    for path in (SOURCE / "srt").rglob("*.py"):
        if path.relative_to(SOURCE / "srt").parts[0] in ("models", "model_loader", "multimodal"):
            continue
        source = path.read_text()
        if ".load_weights(" in source and "model.load_weights(" in source.replace("()", ""):
            assert path.name in ("weight_updater.py", "startup_weight_load.py"), path


def test_a_flush_resets_the_tree():
    flush = ast.unparse(function("scheduler", "flush_cache", "Scheduler"))
    assert flush.index("self.is_fully_idle(") < flush.index("self.tree_cache.reset()")
    attach = ast.unparse(function("scheduler", "attach_hicache_storage_wrapped", "Scheduler"))
    said = attach.index("get_context().override(")
    assert attach.index("self.tree_cache.attach_storage_backend(") < said
    assert "'hicache_storage_backend': recv_req.hicache_storage_backend" in attach[:said]


def test_statistics_have_the_fields_that_sglang_reads():
    theirs = class_of("metrics", "StorageMetrics")
    names = [ast.unparse(n.target) for n in theirs.body if isinstance(n, ast.AnnAssign)]
    assert names == [*vars(sglang_stub.StorageMetrics())]


def test_the_plugin_is_found():
    for name in ("register_radix_cache_backend", "get_radix_cache_factory"):
        function("registry", name)
    made = function("registry", "create_unified_radix_cache")
    assert "cache_class" in [name for name, _ in parameters(made)]
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in text("plugins")
    names = ("context", "exec", "memory", "mm", "model", "parallel", "spec")
    for name in [f"get_{name}" for name in names]:
        function("context", name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = project["entry-points"]["sglang.srt.plugins"]
    assert said == {"kvladder": "kvladder.connectors.sglang.plugin:register"}
    found = {point.value for point in entry_points(group="sglang.srt.plugins")}
    assert found <= {*said.values()}
