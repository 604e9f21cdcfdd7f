"""SGLang's settings: which are refused, and which name its pages."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.connectors import sglang_stub
from tests.connectors.sglang_controller import Pool, Sparse, chain, config

sglang_stub.install()
from kvladder.connectors.sglang import identity, models  # noqa: E402
from kvladder.connectors.sglang.options import WHERE, parse  # noqa: E402
from kvladder.connectors.sglang.pools import pool_of  # noqa: E402
from kvladder.connectors.sglang.weights import CHANGES, TREE, UPDATES, WeightsTracker  # noqa: E402

SGLANGS = {"backend_name": "kvladder", "module_path": "m", "class_name": "c", "interface_v1": 1}
HOST = {"host": "1 MiB"}
REDIS = {"type": "redis", "capacity": "1 GiB"}


def tiers(**tier):
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, tier]}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"confg": "a.yaml"}, r"\.confg: unknown key .*'config'"),
        ({"record": "trace.jsonl", **HOST}, r"record: has no effect .*SGLang's storage calls look"),
        ({"fetch": {"deadline": "10 s"}, **HOST}, r"fetch.deadline: 10 s .*at most 4 s: SGLang"),
        ({"config": "a.yaml", **HOST}, r"\.host: cannot be combined with config .*a.yaml"),
        ({}, r"no stack .*stack.yaml"),
        ({"interface_v1": 0, **HOST}, r"\.interface_v1: missing"),
        (
            tiers(**REDIS, url="redis://user:pa@host"),
            r"\.tiers\[1\]\.url: SGLang logs its arguments .*\"config\": \"stack.yaml\"",
        ),
        (tiers(**REDIS, url="redis://host", password="p"), r"tiers\[1\]\.password: SGLang logs"),
        ({"block": {"salt": "secret"}, **HOST}, r"block\.salt: SGLang logs"),
    ],
)
def test_wrong_settings_are_refused(extra, message):
    with pytest.raises(ValueError, match=message) as error:
        parse({**SGLANGS, **extra})
    for secret in ("pa@host", "'p'", "secret"):
        assert secret not in str(error.value)


def test_secrets_may_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PASSWORD", "p")
    given = {**HOST, "block": {"salt": "${PASSWORD}"}}
    found = parse({**SGLANGS, **given})
    assert found.block.salt == "p"
    (tmp_path / "stack.yaml").write_text("{host: 1 MiB, block: {salt: q}}")
    found = parse({**SGLANGS, "config": str(tmp_path / "stack.yaml")})
    assert found.block.salt == "q"
    assert WHERE.startswith("--hicache")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The folder of a model; its weights are in memory, and may be changed there."""
    monkeypatch.setattr(sglang_stub.target, "model", torch.nn.Linear(4, 4))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def fields(folder, /, *, pool=None, fingerprint="auto", ranks=None, **changes):
    sglang_stub.give(str(folder), **changes)
    told = config(None, **(ranks or {}))
    pools = [pool_of(pool or Pool(), "kv", told, 0)]
    return identity.layout_of(pools, told, fingerprint).fields


def differs(one, other):
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.slow
def test_weights_name_pages_whatever_the_model_is_called(model):
    first = fields(model)
    assert fields(model, ranks={"model_name": "another/alias"}) == first
    assert fields(model, ranks={"model_name": None}) == first
    with torch.no_grad():
        sglang_stub.target.model.bias[3] += 1
    assert differs(first, fields(model)) == {"weights"}
    given = fields(model, fingerprint="mine")
    assert given["weights"] == "given mine"
    with torch.no_grad():
        sglang_stub.target.model.bias[3] += 1
    assert fields(model, fingerprint="mine") == given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "counts"),
    [("chat_template.jinja", False), ("generation_config.json", False), ("tokenizer.json", False),
     ("model.safetensors.index.json", False), ("quantize_config.json", True),
     ("preprocessor_config.json", True), ("config.json", True)],
)  # fmt: skip
def test_files_name_pages_that_may_change_them(model, file, counts):
    first = fields(model)
    (model / file).write_text('{"changed": 1}')
    assert differs(first, fields(model)) == ({f"model/{file}"} if counts else set())


@pytest.mark.slow
def test_a_tokenizer_names_pages_where_a_processor_or_a_draft_reads_it(model, tmp_path):
    (model / "tokenizer.json").write_text("{}")
    assert "model/tokenizer.json" not in fields(model)
    spec = {"speculative_draft_model_path": str(model), "speculative_draft_model_revision": None}
    assert "model/tokenizer.json" in fields(model, spec=spec)
    (model / "config.json").write_text('{"vision_config": {}}')
    assert "model/tokenizer.json" in fields(model)


