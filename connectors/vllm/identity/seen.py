"""What is told between the halves about weights and LoRA adapters; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """What a rank found when it looked at its weights, or at an adapter, in a step."""

    changes: int
    """How often they have changed."""
    digest: bytes
    """Empty for an adapter that is not in memory."""
    doubt: int
    """The last one that it looked for."""
    step: int
    """The first step that may have computed with them."""
    adapters: Mapping[int, Seen] = field(default_factory=dict[int, "Seen"])
    """By number, what is new of LoRA adapters."""


@dataclass(frozen=True)
class Wanted:
    """A LoRA adapter that is to be in memory, so that it is known what its requests compute."""

    request: Any
    """vLLM's LoRARequest."""
    doubt: int
    """The last one about this adapter: it is read anew if it was read before that."""
    kept: frozenset[int]
    """Numbers of adapters that requests use: they do not make way for it."""
