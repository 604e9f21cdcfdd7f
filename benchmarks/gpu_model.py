"""A decoder with random weights over a paged KV cache, which kvladder saves and loads.

Its shape is that of a model with 8 billion parameters on a device, and a tiny one for a dry run. It
computes as an engine does: a prompt in parts, then a token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportUnknownVariableType]
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

BLOCK = 16
"""Tokens of a block."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model, and of the load on it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    dtype: torch.dtype
    prompts: tuple[int, ...]
    """Tokens of each prompt in the measurement of the first token."""
    part: int
    """Tokens of a prompt computed at a time."""
    batch: int
    """Number of sequences that generate together."""
    steps: int
    """Steps that they do in a round."""

    @property
    def head(self) -> int:
        """Number of elements of one head."""
        return self.hidden // self.heads

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's KV in all layers."""
        return self.layers * 2 * BLOCK * self.kv_heads * self.head * self.dtype.itemsize


REAL = Shape(32, 4096, 32, 8, 14336, torch.bfloat16, (8192, 32768, 131072), 8192, 32, 64)
DRY = Shape(3, 64, 4, 2, 128, torch.float32, (64, 128), 48, 2, 4)
"""A tiny shape for machines without a device; it only shows that the code runs."""


class Decoder:
    """The model with its KV cache; with ``together``, all layers of a block are side by side."""

    def __init__(self, shape: Shape, device: torch.device, *, blocks: int, together: bool) -> None:
        self.shape, self.device, self.blocks = shape, device, blocks
        kept = (2, BLOCK, shape.kv_heads, shape.head)
        if together:
            whole = self._made(blocks, shape.layers, *kept)
            self.kv = [whole[:, layer] for layer in range(shape.layers)]
        else:
            whole = self._made(shape.layers, blocks, *kept)
            self.kv = [whole[layer] for layer in range(shape.layers)]
        narrow = 2 * shape.kv_heads * shape.head
        self._weights = [
            {
                "in": self._random(shape.hidden, shape.hidden + narrow),
                "out": self._random(shape.hidden, shape.hidden),
                "up": self._random(shape.hidden, 2 * shape.inner),
                "down": self._random(shape.inner, shape.hidden),
            }
            for _ in range(shape.layers)
        ]
        self.embedded = self._random(max(shape.prompts) + BLOCK, shape.hidden)

    def _made(self, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=self.shape.dtype, device=self.device)

    def _random(self, *size: int) -> torch.Tensor:
        made = torch.randn(*size, dtype=self.shape.dtype, device=self.device)
        return made.mul_(size[0] ** -0.5)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The KV cache by layer."""
        return {f"layer{number}": kv for number, kv in enumerate(self.kv)}

    def prefill(
        self,
        table: Sequence[int],
        begin: int,
        end: int,
        wait: Callable[[str], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Compute tokens ``begin <= n < end`` of a prompt with the blocks ``table``.

        Parts begin and end at blocks. ``wait`` is called with each layer before it is read.
        Return the state of the last token.
        """
        assert begin % BLOCK == end % BLOCK == 0
        ids = torch.tensor(table[: end // BLOCK], device=self.device)
        last = self.embedded[:1]
        for first in range(begin, end, self.shape.part):
            stop = min(first + self.shape.part, end)
            x = self.embedded[first:stop]
            for layer in range(self.shape.layers):
                wait(f"layer{layer}")
                x = self._layer(x, layer, ids[: stop // BLOCK], first // BLOCK)
            last = x[-1:]
        return last

    def decode(self, x: torch.Tensor, ids: torch.Tensor, at: int) -> torch.Tensor:
        """Compute a token of each sequence; its KV goes to position ``at``.

        ``ids`` has the blocks of a sequence in each row.
        """
        shape, count = self.shape, len(x)
        for layer, weights in enumerate(self._weights):
            query, key, value = self._projected(x, weights)
            cache = self.kv[layer]
            cache[ids[:, at // BLOCK], 0, at % BLOCK] = key
            cache[ids[:, at // BLOCK], 1, at % BLOCK] = value
            read = cache[ids].transpose(1, 2).reshape(count, 2, -1, shape.kv_heads, shape.head)
            keys, values = self._wide(read.transpose(2, 3)[:, :, :, : at + 1])
            seen = scaled_dot_product_attention(query[:, :, None], keys, values)
            x = self._after(x, seen.reshape(count, -1), weights)
        return x

    def _layer(self, x: torch.Tensor, layer: int, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Compute one layer for tokens of one prompt; they begin at the block ``first``."""
        shape, weights, cache = self.shape, self._weights[layer], self.kv[layer]
        query, key, value = self._projected(x, weights)
        made = torch.stack([key, value], 1).view(-1, BLOCK, 2, *key.shape[1:]).transpose(1, 2)
        cache[ids[first:]] = made
        read = cache[ids].transpose(0, 1).reshape(1, 2, -1, shape.kv_heads, shape.head)
        keys, values = self._wide(read.transpose(2, 3))
        bias: Any = causal_lower_right(len(x), keys.shape[2])
        wide = query.transpose(0, 1)[None]
        seen = scaled_dot_product_attention(wide, keys, values, attn_mask=bias)
        return self._after(x, seen[0].transpose(0, 1).reshape(len(x), -1), weights)

    def _projected(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return query, key and value, ``[tokens, heads, elements]``."""
        shape = self.shape
        found = (rms_norm(x, x.shape[-1:]) @ weights["in"]).view(len(x), -1, shape.head)
        keys, values = shape.heads, shape.heads + shape.kv_heads
        return [found[:, :keys], found[:, keys:values], found[:, values:]]

    def _wide(self, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values per query head, ``[sequences, heads, tokens, elements]``."""
        keys, values = read.unbind(1)
        times = self.shape.heads // self.shape.kv_heads
        return keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)

    def _after(
        self, x: torch.Tensor, seen: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        x = x + seen @ weights["out"]
        inner = rms_norm(x, x.shape[-1:]) @ weights["up"]
        gate, up = inner[:, : self.shape.inner], inner[:, self.shape.inner :]
        return x + (silu(gate) * up) @ weights["down"]