@pytest.mark.slow
def test_weights_in_memory_name_pages_and_not_the_files_beside_them(model):
    """Files are replaced after the engine has read them, and other files are beside them."""
    first = fields(model)
    (model / "model.safetensors").write_bytes(b"Weights")
    (model / "model.pt").write_bytes(b"others")
    assert fields(model) == first


@pytest.mark.slow
@pytest.mark.parametrize("load_format", ["dummy", "pt", "gguf", "remote_instance", "sharded_state"])
def test_a_load_format_names_pages(model, load_format):
    """A user's text may stand for weights that several formats give, each otherwise."""
    said = {"load_format": load_format}
    for fingerprint in ("auto", "mine"):
        first = fields(model, fingerprint=fingerprint)
        found = fields(model, fingerprint=fingerprint, model=said)
        assert differs(first, found) == {"load format"}


@pytest.mark.slow
def test_load_formats_that_read_the_same_files_name_pages_alike(model):
    first = fields(model)
    for load_format in identity.SAFETENSORS:
        assert fields(model, model={"load_format": load_format}) == first


@pytest.mark.slow
def test_the_configuration_in_use_names_pages_wherever_it_comes_from(model, monkeypatch):
    first = fields(model)
    assert fields(model, model={"decrypted_config_file": "/tmp/plain.json"}) == first
    other = sglang_stub.Config(rope_theta=500.0)
    monkeypatch.setattr(sglang_stub.target.model_config, "hf_config", other)
    assert differs(first, fields(model)) == {"config"}


@pytest.mark.slow
def test_forward_hooks_name_pages_with_their_code(model, tmp_path, monkeypatch):
    code = tmp_path / "steer.py"
    code.write_text("by = 1")
    steer = ModuleType("steer")
    steer.__file__ = str(code)
    monkeypatch.setitem(sys.modules, "steer", steer)
    hook = {"name": "steer", "target_modules": ["mlp"], "config": {"by": 1}}
    said: dict[str, Any] = {}
    for path in ("steer:make", "steer.make"):
        said = {"forward_hooks": [{**hook, "hook_factory": path}]}
        first = fields(model, observability=said)
        assert differs(fields(model), first) == {"hooks", "observability.forward_hooks"}
        code.write_text(code.read_text() + "1")
        assert differs(first, fields(model, observability=said)) == {"hooks"}
    first = fields(model, observability=said)
    said["forward_hooks"][0]["config"] = {"by": 2}
    changed = {"observability.forward_hooks"}
    assert differs(first, fields(model, observability=said)) == changed


@pytest.mark.slow
def test_unreadable_weights_are_refused_unless_the_user_names_them(model, monkeypatch):
    monkeypatch.setattr(sglang_stub.target, "model", torch.nn.Linear(4, 4, device="meta"))
    what = r"model.fingerprint: the weights of rank 0 cannot be read: .*bias is not in the memory"
    with pytest.raises(ValueError, match=what):
        fields(model)
    assert fields(model, fingerprint="mine")["weights"] == "given mine"
    monkeypatch.setattr(sglang_stub.target, "model", object())
    with pytest.raises(ValueError, match="object is not a PyTorch module"):
        fields(model)
    monkeypatch.setattr(sglang_stub.target, "model_config", None)
    with pytest.raises(ValueError, match="rank 0 cannot be read: AttributeError"):
        fields(model, fingerprint="mine")
    monkeypatch.setattr(sglang_stub.target, "is_draft_worker", True)
    with pytest.raises(ValueError, match="the model is not found in this process"):
        fields(model)


@pytest.mark.slow
def test_ranks_share_one_name_made_from_the_weights_of_all(model, monkeypatch):
    """Each rank holds a part of the weights; the stack that they share has one name."""
    told = []

    def gathered(mine):
        told.append(mine)
        return list(told)

    first = fields(model)
    monkeypatch.setattr(models, "_gathered", gathered)
    assert fields(model) == first
    assert fields(model) == first  # the second rank's are the same
    with torch.no_grad():
        sglang_stub.target.model.weight[0] += 1
    assert differs(first, fields(model)) == {"weights"}
    told.append(({}, "it has no memory"))
    with pytest.raises(ValueError, match="the weights of rank 3 cannot be read: it has no memory"):
        fields(model)


