"""What Hugging Face's classes take where a ``config.json`` says nothing, and what is not read here.

Published files leave out what is equal to the default of their class, so the number of bytes
depends on it. A key that changes what layers keep, and is not read, is refused: no number is better
than a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


def _heads(heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {**dict(zip(names, (heads, kv_heads, head_dim), strict=True)), **more}


def _windows(window: int, pattern: int) -> dict[str, int]:
    """Windows in all layers but each ``pattern``-th."""
    return {"sliding_window": window, "sliding_window_pattern": pattern}


_QWEN: Final = {"use_sliding_window": False, "max_window_layers": 28}

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_state": 256},
    "cohere2": _windows(4096, 4),
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "exaone4": _windows(4096, 4),
    "gemma": _heads(16, 16, 256),
    "gemma2": _heads(8, 4, 256, **_windows(4096, 2)),
    "gemma3_text": _heads(8, 4, 256, **_windows(4096, 6)),
    "gemma3n_text": _heads(8, 2, 256, **_windows(512, 5), num_kv_shared_layers=15),
    "glm": _heads(32, 2, 128),
    "glm4": _heads(32, 2, 128),
    "gpt_oss": _heads(64, 8, 64, **_windows(128, 2)),
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4}
    | {"mamba_d_state": 16},
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "llama4_text": _heads(40, 8, 128) | {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "minimax_m2": _heads(48, 8, 128),
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "olmo3": _windows(4096, 4),
    "qwen2": _QWEN,
    "qwen2_5_vl_text": {**_QWEN, "max_window_layers": 80},
    "qwen2_moe": _QWEN,
    "qwen2_vl_text": {**_QWEN, "max_window_layers": 80},
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
    "qwen3_next": _heads(16, 2, 256, full_attention_interval=4)
    | {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "seed_oss": _heads(80, 8, 128),
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
    "starcoder2": {"num_key_value_heads": 2},
    "zamba2": {"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 64},
}
"""By the type of a language model; checked against the classes in tests/unit/test_models.py."""

REFUSED_KEYS: Final = (
    "attention_types",  # GPT-Neo
    "block_configs",  # Nemotron-NAS: heads by layer
    "block_types",  # RecurrentGemma
    "compress_ratios",  # DeepSeek-V4
    "cross_attention_layers",  # Mllama: keys and values of images
    "global_head_dim",  # Gemma 4: heads by kind of layer
    "hybrid_layer_pattern",  # MiMo-V2
    "index_head_dim",  # DeepSeek-V3.2: keys of an indexer
    "is_encoder_decoder",
    "layer_group_size",  # Ling with linear attention
    "linear_attn_config",  # Kimi Linear
    "mamba_step",  # PLaMo 2
    "mb_per_layer",  # Phi-4-flash
    "num_global_key_value_heads",
    "num_key_value_heads_per_layer",  # DeciLM
    "use_cla",  # Hunyuan: layers that share
)
"""Where one of them has a value, and is not false, layers keep something else than is read here."""

REFUSED_TYPES: Final = (
    "gemma4_text",
    "kimi_linear",
    "longcat_flash",
    "minimax",
    "mllama_text_model",
    "modernbert-decoder",
    "recurrent_gemma",
)
"""Models whose classes have such defaults."""


def defaults(model_type: object) -> Mapping[str, Any]:
    """What a class takes for keys that are missing; ``gemma3`` is its ``gemma3_text``."""
    return DEFAULTS.get(f"{model_type}") or DEFAULTS.get(f"{model_type}_text") or {}
