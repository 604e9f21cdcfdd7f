"""Counters of one level, as plain numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class LevelStats:
    """What one level did since it was opened. Blocks unless a name says otherwise."""

    hits: int = 0
    """Blocks served from this level."""
    misses: int = 0
    """Blocks that the index named but the tier did not deliver."""
    stored: int = 0
    stored_bytes: int = 0
    stored_s: float = 0.0
    """Seconds during which writes were under way."""
    loaded: int = 0
    loaded_bytes: int = 0
    loaded_s: float = 0.0
    """Seconds during which reads were under way."""
    recovered: int = 0
    evicted: int = 0
    expired: int = 0
    removed: int = 0
    errors: int = 0
    """Calls that failed, time-outs included."""
    timeouts: int = 0
    throttled: int = 0
    """Blocks not fetched because of the fetch budget or for want of slots."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Blocks that could have been kept and were not, by reason."""

    def as_dict(self) -> dict[str, int | float]:
        """Flat numbers; the drops appear as ``dropped_<reason>``."""
        flat: dict[str, int | float] = {
            name: getattr(self, name) for name in self.__slots__ if name != "dropped"
        }
        flat.update({f"dropped_{reason}": count for reason, count in self.dropped.items()})
        return flat