@pytest.mark.slow
def test_models_are_found_where_the_collector_was_frozen(model):
    """SGLang's ``/freeze_gc`` does that, and kvladder may be attached after it."""
    first = fields(model)
    assert gc.get_freeze_count() == 0
    gc.freeze()
    assert fields(model) == first
    assert gc.get_freeze_count() > 0


@pytest.mark.slow
def test_every_group_of_settings_names_pages(model):
    said: dict[str, Any] = {}
    for namespace in sglang_stub.NAMESPACES:
        below = sglang_stub.Bag(**{f"below_{namespace}": 1})
        said[namespace] = {f"new_{namespace}": 1, "below": below}
    names = {f"{name}.new_{name}" for name in said} | {f"{n}.below.below_{n}" for n in said}
    first = fields(model, **said)
    assert differs(fields(model), first) == names
    for namespace, settings in said.items():
        settings[f"new_{namespace}"] = 2
    assert differs(first, fields(model, **said)) == {f"{name}.new_{name}" for name in said}


@pytest.mark.slow
def test_a_setting_is_left_out_by_its_whole_name_and_namespace(model):
    kernel, features = sglang_stub.Bag(sampling_backend="x"), sglang_stub.GIVEN["exec"]["features"]
    features = sglang_stub.Bag(**vars(features), watermark_key=3)
    said: dict[str, Any] = {
        "exec": {"kernel": kernel, "features": features},
        "serving": {"port": 1},
    }
    assert fields(model, **said) == fields(model)
    elsewhere = {"model": {"sampling_backend": "x"}, "exec": {"port": 1}}
    assert differs(fields(model), fields(model, **elsewhere)) == {
        "model.sampling_backend",
        "exec.port",
    }


def test_settings_that_keep_weights_out_of_sight_need_a_name_of_the_users():
    moe = sglang_stub.Bag(kt_weight_path="/experts", enable_paged_experts=False)
    paged = sglang_stub.Bag(kt_weight_path=None, enable_paged_experts=True)
    offload = sglang_stub.Bag(ple_offload_embedding=True)
    refused: dict[str, dict[str, Any]] = {
        "--kt-weight-path": {"exec": {"moe": moe}},
        "--enable-paged-experts": {"exec": {"moe": paged}},
        "--ple-offload-embedding": {"exec": {"offload": offload}},
        "--load-format": {"model": {"load_format": "expert_pack"}},
    }
    for flag, said in refused.items():
        sglang_stub.give("m", **said)
        with pytest.raises(ValueError, match=f"^{flag}: .*cannot read them.*model.fingerprint"):
            identity.require_named("auto")
        identity.require_named("mine")


@pytest.mark.slow
def test_environment_switches_name_pages(model, monkeypatch):
    first = fields(model)
    monkeypatch.setenv("SGLANG_RUN_ID", "1")
    monkeypatch.setenv("SGLANG_DP_RANK", "1")
    assert fields(model) == first
    monkeypatch.setenv("SGLANG_OPT_NEW_KERNEL", "1")
    assert differs(first, fields(model)) == {"environment.SGLANG_OPT_NEW_KERNEL"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["SGLANG_OPT_USE_MINIMAX_FP8_Q_EPILOGUE", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
     "SGLANG_MOE_CONFIG_DIR", "SGLANG_EXPERT_PACK_PATH", "USE_TRITON_W8A8_FP8_KERNEL"],
)  # fmt: skip
def test_a_switch_is_not_left_out_for_a_part_of_its_name(model, monkeypatch, name):
    first = fields(model)
    monkeypatch.setenv(name, "1")
    assert differs(first, fields(model)) == {f"environment.{name}"}


@pytest.mark.slow
def test_the_layout_of_pages_names_them(model):
    first = fields(model)
    assert differs(first, fields(model, pool=Pool("layer_first"))) == {"kv.layout"}
    other = Pool()
    other.head_dim = 32
    assert differs(first, fields(model, pool=other)) == {"kv.heads"}
    assert differs(first, fields(model, ranks={"pp_size": 2})) == {"pp"}
    assert fields(model, ranks={"tp_size": 2, "tp_rank": 1}) == first  # see the next one


def names(name="kv", pool=None, **ranks):
    return pool_of(pool or Pool(), name, config(None, **ranks), 0).names(chain("a", 2))


