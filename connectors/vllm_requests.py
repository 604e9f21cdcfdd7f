"""What the scheduler half knows of vLLM's requests, and how their blocks are named."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvladder.connectors.base import Match
from kvladder.connectors.weights import downloaded, weights_digest
from kvladder.gpu.copy import JobId
from kvladder.keys import BlockKey


@dataclass
class RequestState:
    """What is known of one request."""

    request: Any
    adapter: bytes = b""
    """Digest of its LoRA adapter's weights, empty without one."""
    saved: int = 0
    """Its leading blocks that were offered to the cache."""
    match: Match | None = None
    """What the cache has for it, from the time it was looked for until it is loaded."""
    first: int = 0
    """Position of the first block of ``match``."""
    pins: int = 0
    """How many blocks ``match`` counts for while it waits."""
    answer: tuple[int, int] | None = None
    """How many blocks vLLM has itself, and how many more it was told that the cache has."""
    loading: JobId | None = None
    sources: list[str] = field(default_factory=list[str])
    """The levels that the blocks of the last load came from."""
    computes: bool = False
    """Nothing is loaded for it: a load failed, and must not be tried for ever."""
    apart: bool = False
    """Nothing is saved for it either: its blocks cannot be named."""

    def keys(self, start: int, end: int) -> list[BlockKey]:
        """Names of its blocks ``start <= n < end``, as far as vLLM has hashed them.

        vLLM's hash covers tokens, multimodal content, salt, and of an adapter name and path; what
        the adapter's weights are is added here.
        """
        hashes: Sequence[bytes] = self.request.block_hashes[start:end]
        if not self.adapter:
            return [BlockKey(one) for one in hashes]
        return [BlockKey(hashlib.sha256(self.adapter + one).digest()) for one in hashes]


class Adapters:
    """Digests of LoRA adapters, each found out once."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes] = {}

    def digest(self, lora_request: Any) -> bytes:
        """Digest of an adapter's weights; empty without an adapter.

        Raises
        ------
        ConfigError
            They are not on this machine, or not yet.
        """
        if lora_request is None:
            return b""
        key = (int(lora_request.lora_int_id), str(lora_request.lora_path))
        if key not in self._digests or getattr(lora_request, "load_inplace", False):
            path = Path(lora_request.lora_path).expanduser()
            if not path.exists():
                path = downloaded(str(lora_request.lora_path), what="adapter")
            self._digests[key] = bytes.fromhex(weights_digest(path))
        return self._digests[key]
