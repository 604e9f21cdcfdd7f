"""What vLLM must have and be for its blocks to be stored: anything else is refused at start."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from kvladder.errors import ConfigError, LayoutError
from kvladder.gpu.pages import BlockPages

HASHES: Final = ("sha256", "sha256_cbor")
"""vLLM's block hashes that no two prefixes share."""

SPECS: Final = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's kinds of KV cache in which every block of a prefix is kept and means the same."""

_FEATURES: Final = {
    "handle_preemptions": "fencing saves before their blocks are reused",
    "build_connector_worker_meta": "reporting finished copies to the scheduler",
    "get_block_ids_with_load_errors": "recomputing what could not be loaded",
    "set_xfer_handshake_metadata_pp_aware": "describing the workers' KV tensors to the scheduler",
    "has_pending_push_work": "ending saves when no request runs",
    "on_new_request": "fetching early",
    "get_transfer_results": "asynchronous loads",
}


def check_features(base: type) -> None:
    """Raise ConfigError unless vLLM's connector interface has all that is needed.

    Parameters
    ----------
    base:
        vLLM's base class of connectors.
    """
    for name, purpose in _FEATURES.items():
        if not hasattr(base, name):
            raise ConfigError(
                f"this vLLM's connectors lack {name}, needed for {purpose}",
                hint="use vLLM 0.32 or later",
            )


def check_engine(vllm_config: Any) -> None:
    """Raise ConfigError unless the engine is set up in a way that is supported."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for option in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ):
        size = getattr(parallel, option, 1)
        if size != 1:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{size}", path=flag, hint="kvladder supports 1")
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise ConfigError(
            f"{algorithm!r} can give two prefixes one name",
            path="--prefix-caching-hash-algo",
            hint=f"expected {' or '.join(HASHES)}",
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "scales that are found at run time are not part of a block",
            path="--calculate-kv-scales",
            hint="use scales from the checkpoint",
        )


def check_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise LayoutError unless all layers share one kind of block that is supported."""
    model = vllm_config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(spec).__name__ for g in groups for spec in _layer_specs(g).values()})
    unsupported = [kind for kind in kinds if kind not in SPECS]
    if len(groups) != 1 or unsupported:
        raise LayoutError(
            f"{model} has {len(groups)} groups of KV cache ({', '.join(kinds)})",
            hint=f"kvladder supports models with one group, of {' or '.join(SPECS)}",
        )
    tokens = block_tokens(kv_cache_config)
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed not in (None, tokens):
        raise LayoutError(
            f"vLLM hashes every {hashed} tokens, but its blocks have {tokens}",
            hint="leave --prefix-match-unit unset",
        )


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens per block of the only group."""
    size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return size


def _layer_specs(group: Any) -> dict[str, Any]:
    """The specification that vLLM has for each layer of a group, in order."""
    own: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: own.get(name, group.kv_cache_spec) for name in group.layer_names}


def layer_page_bytes(kv_cache_config: Any) -> dict[str, int]:
    """What vLLM says a block takes in each layer, padding not counted."""
    specs = _layer_specs(kv_cache_config.kv_cache_groups[0])
    return {
        name: getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
        for name, spec in specs.items()
    }


def tensor_fields(
    vllm_config: Any, tensors: Mapping[str, torch.Tensor], pages: BlockPages
) -> dict[str, str]:
    """What of this rank's KV tensors must agree before their bytes may be shared.

    On a CPU the attention kernels pack pages in an order of their own, which depends on the
    instruction set and may change with vLLM's version.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found = [layers[name] for name in tensors if name in layers]
    backends = {layer.attn_backend.get_name() for layer in found if hasattr(layer, "attn_backend")}
    shapes = {f"{tensor.dtype}{list(tensor.shape[1:])}" for tensor in tensors.values()}
    fields = {
        "kv.pages": pages.describe(),
        "kv.shapes": ",".join(sorted(shapes)),
        "attention": ",".join(sorted(backends)),
    }
    if pages.device.type == "cpu":
        packed = sorted({str(getattr(layer, "isa", "unknown")) for layer in found})
        capability = torch.backends.cpu.get_cpu_capability()
        fields["cpu"] = f"{platform.machine()} {capability} {','.join(packed)}"
        fields["vllm"] = _vllm_version()
    return fields


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)


def this_node() -> str:
    """Names this machine, and this boot of it: shared memory reaches no further."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}"
