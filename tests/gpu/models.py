"""The parts of public models' ``config.json`` that describe their caches."""

from __future__ import annotations

from typing import Any

LLAMA_3_70B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "hidden_size": 3584, "sliding_window": 131072,
    "use_sliding_window": False, "max_window_layers": 28, "torch_dtype": "bfloat16",
}  # fmt: skip
FALCON_7B: dict[str, Any] = {
    "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71,
    "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_2_9B: dict[str, Any] = {
    "model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "hidden_size": 3584, "head_dim": 256, "sliding_window": 4096,
    "torch_dtype": "float32",
}  # fmt: skip
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560,
        "sliding_window": 1024,
    },
}  # fmt: skip
GEMMA_3_12B: dict[str, Any] = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "hidden_size": 3840, "sliding_window": 1024,
    },
}  # fmt: skip
GEMMA_3N: dict[str, Any] = {
    "model_type": "gemma3n", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3n_text", "num_hidden_layers": 35, "num_kv_shared_layers": 15,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
}  # fmt: skip
GLM_4_9B: dict[str, Any] = {
    "model_type": "chatglm", "num_layers": 40, "num_attention_heads": 32, "hidden_size": 4096,
    "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2_1B: dict[str, Any] = {
    "model_type": "lfm2", "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 2048, "conv_dim": 2048, "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "torch_dtype": "bfloat16",
}  # fmt: skip
_SHARED = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)
ZAMBA_2_7B: dict[str, Any] = {
    "model_type": "zamba2", "num_hidden_layers": 81, "num_attention_heads": 32,
    "num_key_value_heads": 32, "attention_head_dim": 224, "kv_channels": 112, "hidden_size": 3584,
    "layers_block_type": ["hybrid" if at in _SHARED else "mamba" for at in range(81)],
    "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 2,
    "mamba_headdim": 64, "n_mamba_heads": 112, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 2880, "head_dim": 64, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "hidden_size": 2048, "head_dim": 256, "full_attention_interval": 4,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
BAMBA_9B: dict[str, Any] = {
    "model_type": "bamba", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h", "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "attention_head_dim": 128,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1", "num_hidden_layers": 36, "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 2048, "head_dim": 64, "mamba_n_heads": 48,
    "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
CODESTRAL_MAMBA: dict[str, Any] = {
    "model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "num_heads": 128,
    "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_4: dict[str, Any] = {
    "model_type": "llama4", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "hidden_size": 5120, "head_dim": 128,
        "attention_chunk_size": 8192, "no_rope_layers": [],
    },
}  # fmt: skip
