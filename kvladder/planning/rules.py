"""Reads from a ``config.json`` alone what layers of attention keep.

For models that cannot be run (see :mod:`kvladder.planning.running`). If the file is not plain, the
rules refuse it: no number is better than a wrong one.
"""

from __future__ import annotations

from typing import Final

from kvladder.gpu.sizing.groups import Layer
from kvladder.planning.reading import ModelFile
from kvladder.schema import is_list

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "attention_head_dim", "kv_channels")
_WINDOW: Final = ("sliding_window", "sliding_window_size")
_HINT: Final = "pip install kvladder[transformers]"
_KINDS: Final = {
    "full_attention": None,
    "attention": None,
    "sliding_attention": _WINDOW,
    "chunked_attention": ("attention_chunk_size",),
}
"""Keys that give a layer's window, by the name of its kind; None for no window."""

REFUSED_KEYS: Final = (
    # kinds of layers: GPT-Neo, MiniMax, RecurrentGemma, MiMo-V2, Ling, Phi-4-flash
    *("attention_types", "attn_type_list", "block_types", "hybrid_layer_pattern"),
    *("layer_group_size", "mb_per_layer"),
    # heads by layer: Nemotron-NAS, Gemma 4, DeciLM
    *("block_configs", "global_head_dim", "num_global_key_value_heads"),
    "num_key_value_heads_per_layer",
    # more than a layer's own KV, or none of it: DeepSeek, images, Gemma 3n, Hunyuan
    *("compress_ratios", "index_head_dim", "cross_attention_layers", "is_encoder_decoder"),
    *("num_kv_shared_layers", "use_cla"),
    # states: Mamba, Kimi Linear, PLaMo 2, Qwen3-Next, LFM2, Nemotron-H
    *("mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg", "linear_attn_config"),
    *("mamba_step", "full_attention_interval", "conv_L_cache", "full_attn_idxs"),
    "hybrid_override_pattern",
)
"""If one of them has a value and is not false, layers keep something these rules do not cover."""

REFUSED_TYPES: Final = (
    *("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "longcat_flash",
)
"""Types of models that keep something else, though their files do not show it."""

STATED: Final = {
    "head_dim": """
        ernie4_5 gemma gemma2 gemma3 gemma3_text gpt_oss hy_v3 laguna mellum minimax_m2 seed_oss
        solar_open vaultgemma""",
    "layer_types": """
        afmoe cohere2 cohere_compass_text cwm dots1 gemma2 gpt_oss granite_swa granitemoe_swa laguna
        mellum modernbert-decoder olmo3 vaultgemma""",
    "multi_query": "falcon",
    "num_key_value_heads": """
        bitnet cwm dbrx emu3 ernie4_5 ernie4_5_moe gemma2 gemma3 gemma3_text glm glm4 glm4_moe
        gpt_oss granite_swa hy_v3 jetmoe laguna llama4 llama4_text mellum minimax_m2 ministral
        ministral3 mistral mixtral nemotron phi4_multimodal phimoe qwen3_moe seed_oss smollm3
        solar_open starcoder2 vaultgemma""",
    "kv_channels": "jetmoe",
    "sliding_window": "mistral moshi",
}
"""Keys that the files of these types of models must have. Without them the model's class uses
defaults that these rules do not know. Found by tests/unit/test_models.py over all types."""


def layers(model: ModelFile) -> list[Layer]:
    """Return the layers that keep KV; raise LayoutError if the file is not plain about them."""
    for key in REFUSED_KEYS:
        if model.get(key):
            raise model.wrong(f"{key}: kvladder does not know what layers with this key cache")
    types = {model.whole.get("model_type"), model.get("model_type")}
    for name in types.intersection(REFUSED_TYPES):
        raise model.wrong(f"model_type: kvladder does not know what layers of {name} cache")
    for key, of in STATED.items():
        if key not in model.values and types.intersection(of.split()):
            what = f"{key}: missing, and only the model's class has the default"
            raise model.wrong(what, hint=_HINT)
    windows = _windows(model)
    if model.get("kv_lora_rank") is not None:
        size = model.number("kv_lora_rank") + model.number("qk_rope_head_dim")
        heads, factor = 1, 1
    else:
        size, heads, factor = _head_dim(model), _kv_heads(model), 2
    return [
        Layer(f"{at}.kv", heads, size, model.dtype, window, factor)
        for at, window in enumerate(windows)
    ]


def _kv_heads(model: ModelFile) -> int:
    if model.get("multi_query") is True and not model.get("new_decoder_architecture"):
        return 1  # Falcon
    if model.get("multi_query_attention") is True:  # ChatGLM
        return model.number("multi_query_group_num")
    return model.number(*_KV_HEADS, default=model.number(*_HEADS))


def _head_dim(model: ModelFile) -> int:
    if model.get(*_HEAD_DIM) is not None:
        size = model.number(*_HEAD_DIM)
    else:
        size = model.number(*_HIDDEN) // model.number(*_HEADS)
    if model.get("v_head_dim") not in (None, size):
        raise model.wrong(f"v_head_dim: {model.get('v_head_dim')!r}, expected {size}, as keys have")
    return size


def _windows(model: ModelFile) -> list[int | None]:
    """Return how many tokens a token reads, by layer; None for all."""
    named = model.get("layer_types")
    count = model.number(*_LAYERS, default=len(named) if is_list(named) else None)
    if not is_list(named):
        named = [_kind(model)] * count
    unknown = {str(kind) for kind in named} - _KINDS.keys()
    if unknown or len(named) != count:
        kinds = ", ".join(sorted(unknown))
        what = f"unknown kinds {kinds}" if unknown else f"{len(named)} kinds for {count} layers"
        raise model.wrong(f"layer_types: {what}")
    keys = [_KINDS[str(kind)] for kind in named]
    return [None if names is None else model.number(*names) for names in keys]


def _kind(model: ModelFile) -> str:
    """Return the kind of all layers, for a file that does not name each layer's."""
    if model.get("attention_chunk_size") is not None or model.get("use_sliding_window") is True:
        raise model.wrong("layer_types: missing, so it is unknown which layers have a window")
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):
        if model.get(name) is not None:
            raise model.wrong(f"{name}: kvladder does not know which layers have a window")
    if model.get(*_WINDOW) is None or model.get("use_sliding_window") is False:
        return "full_attention"
    return "sliding_attention"
