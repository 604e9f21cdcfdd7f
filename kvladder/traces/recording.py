"""A cache manager that records; a cache without a recording has the plain one, at no cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.manager import BatchedFetch, CacheManager, Fetch, Save
from kvladder.policy.fetch_cost import ANYTHING
from kvladder.traces.recorder import Recorder


class RecordingManager(CacheManager):
    """Tells a recorder of the prompts that are looked up; see ``CacheManager``.

    Prefetches, and fetches that are wanted at any cost, are not lookups of a request.
    """

    def __init__(self, recorder: Recorder, **parts: Any) -> None:
        super().__init__(**parts)
        self.recorder = recorder
        """Closed before the cache."""
        self.admit(recorder)
        self.report("record", recorder.stats)

    def fetch(self, keys: Sequence[BlockKey], **told: Any) -> Fetch:
        if not told.pop("is_part", False) and told.get("saves") is not ANYTHING:
            self.recorder.asked(keys)
        return super().fetch(keys, **told)

    def fetch_paced(
        self, keys: Sequence[BlockKey], *, whole_set: bool = False, **told: Any
    ) -> BatchedFetch:
        if whole_set:
            return super().fetch_paced(keys, whole_set=True, **told)
        self.recorder.asked(keys)
        return super().fetch_paced(keys, **told, is_part=True)

    def save(self, keys: Sequence[BlockKey], **told: Any) -> Save:
        self.recorder.saves()
        return super().save(keys, **told)


def require_place(path: Path) -> Path:
    """Return the path of a recording; raise ConfigError if no file can be there."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else f"{path.absolute().parent} is no directory"
        hint = "expected the name of a file in a directory that exists"
        raise ConfigError(f"{path}: {what}", path="record.path", hint=hint)
    return path


def recorder_of(manager: CacheManager) -> Recorder | None:
    """Return the recorder of a cache that records, for a connector that knows requests."""
    return manager.recorder if isinstance(manager, RecordingManager) else None
