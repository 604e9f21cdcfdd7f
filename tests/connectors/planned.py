"""vLLM's own planning of a cache, for models of every kind, and its allocation on a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import utils

Groups = list[tuple[int, Any]]
"""The number of layers and vLLM's specification of one, by group."""
CPU = torch.device("cpu")


def planner() -> Callable[..., Any]:
    """vLLM's function that plans a cache; it moved in 0.33."""
    name = "get_kv_cache_config_from_groups"
    for module in ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"):
        if importlib.util.find_spec(module) is not None:
            found = getattr(importlib.import_module(module), name, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
    raise AssertionError(f"this vLLM has no {name}")


def backend(name: str, sizes: Sequence[Any], *, latent: bool = False) -> Any:
    """The part of a back end that planning reads."""
    methods = {
        "get_name": staticmethod(lambda: name),
        "is_mla": classmethod(lambda cls: latent),
        "get_supported_kernel_block_sizes": classmethod(lambda cls, spec=None: list(sizes)),
    }
    return type(name, (), methods)


FLASH_ATTN = backend("FLASH_ATTN", [MultipleOf(16)])
FLASHINFER = backend("FLASHINFER", [16, 32, 64])
FLASHMLA = backend("FLASHMLA", [64], latent=True)
FLASHINFER_MLA = backend("FLASHINFER_MLA", [32, 64], latent=True)


def full(tokens: int, **more: Any) -> Any:
    return specs.FullAttentionSpec(
        **{"block_size": tokens, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
        | more
    )


def latent(tokens: int) -> Any:
    return specs.MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )


def window(tokens: int) -> Any:
    return specs.SlidingWindowSpec(
        block_size=tokens,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        sliding_window=1024,
    )


def hybrid() -> Groups:
    state = specs.MambaSpec(
        block_size=4096,
        shapes=((3, 4096), (32, 128, 64)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=full(528).page_size_bytes,
    )
    return [(2, full(528)), (2, state), (2, state)]


def start(
    layout: str,
    groups: Groups,
    attention: Any,
    *,
    device: torch.device = CPU,
    blocks: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Plan, allocate and map a cache as vLLM does; raise the error that would end its start.

    Return vLLM's configuration of the cache, and the tensors by layer.
    """
    config = MagicMock()
    config.attention_config.hisparse_config = None
    config.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout[layout]
    config.cache_config.num_gpu_blocks_override = blocks
    config.cache_config.prefix_cache_retention_interval = None
    made = [
        specs.KVCacheGroupSpec([f"g{i}.l{n}" for n in range(layers)], spec)
        for i, (layers, spec) in enumerate(groups)
    ]
    planned = planner()(config, made, 64 << 20)
    of_groups = [
        [utils.AttentionGroup(attention, group.layer_names, group.kv_cache_spec, i)]
        for i, group in enumerate(made)
    ]
    kernel = utils.prepare_kernel_block_sizes(planned, of_groups)
    for i, (group,) in enumerate(of_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, specs.AttentionSpec):
            size = utils.select_common_block_size(kernel[i], [attention], [spec])
            if size != spec.block_size and kernel[i] == spec.block_size:
                group.kernel_block_size = size
    tensors = utils.allocate_kv_cache(planned, device, KVCacheLayout[layout], kernel)
    utils.map_kv_caches_to_kernel_blocks(tensors, [one for group in of_groups for one in group])
    return planned, tensors
