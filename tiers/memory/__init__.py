"""A tier over ordinary memory: the reference for authors, and a cold tier for tests."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvladder.tiers.memory.tier import MemoryTier as MemoryTier


def __getattr__(name: str) -> Any:
    if name == "MemoryTier":  # imported on first use, so that its type can be read without it
        from kvladder.tiers.memory.tier import MemoryTier

        return MemoryTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
