"""Attention windows of single layers that settings make narrower than the model's own."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
# Transformers declares only some of its types.

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvladder.connectors.transformers.layers import cache_after
from kvladder.errors import ConfigError

NAME: Final = "kvladder-windows"
"""Name of our attention in Transformers during a pass."""
LOOKING: Final = "kvladder-sources"
"""Name of our attention while ``sources`` learns which layer reads which layer's keys."""
USUAL: Final = "sdpa"
_windows: ContextVar[Mapping[int, int]] = ContextVar("windows")
"""Tokens that each layer sees; 0 for the model's own window."""
_looking: ContextVar[_Given] = ContextVar("looking")


class _Given(DynamicCache):  # type: ignore[misc]
    """A cache that records where each layer's keys are, and which layers read them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.places: dict[int, int] = {}
        """Layer that keeps the keys at each address."""
        self.readers: dict[int, int | None] = {}
        """Layer that keeps the keys that each layer read; None if no layer keeps exactly these."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's new tokens; return the keys and values that it sees; note their address."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.places[keys.data_ptr()] = layer_idx
        return keys, values


def sources(model: Any) -> dict[int, int]:
    """Return the layers that keep no keys of their own, with the layer that each reads.

    Raises
    ------
    ConfigError
        Windows cannot be narrowed: the model's attention is not ``sdpa``, or a layer reads keys of
        an unknown layer.
    """
    said = model.config._attn_implementation
    if said != USUAL:
        hint = f'load the model with attn_implementation="{USUAL}", or leave this out'
        raise ConfigError(f"the model uses attention {said!r}", path="gpu.windows", hint=hint)
    cache = _Given(model.config)
    token = _looking.set(cache)
    try:
        with _attention_by(model, LOOKING):
            cache_after(model, 1, cache=cache)
    finally:
        _looking.reset(token)
    kept, found = {*cache.places.values()}, dict[int, int]()
    for layer, source in cache.readers.items():
        if layer in kept:
            continue
        if source is None:
            what = f"layer {layer} reads keys of another layer, and kvladder does not know which"
            raise ConfigError(what, path="gpu.windows", hint="leave this out")
        found[layer] = source
    return found


@contextmanager
def _attention_by(model: Any, name: str) -> Generator[None]:
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = USUAL


@contextmanager
def narrowed(model: Any, windows: Mapping[int, int]) -> Generator[None]:
    """Narrow the windows of a model's layers in passes within this context."""
    token = _windows.set(windows)
    try:
        with _attention_by(model, NAME):
            yield
    finally:
        _windows.reset(token)


def _seen(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Run ``sdpa``, and record which layer's keys it was given."""
    cache = _looking.get()
    cache.readers[module.layer_idx] = cache.places.get(key.data_ptr())
    return sdpa_attention_forward(module, query, key, *args, **options)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """Run ``sdpa`` over only the newest keys, those within the layer's narrowed window."""
    window = _windows.get()[module.layer_idx]
    if window:
        new, seen = query.shape[2], key.shape[2]
        tokens = torch.arange(seen, device=key.device)
        own = tokens[-new:, None]
        near = (tokens <= own) & (tokens > own - window)
        near = near[None, None]
        if attention_mask is not None:  # its width is that of the model's own window
            near = attention_mask[..., -seen:] & near
        attention_mask = near.expand(len(query), -1, -1, -1)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(LOOKING, _seen)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionMaskInterface.register(LOOKING, sdpa_mask)
