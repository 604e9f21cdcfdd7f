"""Proves that a row of a cache holds certain tokens, by computing the first layer for them.

Keys and values of the first layer depend only on a token and its position. So they reveal other
tokens, and padding before the tokens, at the cost of that layer's projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch
from transformers.cache_utils import DynamicCache

from kvladder.errors import LayoutError

TOLERANCE: Final = 0.1
"""Allowed deviation of keys and values, relative to their norm. It is far above the rounding error
of the same token, in any batch, and far below the difference to another token."""
HINT: Final = "expected the tokens of row 0, without padding"


class _Answered(Exception):
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.states = keys[0], values[0]


class _Asking(DynamicCache):  # type: ignore[misc]
    """A cache that ends the pass once the first layer hands over its keys and values."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> NoReturn:
        """Raise ``_Answered`` with the keys and values."""
        raise _Answered(key_states, value_states)


def first_layer(model: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the keys and values that the first layer keeps: ``[heads, tokens, size]``."""
    ids = torch.tensor([list(tokens)], device=model.device)
    try:
        with torch.inference_mode():
            model(ids, past_key_values=_Asking(config=model.config), use_cache=True)
    except _Answered as answer:
        return answer.states
    raise LayoutError("the model does not use the cache object passed to it")


def require_row(model: Any, cache: Any, tokens: Sequence[int]) -> None:
    """Raise LayoutError unless row 0 of a cache begins with these tokens."""
    layer = cache.layers[0]
    for held, right in zip((layer.keys, layer.values), first_layer(model, tokens), strict=True):
        row = held[0, :, : len(tokens)].to(right.device)
        off = (row.float() - right.float()).square().sum((0, 2)).sqrt()
        most = TOLERANCE * right.float().square().sum((0, 2)).sqrt()
        wrong = (~(off <= most)).nonzero()
        if len(wrong):
            what = f"row 0 of the cache has another token at position {int(wrong[0])}"
            raise LayoutError(what, hint=HINT)
