"""Digests of tensors, and of a model's parameters in memory."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any, Final

import torch
from xxhash import xxh3_128_digest

FORMAT: Final = b"kvladder words on a device 2"
WORD: Final = 8
PIECE: Final = 1 << 21
"""Number of words mixed at a time. The two buffers of 16 MiB fit into the cache of a large GPU."""
STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
"""Factor of a word's position, from SplitMix64, as int64."""
FACTOR: Final = 0xD6E8FEB86659FD93 - (1 << 64)
"""Factor of the rounds, from degski64, as int64."""
ROUNDS: Final = 3
"""Number of rounds. With two, changes of the highest bits of two words may cancel."""


def model_digest(model: Any) -> str:
    """Return the digest of a model's configuration, and of every parameter and saved buffer."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    state = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        state.update(digest(value))
    return state.hexdigest()


def digest(tensor: torch.Tensor, device: torch.device | None = None) -> bytes:
    """Return the digest of all bits of a tensor, computed where it lies or on ``device``.

    A CPU and a GPU give different digests for the same tensor.
    """
    device = tensor.device if device is None else device
    return on_host(tensor) if device.type == "cpu" else on_device(tensor, device)


def on_host(tensor: torch.Tensor) -> bytes:
    """Return a 128-bit digest of all bytes of a tensor in host memory."""
    flat = tensor.detach().reshape(-1).contiguous()
    return xxh3_128_digest(flat.view(torch.uint8).numpy().data)


def on_device(tensor: torch.Tensor, device: torch.device | None = None) -> bytes:
    """Return a digest of all bits of a tensor, computed where it lies or on ``device``.

    Each word of 8 bytes is mixed with its position, and the results are summed as integers of 64
    bits. The order of the summation does not matter. If one word differs, the sum differs. If
    several differ, or words change places, equal sums have a probability of about 2^-64.

    The words are those of the memory, whatever order the dimensions have there. So a transposed
    tensor is not copied. The digest also covers the order of the dimensions. For each byte 18 bytes
    are read or written, mostly in the device's cache.
    """
    whole, order = _by_stride(tensor.detach())
    total = _Sum(whole.device if device is None else device, whole.nbytes)
    for piece in _pieces(whole):
        total.add(piece)
    facts = struct.pack("<qQ", total.value(), whole.nbytes) + bytes(order)
    return xxh3_128_digest(FORMAT + facts)


def _by_stride(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor with its dimensions in the order of memory, and this order.

    Dimensions of one element are left out, because their strides mean nothing.
    """
    tensor = tensor.squeeze()
    order = tuple(range(tensor.dim()))
    if not tensor.is_contiguous():
        strides = tensor.stride()
        order = tuple(sorted(order, key=lambda at: -strides[at]))
    return tensor.permute(order), order


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in pieces; copy only pieces that are not contiguous."""
    most = PIECE * WORD
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1).view(torch.uint8), most)
    elif tensor.nbytes <= most:
        yield tensor.contiguous().view(-1).view(torch.uint8)
    else:
        rows = most // tensor[0].nbytes // WORD * WORD  # then a piece has whole words
        for part in torch.split(tensor, rows) if rows else tensor.unbind():
            yield from _pieces(part)


class _Sum:
    """The sum of all words of a tensor, each mixed with its position."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        words = min(PIECE, -(-size // WORD))
        self._at, self._mixed = (
            torch.empty(words, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._words = 0

    def add(self, piece: torch.Tensor) -> None:
        """Add the words of some bytes; zeros fill up the last word."""
        words = self._aligned(piece)
        first, self._words = self._words, self._words + len(words)
        at, mixed = self._at[: len(words)], self._mixed[: len(words)]
        torch.arange(first, self._words, out=at)
        torch.add(words, at, alpha=STEP, out=mixed)
        low, high = mixed.view(torch.int32).view(-1, 2).unbind(1)
        for number in range(ROUNDS):
            if number:
                mixed.mul_(FACTOR)
            low.bitwise_xor_(high)  # the word is XORed with itself, shifted to the right by 32 bits
        self._total += mixed.sum()

    def _aligned(self, piece: torch.Tensor) -> torch.Tensor:
        """Return bytes as words on the device, in place if they are there and aligned."""
        odd = len(piece) | int(piece.storage_offset()) | piece.data_ptr()
        if odd % WORD or piece.device != self._device:
            size = -(-len(piece) // WORD) * WORD
            whole = torch.empty(size, dtype=torch.uint8, device=self._device)
            whole[-WORD:].zero_()
            whole[: len(piece)].copy_(piece)
            piece = whole
        return piece.view(torch.int64)

    def value(self) -> int:
        """Return the sum as an integer with a sign."""
        return int(self._total)
