"""Models from config.json: one token run through every type of model, and rules that read files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvladder import planning
from kvladder.cli import main
from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.sizing.groups import Layer
from kvladder.planning import rules
from kvladder.planning.models import bytes_per_token, kept_by
from kvladder.planning.reading import ModelFile
from kvladder.planning.rules import REFUSED_KEYS, REFUSED_TYPES, STATED
from tests.gpu import models

BASE: dict[str, Any] = {
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 1024, "torch_dtype": "bfloat16",
}  # fmt: skip

RUNNABLE: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Values that a class's own defaults lack for a working model."""

REVIEWED = "5.19."
"""The version of transformers for which the tables here and in the rules were checked."""
LAYERS = 8
"""Enough to see which layers have windows, and few enough to be made in a moment."""
DEEP = ("gemma3n_text", "gpt_neo", "prophetnet", "zamba", "zamba2")
"""Types with other defaults made for another number of layers."""

NOT_RUN = {
    "blt": "made of several models, each with a cache",
    "cohere_compass_text": "its class's own defaults lack rotary embeddings of each kind of layer",
    "dbrx": "its class refuses what it writes itself",
    "deepseek_v4": "its layers compress what they keep as it grows",
    "gemma4_assistant": "reads the cache of another model",
    "gemma4_unified_assistant": "reads the cache of another model",
    "jetmoe": "asks for as many numbers as it has experts",
    "marian": "its class has no vocabulary by itself",
    "minimax": "its states are in a cache of its own",
    "musicgen": "made of three models, none by itself",
    "musicgen_melody": "made of three models, none by itself",
    "openai-gpt": "its class caches nothing",
    "qwen4_exp": "its class's own defaults lack sizes that depend on each other",
    "qwen4_exp_text": "its class's own defaults lack sizes that depend on each other",
    "reformer": "keeps buckets instead of keys and values",
    "rwkv": "keeps a state in a cache of its own",
    "xlm": "its class caches nothing",
    "xlnet": "computes in float32 alone",
    "xlstm": "keeps states in a cache of its own",
    "xmod": "wants to be told a language",
}
"""Why no token can be run through a model of a class's own defaults."""


def all_types() -> list[str]:
    try:
        from transformers import __version__
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return []
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES] if __version__.startswith(REVIEWED) else []


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def shapes(layers: list[Layer]) -> list[tuple[int, int | None]]:
    return [(layer.token_bytes, layer.window) for layer in layers]


