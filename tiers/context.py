"""The objects that a tier gets at ``open``: the arena, clocks, threads for blocking calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvladder.arena import Arena
from kvladder.keys import Namespace
from kvladder.layout import Layout


class Blocking(Protocol):
    """Runs a blocking function in a thread; a cancellation waits until the function has ended."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


class Progress(Protocol):
    """A callback for the progress of a long call; both numbers may be estimates."""

    def __call__(self, done: int, total: int, /) -> object: ...


class Clock(Protocol):
    """The two clocks; all code that depends on time asks one of them."""

    def now(self) -> float:
        """Return monotonic seconds: the event loop's time."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch, for times that outlive the process."""
        ...


@dataclass(frozen=True)
class TierContext:
    """The objects and limits that a level gives its tier at ``open``; the level owns them."""

    arena: Arena
    layout: Layout
    namespace: Namespace
    capacity_blocks: int
    clock: Clock
    run_blocking: Blocking
    say: Callable[[str], None] = lambda _text: None
    """Logs a message for the operator of the engine, at most once a minute."""
    timeout_s: float | None = None
    """Seconds after which the level abandons a ``get`` or ``put``, with all its results so far."""
    required: bool = False
    """True if the cache must not start without the tier. A tier that otherwise opens without a
    connection and connects later raises ``Unavailable`` instead."""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields from which the namespace is computed, for people: ``kvladder.tiers.fields.told``."""
