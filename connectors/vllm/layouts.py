"""The layout of vLLM's KV cache that kvladder asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

PACKED: Final = "BLHNC"
"""All layers of a block lie together, so one copy per block is enough, not one per layer."""


def wanted_layout(vllm_config: Any) -> str | None:
    """Return ``PACKED`` if no block has to be split for it, else None for vLLM's default.

    An attention back end may take only blocks of certain sizes. vLLM then splits its own larger
    blocks, and it refuses to start where packed blocks would have to be split. On a CPU no back
    end takes the layout at all.
    """
    if vllm_config.device_config.device_type == "cpu":
        return None
    cache = vllm_config.cache_config
    if getattr(cache, "kv_cache_dtype_skip_layers", None):  # some layers then have larger blocks
        return None
    backends = [*_backends(vllm_config)]
    if backends:
        size = cache.block_size
        return PACKED if all(_takes(backend, size) for backend in backends) else None
    # The back ends are unknown. vLLM chooses a size that they take, unless a user or a recurrent
    # state fixes the size.
    given = getattr(cache, "user_specified_block_size", True)
    hybrid = getattr(vllm_config.model_config, "is_hybrid", True)
    return None if given or hybrid else PACKED


def _backends(vllm_config: Any) -> Iterator[Any]:
    """Yield the known attention back ends: those of layers in this process, else the set one."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {layer.attn_backend for layer in layers.values() if hasattr(layer, "attn_backend")}
    if found:
        yield from found
        return
    chosen = getattr(vllm_config.attention_config, "backend", None)
    if chosen is not None:
        yield chosen.get_class()


def _takes(backend: Any, size: int) -> bool:
    """Return whether a back end takes blocks of ``size`` tokens without splitting them.

    Some back ends for latent attention take multiples of a size, but for some caches only that
    size, so multiples do not count for them.
    """
    latent = backend.is_mla()
    for one in backend.get_supported_kernel_block_sizes():
        base = getattr(one, "base", None)
        if size == (one if base is None else base):
            return True
        if base is not None and size % base == 0 and not latent:
            return True
    return False