class Asked(dict[str, Any]):
    """A file's values, and the keys that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)


def read(
    folder: Path, values: dict[str, Any], asked: set[str] | None = None
) -> list[tuple[int, int | None]] | None:
    """Return the result of the rules, None if they refuse; ``asked`` gets the keys read."""
    model = ModelFile(written(folder, values), dtype="bfloat16", hint="")
    model.values = seen = Asked(model.values)
    try:
        return shapes(rules.layers(model))
    except LayoutError:
        return None
    finally:
        if asked is not None:
            asked |= seen.keys_asked


def windows(folder: Path, values: dict[str, Any]) -> list[int | None]:
    found = kept_by(written(folder, values)).resources
    return [one.window for one in found if isinstance(one, Layer)]


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "kvladder.planning.running", raising=False)
    monkeypatch.delattr(planning, "running", raising=False)


# ---- every type of model that transformers knows


@pytest.mark.slow
@pytest.mark.parametrize("name", all_types())
def test_rules_and_one_token_agree(name: str, tmp_path: Path) -> None:
    """The rules give for each type the result of one token, or refuse, whatever is left out."""
    from transformers import AutoConfig

    if name.startswith("musicgen"):
        assert name in NOT_RUN
        return
    depth = {} if name in DEEP else {"num_hidden_layers": LAYERS}
    config = AutoConfig.for_model(name, **depth | RUNNABLE.get(name, {}))
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    asked: set[str] = set()
    ruled = read(tmp_path, whole, asked)
    try:
        found = kept_by(written(tmp_path, whole), dtype="bfloat16")
    except LayoutError:
        assert name in NOT_RUN
        assert ruled is None
        return
    if name in NOT_RUN:
        assert found.how.startswith("estimated from config.json (")
    else:
        assert found.how.startswith("measured by running one token through")
        layers = [one for one in found.resources if isinstance(one, Layer)]
        assert ruled in (None, shapes(layers))
        assert ruled is None or len(layers) == len(found.resources)
    inner = whole.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else whole
    sizes = {*rules._LAYERS, *rules._HEADS, *rules._HIDDEN}  # which every file has
    for key in (text.keys() & asked) - sizes - {"model_type"}:
        rest = {each: value for each, value in text.items() if each != key}
        left = read(tmp_path, rest if text is whole else {**whole, "text_config": rest})
        assert ruled is None or left in (None, ruled), f"{key} is left out"


def test_exceptions_name_only_types_that_exist() -> None:
    types = all_types()
    if not types:
        pytest.skip("the tables are of another version of transformers, or there is none")
    named = {name for names in STATED.values() for name in names.split()}
    assert {*RUNNABLE, *DEEP, *NOT_RUN, *named, *REFUSED_TYPES} <= set(types)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("gemma4_unified_text", 143_360), ("gemma4_text", 143_360), ("deepseek_v32", 85_888)],
)
def test_bytes_per_token_come_from_one_token_where_no_rule_applies(
    name: str, size: int, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("transformers")
    folder = written(tmp_path, {"model_type": name, "dtype": "bfloat16"})
    assert bytes_per_token(folder) == size
    assert main(["size", "--model", str(folder), "--memory", "80GiB", "--context", "4096"]) == 0
    assert "bfloat16, measured by running one token through" in capsys.readouterr().out


# ---- without transformers, and models that it does not know


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_unknown_keys_are_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}: kvladder does not know"):
        bytes_per_token(written(tmp_path, {**BASE, key: [1]}))
    for none in (None, False):
        assert bytes_per_token(written(tmp_path, {**BASE, key: none})) == 8 * 2 * 2 * 128 * 2


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_an_unknown_type_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type: kvladder does not know what layers of"):
        bytes_per_token(written(tmp_path, {**BASE, "model_type": name}))


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("key", STATED)
def test_a_missing_value_that_only_the_class_knows_is_refused(key: str, tmp_path: Path) -> None:
    stated = {**BASE, **dict.fromkeys(STATED, 1), "layer_types": ["full_attention"] * 8}
    for name in STATED[key].split():
        values = {each: value for each, value in stated.items() if each != key}
        values["model_type"] = name
        with pytest.raises(ConfigError, match=rf"{key}: missing.*kvladder\[transformers\]"):
            bytes_per_token(written(tmp_path, values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attn_type_list": [0, 1] * 4}, "attn_type_list: kvladder does not know"),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern: kv"),
        ({"sliding_window": 64, "_sliding_window_pattern": 6}, "_sliding_window_pattern: kv"),
        ({"sliding_window": 64, "use_sliding_window": True}, "layer_types: missing"),
        ({"attention_chunk_size": 64}, "layer_types: missing"),
        ({"v_head_dim": 64}, "v_head_dim: 64, expected 128"),
        ({"multi_query_attention": True}, "multi_query_group_num: missing"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window: missing"),
        (
            {"model_type": "zamba", "mamba_d_state": 16, "num_hidden_layers": "x"},
            "'x'|mamba_d_state",
        ),
    ],
)
def test_wrong_files_are_refused(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        kept_by(written(tmp_path, {**BASE, **values}))


WINDOWS: list[tuple[dict[str, Any], list[int | None]]] = [
    ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, [None] * 8),
    ({"model_type": "qwen2_vl", "sliding_window": 64, "use_sliding_window": False}, [None] * 8),
    ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 8),
    ({"model_type": "mistral", "sliding_window": None}, [None] * 8),
]


@pytest.mark.parametrize("there", [True, False], ids=["with", "without"])
@pytest.mark.parametrize(("values", "expected"), WINDOWS)
def test_windows_are_read_from_config_json(
    values: dict[str, Any],
    expected: list[int | None],
    there: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if not there:
        request.getfixturevalue("without_transformers")
    assert windows(tmp_path, {**BASE, **values}) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}
            | {"max_window_layers": 6},
            [None] * 6 + [64] * 2,
        ),
        ({"model_type": "mistral"}, [4096] * 8),
        ({"model_type": "gemma2"}, [4096, None] * 4),
        ({"model_type": "gemma3_text"}, [4096] * 5 + [None] + [4096] * 2),
        ({"model_type": "exaone4", "sliding_window_pattern": 2}, [4096, None] * 4),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0] * 4}, [8192, None] * 4),
    ],
)
def test_windows_are_taken_from_the_class_where_it_has_them(
    values: dict[str, Any], expected: list[int | None], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    assert windows(tmp_path, {**BASE, **values}) == expected


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("LLAMA_3_70B", 327_680),
        ("MISTRAL_7B", 131_072),
        ("QWEN2_7B", 57_344),
        ("FALCON_7B", 8_192),
        ("GPT2", 73_728),
        ("DEEPSEEK_V3", 70_272),
    ],
)
def test_real_models_are_sized_without_transformers(name: str, size: int, tmp_path: Path) -> None:
    found = kept_by(written(tmp_path, getattr(models, name)))
    layers = [one for one in found.resources if isinstance(one, Layer)]
    assert sum(layer.token_bytes for layer in layers) == size
    missing = "no transformers: install kvladder[transformers] for exact sizes"
    assert found.how == f"estimated from config.json ({missing})"


def test_a_model_that_transformers_does_not_know_is_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "chatglm", "num_layers": 4, "num_attention_heads": 8}
    values |= {"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2}
    found = kept_by(written(tmp_path, {**values, "dtype": "float16"}))
    assert [one.token_bytes for one in found.resources if isinstance(one, Layer)] == [1024] * 4
    assert "does not know 'chatglm'" in found.how


def test_an_error_never_advises_to_leave_out_a_required_argument(
    tmp_path: Path, capsys: Any
) -> None:
    folder = str(written(tmp_path, {**BASE, "block_configs": [1]}))
    assert main(["size", "--model", folder, "--memory", "1GiB", "--context", "64"]) == 2
    said = capsys.readouterr().err
    assert "block_configs" in said
    assert "kvladder.gpu.sizing.plan.CachePlan" in said
    assert "leave out --model" not in said
    with pytest.raises(ConfigError, match="leave out --model"):
        bytes_per_token(tmp_path)
