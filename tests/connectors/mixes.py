"""vLLM's configurations of models with every mix of groups, for the simulation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WINDOW, SECTION = 10, 16

MODELS: dict[str, list[tuple[str, int]]] = {
    "full": [("full", 4)],
    "window": [("full", 4), ("window", 4)],
    "windows": [("window", 4), ("full", 4), ("window", 4), ("window", 4)],
    "uneven": [("full", 8), ("window", 4)],
    "only window": [("window", 4)],
    "local": [("full", 4), ("local", 4)],
    "state": [("full", 8), ("state", 8)],
    "states": [("state", 8), ("state", 8), ("full", 8)],
    "all": [("full", 8), ("window", 4), ("state", 16)],
}
"""The groups of each model by name: kind and tokens per block."""


PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
"""The ``config.json`` of vLLM's model; nothing of it is computed."""


def spec(kind: str, tokens: int, page: int, retention: int | None = None) -> Any:
    """Return vLLM's specification of a group with blocks of ``page`` bytes."""
    from vllm.v1 import kv_cache_interface as vllm

    if kind == "state":
        return vllm.MambaSpec(
            block_size=tokens,
            shapes=((1, 1), (1, 2)),
            dtypes=(torch.int64, torch.int64),
            page_size_padded=page,
            mamba_cache_mode="align",
        )
    shape: dict[str, Any] = {
        "block_size": tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.int64,
        "page_size_padded": page,
    }
    if kind == "window":
        return vllm.SlidingWindowSpec(**shape, sliding_window=WINDOW)
    if kind == "local":
        return vllm.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=SECTION)
    return vllm.FullAttentionSpec(**shape)


def vllm_configs(
    folder: Path,
    source: Mapping[str, Any],
    groups: Sequence[tuple[str, int]],
    *,
    blocks: int = 120,
    budget: int = 32,
    ranks: int = 1,
    overlap: bool = False,
    interval: int | None = None,
    adapters: int = 2,
) -> tuple[Any, Any]:
    """Return vLLM's VllmConfig and KVCacheConfig."""
    from vllm import config as vllm
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    (folder / "config.json").write_text(json.dumps(PLAIN))
    page = max(tokens for _, tokens in groups) * 16
    kv_config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"l{i}"], spec(kind, tokens, page))
            for i, (kind, tokens) in enumerate(groups)
        ],
        kv_cache_layout="LBHNC",
        prefix_cache_retention_interval=interval,
    )
    states = any(kind == "state" for kind, _ in groups)
    cache = vllm.CacheConfig(
        block_size=max(tokens for kind, tokens in groups if kind == "state" or not states),
        enable_prefix_caching=True,
        mamba_cache_mode="align" if states else "none",
    )
    cache.num_gpu_blocks = blocks
    vllm_config = vllm.VllmConfig(
        model_config=vllm.ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256
        ),
        cache_config=cache,
        scheduler_config=vllm.SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            max_model_len=256,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=overlap,
            policy="priority",
        ),
        device_config=vllm.DeviceConfig("cpu"),
        load_config=vllm.LoadConfig(load_format="dummy"),
        kv_transfer_config=vllm.KVTransferConfig(
            kv_connector="KVLadderConnector",
            kv_connector_module_path="kvladder.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=dict(source),
        ),
    )
    vllm_config.parallel_config.tensor_parallel_size = ranks
    vllm_config.lora_config = vllm.LoRAConfig(max_loras=adapters, max_cpu_loras=adapters)
    return vllm_config, kv_config
