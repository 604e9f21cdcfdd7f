"""What a tier is given when it is opened: the arena, the clocks, threads for blocking calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvladder.arena import Arena
from kvladder.keys import Namespace
from kvladder.layout import Layout


class Blocking(Protocol):
    """Runs a blocking function off the loop. Cancellation is deferred until the function ended."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


class Progress(Protocol):
    """Told now and then how far something is; both numbers may be estimates."""

    def __call__(self, done: int, total: int, /) -> object: ...


class Clock(Protocol):
    """The two clocks: everything that depends on time asks one of them."""

    def now(self) -> float:
        """Monotonic seconds: the loop's time."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for what outlives the process."""
        ...


@dataclass(frozen=True)
class TierContext:
    """What a level gives its tier at ``open``; owned by the level."""

    arena: Arena
    layout: Layout
    namespace: Namespace
    capacity_blocks: int
    clock: Clock
    run_blocking: Blocking
    say: Callable[[str], None] = lambda _text: None
    """Tells who runs the engine what they should know; logged at most once a minute."""
    timeout_s: float | None = None
    """After how long the level gives up a ``get`` or ``put``, with all that has come by then."""
    required: bool = False
    """Whether the cache is not to start without the tier: one that opens before it has reached
    anything, and connects later, raises ``Unavailable`` instead."""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the namespace is a digest of, for people: see ``kvladder.tiers.fields.told``."""
