"""Weights that are a few bytes, for engines without a model."""

from __future__ import annotations

import hashlib
from typing import Any


class FakeLoaded:
    """The weights of a rank in memory, with the interface of ``weights.Loaded``."""

    def __init__(
        self, content: bytes = b"first", *, failing: Exception | None = None, loras: Any = None
    ) -> None:
        self.content = content
        self.loras = loras
        """vLLM's worker manager of LoRA adapters."""
        self.looked = 0
        """The number of full reads."""
        self.failing = failing
        self._touched = False

    def __call__(self, layers: Any) -> Any:
        """Return itself, as a worker half constructs it."""
        return self

    def load(self, content: bytes, *, noticed: bool = True) -> None:
        """Put other weights in memory; ``noticed`` says whether the watch sees it."""
        self.content = content
        self._touched = self._touched or noticed

    def touched(self) -> bool:
        return self._touched

    def fingerprint(self) -> bytes:
        self._touched = self.failing is not None
        self.looked += 1
        if self.failing is not None:
            raise self.failing
        return hashlib.sha256(self.content).digest()

    def close(self) -> None:
        pass
