"""How many bytes of KV cache a token takes, from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvladder.errors import ConfigError, LayoutError
from kvladder.schema import is_mapping

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_RECURRENT: Final = ("layers_block_type", "full_attention_interval", "mamba_d_state", "ssm_cfg")
"""Keys of models in which some layers keep a state instead of KV."""


def bytes_per_token(path: Path, *, dtype: str | None = None) -> int:
    """Bytes of KV per token, all layers and ranks together.

    Parameters
    ----------
    path:
        A model's ``config.json``, or the folder that holds it.
    dtype:
        Of the KV cache; None takes the model's.

    Raises
    ------
    LayoutError
        The file does not say it, or the model keeps something else than KV.
    ConfigError
        The file cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    model = _read(file)
    text = model.get("text_config")
    if is_mapping(text):  # a multimodal model: the language model within
        model = {**model, **text}
    kinds = set(model.get("layer_types") or ()) - _ATTENTION
    recurrent = [key for key in _RECURRENT if model.get(key) is not None]
    if kinds or recurrent:
        what = ", ".join(sorted(kinds) or recurrent)
        raise LayoutError(f"not all layers keep KV: {what}", path=str(file), hint=_HINT)
    name: Any = dtype or model.get("dtype") or model.get("torch_dtype")
    if name not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise LayoutError(f"dtype {name!r}", path=str(file), hint=f"--dtype with one of: {known}")
    return _items(model, file) * ITEM_BYTES[name]


_HINT: Final = "leave --model out; the engine names its layout when it starts"


def _items(model: Mapping[str, Any], file: Path) -> int:
    """Numbers that are kept per token."""
    layers = _number(model, "num_hidden_layers", file)
    if model.get("kv_lora_rank") is not None:  # MLA: one latent vector and one rope key a layer
        rank = _number(model, "kv_lora_rank", file)
        return layers * (rank + _number(model, "qk_rope_head_dim", file))
    heads = _number(model, "num_attention_heads", file)
    kv_heads = heads
    if model.get("num_key_value_heads") is not None:
        kv_heads = _number(model, "num_key_value_heads", file)
    if model.get("head_dim") is not None:
        head_dim = _number(model, "head_dim", file)
    else:
        head_dim = _number(model, "hidden_size", file) // heads
    return 2 * layers * kv_heads * head_dim


def _number(model: Mapping[str, Any], key: str, file: Path) -> int:
    value = model.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        what = "missing" if value is None else repr(value)
        raise LayoutError(f"{key}: {what}", path=str(file), hint=_HINT)
    return value


def _read(file: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(why, path=str(file), hint="expected a model's config.json") from error
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", path=str(file)) from error
    if not is_mapping(found):
        raise ConfigError("not a JSON object", path=str(file), hint="a model's config.json")
    return found