def test_ranks_name_pages_alike_where_they_keep_the_same():
    plain = [bytes.fromhex(key) for key in chain("a", 2)]
    several = [{"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"tp_size": 4, "tp_rank": 1}]
    several += [{"attn_cp_size": 2, "attn_cp_rank": rank} for rank in range(2)]
    heads = [names(), *(names(**ranks) for ranks in several)]
    assert heads[0] == plain == names(dp_rank=1)
    assert len({tuple(one) for one in heads}) == 6
    latent = [{"is_mla_model": True, **ranks} for ranks in several[:3]]
    assert all(names(**ranks) == plain for ranks in latent)
    other = [names("indexer", Sparse(), **ranks) for ranks in latent]
    assert other == [other[0]] * 3
    assert other[0] != plain
    states = {tuple(names("mamba", **ranks)) for ranks in latent}
    assert len(states) == 3
    assert names("swa") != names("draft") != plain


def address(settings=None, /, parallel=None, **ranks):
    sglang_stub.give("m", parallel=parallel or {})
    told = config(None, **ranks)
    layout = identity.layout_of([pool_of(Pool(), "kv", told, 0)], told, "w")
    return identity.address_of(told, layout, parse({**SGLANGS, **(settings or HOST)}))


@pytest.mark.slow
def test_ranks_of_one_server_meet(monkeypatch):
    monkeypatch.setenv("SGLANG_RUN_ID", "1")
    assert address() is None
    several = [address(tp_size=2), address(tp_size=2, tp_rank=1)]
    several += [address(parallel={"num_dp_ranks": 2, "dp_rank": rank}) for rank in range(2)]
    assert len({*several}) == 1
    assert len(several[0] or "") < 107
    others = [{"tp_size": 2, "pp_size": 2, "pp_rank": rank} for rank in range(2)]
    found = [address(**ranks) for ranks in others]
    found += [address({"host": size}, tp_size=2) for size in ("2 GiB", "2147487744 B")]
    monkeypatch.setenv("SGLANG_RUN_ID", "2")
    found.append(address(tp_size=2))
    assert len({*several, *found}) == 6, "two of them meet, and are not alike"


@pytest.mark.slow
def test_adapters_of_other_weights_at_one_path_have_other_names(model):
    plain, manager = fields(model), sglang_stub.LoRAManager()
    manager.load("a", "/a", 1)
    first = fields(model)
    assert differs(plain, first) == {"adapters"}
    manager.load("b", "/b", 1, lora_id="loaded while it runs")
    assert fields(model) == first
    manager.load("a", "/a", 2)
    second = fields(model)
    assert differs(first, second) == {"adapters"}
    manager.loras["a /a"].config.lora_alpha = 8
    assert differs(second, fields(model)) == {"adapters"}
    assert differs(second, fields(model, fingerprint="mine")) == {"weights", "adapters"}


@pytest.mark.slow
def test_settings_of_drafts_name_pages(model, tmp_path):
    """The draft's own pages are stored under the same digests."""
    first = fields(model, spec={"speculative_algorithm": None})
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    said = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(folder),
        "speculative_draft_model_revision": None,
    }
    draft = sglang_stub.ModelRunner(1)
    draft.is_draft_worker = True
    second = fields(model, spec=said)
    assert differs(first, second) >= {"draft", "spec.speculative_algorithm"}
    assert second["weights"] == first["weights"]
    torch.nn.init.constant_(draft.model.bias, 2)
    third = fields(model, spec=said)
    assert differs(second, third) == {"draft"}
    draft.model_config.hf_config = sglang_stub.Config(rope_theta=2.0)
    fourth = fields(model, spec=said)
    assert differs(third, fourth) == {"draft"}
    moved = folder.rename(tmp_path / "moved")
    assert fields(model, spec={**said, "speculative_draft_model_path": str(moved)}) == fourth
    (moved / "config.json").write_text("{ }")
    assert fields(model, spec={**said, "speculative_draft_model_path": str(moved)}) != fourth


def test_images_that_clients_name_are_refused():
    sglang_stub.give("m", mm={"trust_mm_content_hashes": True})
    for fingerprint in ("auto", "mine"):
        with pytest.raises(
            ValueError, match="--trust-mm-content-hashes: clients choose the names of images"
        ):
            identity.require_named(fingerprint)
    sglang_stub.give("m")
    identity.require_named("auto")


class Keeper:
    """Counts its notifications."""

    told = 0

    def weights_change(self):
        self.told += 1


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's classes as they are before anything watches them."""
    sglang_stub.forget_watches(monkeypatch)
    sglang_stub.give("m")
    return sglang_stub


def changes():
    """Every way to change weights, by its name."""
    stub = sglang_stub
    arguments: dict[str, dict[str, Any]] = {
        "begin_weight_update": {},
        "end_weight_update": {"run_post_load": True},
        "update_weights_from_disk": {"model_path": "path", "load_format": "auto"},
        "load_weights_from_distributed": {"weights": None},
        "update_weights_from_tensor": {"named_tensors": None},
        "update_weights_from_ipc": {"recv_req": None},
    }
    assert set(arguments) == set(UPDATES)
    ways: dict[str, Callable[[], Any]] = {
        name: partial(getattr(stub.WeightUpdater(), name), **arguments[name]) for name in UPDATES
    }
    checker = stub.WeightChecker()
    ways["handle"] = partial(checker.handle, action="reset_tensors", role="target")

    def forgotten():
        stub.MemorySaver().pause("weights")
        stub.MemorySaver().resume("weights")

    ways["pause"] = forgotten
    return ways


WAYS = {name for names in CHANGES.values() for name in names} - {"resume"}


@pytest.mark.parametrize("name", sorted(WAYS))
def test_a_storage_learns_of_changing_weights(name, sglang):
    watch, one, two = WeightsTracker(), Keeper(), Keeper()
    for keeper in (one, two):
        watch.begin()
        watch.require_known("auto")
        watch.tell(keeper, "auto")
    changes()[name]()
    assert (one.told, two.told) == (1, 1)  # once, though both had registered
    with pytest.raises(ValueError, match=r"weights may have changed .*\(flush it \(POST"):
        watch.require_known("auto")
    sglang.UnifiedRadixCache(None).reset()
    watch.require_known("auto")


def test_actions_that_keep_the_weights_notify_no_storage(sglang):
    watch, one = WeightsTracker(), Keeper()
    watch.begin()
    watch.tell(one, "auto")
    for action in ("snapshot", "compare", "checksum"):
        sglang.WeightChecker().handle(action=action, role="target")
    sglang.MemorySaver().pause("kv_cache")
    kept = {**sglang.GIVEN["exec"], "features": sglang.Bag(enable_weights_cpu_backup=True)}
    sglang.give("m", exec=kept)
    sglang.MemorySaver().pause("weights")
    with pytest.raises(ValueError, match=r"memory of its weights.*POST /resume_memory_occ"):
        watch.require_known("auto")
    sglang.MemorySaver().resume("kv_cache")
    with pytest.raises(ValueError, match="memory of its weights"):
        watch.require_known("mine")
    sglang.MemorySaver().resume("weights")
    assert one.told == 0
    watch.require_known("auto")


def test_a_text_of_the_user_names_weights_until_they_change(sglang):
    watch, one = WeightsTracker(), Keeper()
    watch.begin()
    watch.tell(one, "w1")
    watch.require_known("w1")  # detached and attached
    sglang.WeightUpdater().begin_weight_update()
    sglang.UnifiedRadixCache(None).reset()
    with pytest.raises(ValueError, match=r"model.fingerprint: .* since they were named 'w1'.*auto"):
        watch.require_known("w1")
    watch.require_known("w2")
    watch.require_known("auto")


def test_weights_changed_before_the_watch_began_are_not_trusted(sglang):
    """kvladder is attached to an engine that runs, and its plug-in was not wanted."""
    watch = WeightsTracker()
    watch.begin(is_late=True)
    with pytest.raises(ValueError, match="flush it"):
        watch.require_known("auto")
    sglang.UnifiedRadixCache(None).reset()
    watch.begin(is_late=True)
    watch.require_known("auto")
    watch = WeightsTracker()
    watch.begin()
    watch.begin(is_late=True)  # it has been watched from the start
    watch.require_known("auto")


def test_the_settings_show_whether_sglang_is_starting():
    sglang_stub.give("m")
    assert identity.is_starting()
    sglang_stub.give("m", memory={"hicache_storage_backend": None})
    assert not identity.is_starting()


def test_a_version_with_other_ways_to_change_weights_is_warned_of(caplog, sglang, monkeypatch):
    monkeypatch.delattr(sglang.WeightUpdater, "begin_weight_update")
    monkeypatch.delattr(sglang.UnifiedRadixCache, "reset")
    monkeypatch.delitem(sys.modules, "sglang.srt.utils.weight_checker")
    watch, one = WeightsTracker(), Keeper()
    watch.begin()
    watch.tell(one, "auto")
    for missing in ("WeightUpdater.begin_weight_update", f"{TREE}.reset", "WeightChecker.handle"):
        assert missing in caplog.text
    assert "detach the storage before you change weights" in caplog.text
    assert sglang.WeightUpdater().update_weights_from_disk("path", "auto") == (True, "Succeeded")
    assert one.told == 1
