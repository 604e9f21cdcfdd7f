"""What a config.json says, with the defaults of its class, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvladder.cli import main
from kvladder.errors import ConfigError
from kvladder.gpu.requests.groups import Layer
from kvladder.planning.defaults import DEFAULTS, REFUSED_KEYS, REFUSED_TYPES
from kvladder.planning.models import ModelConfig, bytes_per_token
from tests.gpu import models

BASE: dict[str, Any] = {
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 1024, "torch_dtype": "bfloat16",
}  # fmt: skip


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def windows(folder: Path, values: dict[str, Any]) -> list[int | None]:
    found = ModelConfig(written(folder, values)).resources()
    return [one.window for one in found if isinstance(one, Layer)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_those_of_the_classes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {"hidden_size": 2560, "num_hidden_layers": 54}
    theirs: Any = CONFIG_MAPPING[name](**given)
    ours = ModelConfig(written(tmp_path, {"model_type": name, **given, "dtype": "bfloat16"}))
    for key, value in DEFAULTS[name].items():
        if hasattr(theirs, key):
            assert value == getattr(theirs, key), key
    listed = getattr(theirs, "layer_types", None)
    if listed is not None and name not in ("bamba", "lfm2", "zamba2"):  # these files have lists
        read = {"window": "sliding_attention", "section": "chunked_attention"}
        read |= {"mamba": "linear_attention", "linear": "linear_attention"}
        shared = getattr(theirs, "num_kv_shared_layers", 0)
        kinds = [read.get(kind, "full_attention") for kind in ours.kinds()]
        assert kinds[: 54 - shared] == list(listed)[: 54 - shared]


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_what_is_not_understood_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}: what layers keep"):
        bytes_per_token(written(tmp_path, {**BASE, key: [1]}))
    for none in (None, False):
        assert bytes_per_token(written(tmp_path, {**BASE, key: none})) == 8 * 2 * 2 * 128 * 2


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_a_type_that_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type: what layers of"):
        bytes_per_token(written(tmp_path, {**BASE, "model_type": name}))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attn_type_list": [0, 1] * 4}, "attn_type_list: not all layers"),
        ({"attn_layer_period": 0, "mamba_d_state": 16}, "attn_layer_period: 0"),
        ({"attn_layer_period": 4, "attn_layer_offset": 4}, "attn_layer_period: 4, and 4 is"),
        ({"attn_layer_period": 4, "attn_layer_offset": "x"}, "attn_layer_period: 4, and 'x' is"),
        ({"full_attention_interval": 0}, "full_attention_interval: 0"),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern: 'LL"),
        ({"sliding_window": 64, "sliding_window_pattern": 0}, "sliding_window_pattern: 0"),
        ({"sliding_window": 64, "use_sliding_window": True}, "max_window_layers: None"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers: 8 of 8 layers"),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers: 'x' of 8 layers"),
        ({"attention_chunk_size": 64}, "no_rope_layer_interval: missing"),
        ({"attention_chunk_size": 64, "no_rope_layers": [1]}, r"no_rope_layers: \[1\] for 8"),
        ({"v_head_dim": 64}, "v_head_dim: 64, keys have 128"),
        ({"multi_query_attention": True}, "multi_query_group_num: missing"),
        ({"mamba_d_state": 16}, "the file does not say which"),
        ({"model_type": "zamba", "attn_layer_period": 6, "mamba_d_state": 16}, "does not say"),
    ],
)
def test_wrong_rules_are_named(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelConfig(written(tmp_path, {**BASE, **values})).resources()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "qwen2", "sliding_window": 64}, [None] * 8),
        ({"model_type": "qwen2_vl", "sliding_window": 64}, [None] * 8),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}
            | {"max_window_layers": 6},
            [None] * 6 + [64] * 2,
        ),
        ({"model_type": "mistral"}, [4096] * 8),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 8),
        ({"model_type": "gemma2"}, [4096, None] * 4),
        ({"model_type": "gemma3"}, [4096] * 5 + [None] + [4096] * 2),
        ({"model_type": "exaone4", "sliding_window_pattern": 2}, [4096, None] * 4),
        ({"model_type": "llama4", "no_rope_layers": [1, 0] * 4}, [8192, None] * 4),
        ({"attn_type_list": [1] * 8}, [None] * 8),
    ],
)
def test_windows_where_the_class_has_them(
    values: dict[str, Any], expected: list[int | None], tmp_path: Path
) -> None:
    assert windows(tmp_path, {**BASE, **values}) == expected


@pytest.mark.parametrize("name", ["JAMBA", "BAMBA_9B", "FALCON_H1", "ZAMBA_2_7B"])
def test_states_that_newer_files_call_linear_attention(name: str, tmp_path: Path) -> None:
    values: dict[str, Any] = getattr(models, name)
    one = ModelConfig(written(tmp_path, values))
    newer = {"full": "full_attention", "mamba": "linear_attention", "both": "hybrid"}
    listed = {"layer_types": [newer[kind] for kind in one.kinds()], "layers_block_type": None}
    again = ModelConfig(written(tmp_path, {**values, **listed}))
    assert again.resources() == one.resources()


def test_nothing_is_asked_to_be_left_out_that_is_required(tmp_path: Path, capsys: Any) -> None:
    folder = str(written(tmp_path, {**BASE, "block_configs": [1]}))
    assert main(["size", "--model", folder, "--memory", "1GiB", "--context", "64"]) == 2
    said = capsys.readouterr().err
    assert "block_configs" in said
    assert "kvladder.gpu.sizing.plan.CachePlan" in said
    assert "leave --model out" not in said
    with pytest.raises(ConfigError, match="leave --model out"):
        bytes_per_token(tmp_path)
