"""Windows of attention that settings give to single layers of a model, narrower than its own."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
# Transformers says a part of its types only.

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvladder.errors import ConfigError

NAME: Final = "kvladder-windows"
"""The attention, as Transformers calls it during a pass."""
USUAL: Final = "sdpa"
_windows: ContextVar[Sequence[int]] = ContextVar("windows")
"""By layer, how many tokens it sees; 0 for as many as the model says."""


def require_narrowable(model: Any) -> None:
    """Raise ConfigError unless the windows of single layers can be narrowed."""
    said = model.config._attn_implementation
    if said != USUAL:
        hint = f'load the model with attn_implementation="{USUAL}", or leave it out'
        raise ConfigError(f"attention by {said!r}", path="gpu.windows", hint=hint)


@contextmanager
def narrowed(model: Any, windows: Sequence[int]) -> Generator[None]:
    """Have the layers of a model see no more than this, for the passes within."""
    token, config = _windows.set(windows), model.config
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = USUAL
        _windows.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """``sdpa``, over the newest keys alone: those that the cache has for the layer."""
    window = _windows.get()[module.layer_idx]
    if window:
        new, seen = query.shape[2], key.shape[2]
        tokens = torch.arange(seen, device=key.device)
        own = tokens[-new:, None]
        near = (tokens <= own) & (tokens > own - window)
        near = near[None, None]
        if attention_mask is not None:  # made for what the model itself says
            near = attention_mask[..., -seen:] & near
        attention_mask = near.expand(len(query), -1, -1, -1)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
