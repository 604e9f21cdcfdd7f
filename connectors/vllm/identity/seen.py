"""Messages between the halves about weights and LoRA adapters; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """A rank's finding when it looked at its weights, or at one adapter, in a step."""

    changes: int
    """Number of changes so far."""
    digest: bytes
    """Digest of what is in memory; empty for an adapter that is not there."""
    doubt: int
    """Number of the latest doubt after which the rank has looked."""
    step: int
    """The first step that may have computed with these weights."""
    adapters: Mapping[int, Seen] = field(default_factory=dict[int, "Seen"])
    """News of LoRA adapters, by number."""


@dataclass(frozen=True)
class Wanted:
    """A LoRA adapter that ranks must have in memory, so that its digest is known."""

    request: Any
    """vLLM's LoRARequest."""
    doubt: int
    """Number of the latest doubt about this adapter; ranks read it again if they read it before."""
    kept: frozenset[int]
    """Numbers of the adapters that requests use; these are not evicted for it."""
