"""What SGLang is told: settings that are refused, and what names its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connectors import sglang_stub
from tests.connectors.sglang_controller import Pool, Sparse, chain, config

sglang_stub.install()
from kvladder.connectors.sglang import identity  # noqa: E402
from kvladder.connectors.sglang.options import WHERE, parse  # noqa: E402
from kvladder.connectors.sglang.pools import pool_of  # noqa: E402
from kvladder.connectors.sglang.weights import UPDATES, Watch  # noqa: E402

SGLANGS = {"backend_name": "kvladder", "module_path": "m", "class_name": "c", "interface_v1": 1}
HOST = {"host": "1 MiB"}
REDIS = {"type": "redis", "capacity": "1 GiB"}


def tiers(**tier):
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, tier]}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"confg": "a.yaml"}, r"\.confg: unknown key .*'config'"),
        ({"fetch": {"deadline": "10 s"}, **HOST}, r"fetch.deadline: 10 s .*at most 4 s: SGLang"),
        ({"config": "a.yaml", **HOST}, r"\.host: stands beside config .*a.yaml"),
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
    """The folder of a model; its weights may be changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def test_weights_name_pages_whatever_the_model_is_called(model):
    first = fields(model)
    assert fields(model, ranks={"model_name": "another/alias"}) == first
    assert fields(model, ranks={"model_name": None}) == first
    (model / "model.safetensors").write_bytes(b"Weights")
    assert differs(first, fields(model)) >= {"weights"}
    given = fields(model, fingerprint="mine")
    assert given["weights"] == "given mine"


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


def test_a_tokenizer_names_pages_where_a_processor_or_a_draft_reads_it(model, tmp_path):
    (model / "tokenizer.json").write_text("{}")
    assert "model/tokenizer.json" not in fields(model)
    spec = {"speculative_draft_model_path": str(model), "speculative_draft_model_revision": None}
    assert "model/tokenizer.json" in fields(model, spec=spec)
    (model / "config.json").write_text('{"vision_config": {}}')
    assert "model/tokenizer.json" in fields(model)


def test_what_the_engine_computes_with_names_pages(model):
    first = fields(model, exec={"attention_backend": "triton", "attention": sglang_stub.Bag(x=1)})
    changes: dict[str, dict[str, Any]] = {
        "model.quantization": {"model": {"quantization": "fp8"}},
        "exec.attention_backend": {"exec": {"attention_backend": "fa3"}},
        "exec.attention.x": {"exec": {"attention": sglang_stub.Bag(x=2)}},
    }
    same = {"attention_backend": "triton", "attention": sglang_stub.Bag(x=1)}
    for name, change in changes.items():
        said = {"exec": {**same, **change.pop("exec", {})}, **change}
        assert differs(first, fields(model, **said)) == {name}
    without = {**same, "cuda_graph_bs_decode": [1], "sampling_backend": "x", "watermark_key": 3}
    assert fields(model, exec=without, model={"load_format": "dummy"}) == first


def test_a_setting_that_nobody_has_looked_at_names_pages(model):
    assert differs(fields(model), fields(model, model={"yarn_rope": 2})) == {"model.yarn_rope"}


def test_switches_name_pages(model, monkeypatch):
    first = fields(model)
    monkeypatch.setenv("SGLANG_RUN_ID", "1")
    monkeypatch.setenv("SGLANG_DP_RANK", "1")
    assert fields(model) == first
    monkeypatch.setenv("SGLANG_OPT_NEW_KERNEL", "1")
    assert differs(first, fields(model)) == {"environment.SGLANG_OPT_NEW_KERNEL"}


@pytest.mark.parametrize(
    "name",
    ["SGLANG_OPT_USE_MINIMAX_FP8_Q_EPILOGUE", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
     "SGLANG_MOE_CONFIG_DIR", "SGLANG_EXPERT_PACK_PATH", "USE_TRITON_W8A8_FP8_KERNEL"],
)  # fmt: skip
def test_a_switch_is_not_left_out_for_a_part_of_its_name(model, monkeypatch, name):
    first = fields(model)
    monkeypatch.setenv(name, "1")
    assert differs(first, fields(model)) == {f"environment.{name}"}


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


def test_ranks_of_one_server_meet(monkeypatch):
    monkeypatch.setenv("SGLANG_RUN_ID", "1")
    assert address() is None
    several = [address(tp_size=2), address(tp_size=2, tp_rank=1)]
    several += [address(parallel={"num_dp_ranks": 2, "dp_rank": rank}) for rank in range(2)]
    assert len({*several}) == 1
    assert len(several[0] or "") < 107
    others = [{"tp_size": 2, "pp_size": 2, "pp_rank": rank} for rank in range(2)]
    found = [address(**ranks) for ranks in others]
    found.append(address({"host": "2 MiB"}, tp_size=2))
    monkeypatch.setenv("SGLANG_RUN_ID", "2")
    found.append(address(tp_size=2))
    assert len({*several, *found}) == 5


def test_adapters_of_other_weights_at_one_path_have_other_names(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    said = [SimpleNamespace(lora_name="a", lora_path=str(adapter), lora_id="same")]
    first = fields(model, lora={"lora_paths": said})
    assert fields(model, lora={"lora_paths": {"a": str(adapter)}}) == first
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert differs(first, fields(model, lora={"lora_paths": said})) == {"adapters"}
    assert differs(first, fields(model)) == {"adapters"}


def test_what_makes_drafts_names_pages(model, tmp_path):
    """Its own pages are below the same digests."""
    first = fields(model, spec={"speculative_algorithm": None})
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"one")
    said = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(draft),
        "speculative_draft_model_revision": None,
    }
    second = fields(model, spec=said)
    assert differs(first, second) >= {"draft", "spec.speculative_algorithm"}
    (draft / "model.safetensors").write_bytes(b"two")
    assert differs(second, fields(model, spec=said)) >= {"draft"}
    moved = draft.rename(tmp_path / "moved")
    third = fields(model, spec={**said, "speculative_draft_model_path": str(moved)})
    assert differs(second, third) == {"draft"}


def test_images_that_clients_name_are_refused():
    sglang_stub.give("m", mm={"trust_mm_content_hashes": True})
    with pytest.raises(ValueError, match="--trust-mm-content-hashes: clients name images"):
        identity.require_named()
    sglang_stub.give("m")
    identity.require_named()


class Keeper:
    """Counts what it is told."""

    told = 0

    def weights_change(self):
        self.told += 1


@pytest.mark.parametrize("name", UPDATES)
def test_a_storage_hears_of_weights_that_change(name):
    class Updater(sglang_stub.WeightUpdater):
        pass

    watch, one, two = Watch(), Keeper(), Keeper()
    watch.tell(one, Updater)
    watch.tell(two, Updater)
    watch.require_known("auto")
    arguments = {"update_weights_from_disk": ("path", "auto"), "begin_weight_update": ()}
    getattr(Updater(), name)(*arguments.get(name, (None,)))
    assert (one.told, two.told) == (1, 1)  # once, though both had asked
    with pytest.raises(ValueError, match=r"model.fingerprint: weights were changed while"):
        watch.require_known("auto")
    watch.require_known("mine")


def test_a_version_that_changes_weights_otherwise_is_said(caplog):
    class Other:
        def update_weights_from_disk(self):
            return "done"

    watch, one = Watch(), Keeper()
    watch.tell(one, Other)
    assert "weights are not changed by begin_weight_update" in caplog.text
    assert Other().update_weights_from_disk() == "done"
    assert one.told == 1
