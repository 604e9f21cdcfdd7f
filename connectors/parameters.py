"""A digest of a model that is in memory: of its configuration and of all of its parameters."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import torch
from xxhash import xxh3_128_digest

WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By size of an element, what its bits are read as; larger ones as several of 64 bits."""
PIECE: Final = 1 << 22
"""Words that are mixed at a time, 32 MiB each for a few intermediate results."""
STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
ROUNDS: Final = (
    (30, 0xBF58476D1CE4E5B9 - (1 << 64)),
    (27, 0x94D049BB133111EB - (1 << 64)),
    (31, 1),
)
"""Those of SplitMix64: the constants are what int64 makes of them."""


def model_digest(model: Any) -> str:
    """Digest of a model's configuration, and of every parameter and buffer that it saves."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    state = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        state.update(digest(value))
    return state.hexdigest()


def digest(tensor: torch.Tensor, device: torch.device | None = None) -> bytes:
    """Digest of all of a tensor's bits, computed where it lies or on ``device``: not the same."""
    device = tensor.device if device is None else device
    return on_host(tensor) if device.type == "cpu" else on_device(tensor, device)


def on_host(tensor: torch.Tensor) -> bytes:
    """Digest of all bytes of a tensor in host memory, of 128 bits."""
    flat = tensor.detach().reshape(-1).contiguous()
    return xxh3_128_digest(flat.view(torch.uint8).numpy().data)


def on_device(tensor: torch.Tensor, device: torch.device | None = None) -> bytes:
    """Digest of all bits of a tensor, of 64 bits, computed where it lies or on ``device``.

    Each word is mixed with its position and the results are summed, as integers: the order of a
    sum does not matter, and where one element differs, or two change places, the sum does.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    words = flat.view(WORDS.get(flat.element_size(), torch.int64))
    device = flat.device if device is None else device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), PIECE):
        mixed = words[start : start + PIECE].to(device).to(torch.int64, copy=True)
        mixed += torch.arange(start, start + len(mixed), device=device) * STEP
        for shift, factor in ROUNDS:
            mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
            mixed *= factor
        total += mixed.sum()
    return int(total).to_bytes(8, "little", signed=True)
