"""Make a tiny random model that vLLM can serve: ``python tiny_model.py DIRECTORY SEED [KIND]``.

More directories may follow: each gets a model of this kind with the next seed.

Its weights are larger than a trained model's would be, so that its answer depends on the whole
prompt: a wrong KV cache changes the answer.
"""

import sys
from pathlib import Path
from typing import Any

import torch

SHARED: dict[str, Any] = {
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(
    *,
    hidden: int = 256,
    inner: int = 512,
    layers: int = 4,
    heads: int = 8,
    kv: int = 4,
    dim: int = 32,
) -> Any:
    """One group of full attention; 1.5 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=dim,
            **SHARED,
        )
    )


def llama_100m() -> Any:
    """The same with 100 million parameters, for figures."""
    return llama(hidden=768, inner=2560, layers=12, heads=12, dim=64)


def llama_wide() -> Any:
    """The same with little to compute and much to store, 128 KiB a token: cache costs show."""
    return llama(layers=8, heads=16, kv=16, dim=128)


def gemma3() -> Any:
    """Five layers of sliding windows for each one of full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=96,
            **SHARED,
        )
    )


def gpt_oss() -> Any:
    """Sliding windows and full attention in turn, with sinks and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=64,
            **SHARED,
        )
    )


def deepseek() -> Any:
    """Latent attention (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            first_k_dense_replace=3,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_group=1,
            topk_group=1,
            **SHARED,
        )
    )


def qwen3_next() -> Any:
    """Three layers with a recurrent state (gated delta net) for each one of full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            **SHARED,
        )
    )


def phi3() -> Any:
    """LongRoPE: other factors where the longest prompt may have more than 1,024 tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    factors = 16
    return Phi3ForCausalLM(
        Phi3Config(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            original_max_position_embeddings=1024,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 1024,
                "short_factor": [1.0] * factors,
                "long_factor": [1.0 + 0.5 * i for i in range(factors)],
            },
            **SHARED,
        )
    )


KINDS = {
    make.__name__: make
    for make in (llama, llama_100m, llama_wide, gemma3, gpt_oss, deepseek, qwen3_next, phi3)
}


def make(directory: Path, seed: int, kind: str = "llama") -> None:
    """Save a model; other seeds are other weights of the same size."""
    torch.manual_seed(seed)
    KINDS[kind]().save_pretrained(directory)


if __name__ == "__main__":
    directory, seed, *rest = sys.argv[1:]
    for number, one in enumerate([directory, *rest[1:]]):
        make(Path(one), int(seed) + number, *rest[:1])
