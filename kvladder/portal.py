"""What a cache needs of the thread that runs its loop, and of what is closed with it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from kvladder.tiers.ladder.stack import Post

T = TypeVar("T")


class Portal(Protocol):
    """What a manager needs of the loop thread; ``kvladder.runtime.Runtime`` implements it."""

    @property
    def post(self) -> Post:
        """See ``Runtime.post``."""
        ...

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """See ``Runtime.call``."""
        ...

    @property
    def faults(self) -> int:
        """See ``Runtime.faults``."""
        ...

    def close(self, *, timeout_s: float = 2.0) -> None:
        """See ``Runtime.close``."""
        ...


class Closing(Protocol):
    """Something that is closed together with a manager."""

    def close(self) -> None:
        """Close it."""
        ...
