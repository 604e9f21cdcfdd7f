"""Detects changed weights in a running SGLang, which tells neither its hashes nor its storage."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, Final, Protocol
from weakref import WeakSet

from kvladder.errors import ConfigError

logger = logging.getLogger("kvladder.sglang")

UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
CHECKER: Final = "sglang.srt.utils.weight_checker:WeightChecker"
SAVER: Final = "sglang.srt.utils.torch_memory_saver_adapter:_TorchMemorySaverAdapterReal"
TREE: Final = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
WEIGHTS: Final = "weights"
"""SGLang's tag of the weights' memory."""
UPDATES: Final = (
    "begin_weight_update",
    "end_weight_update",
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""The methods of SGLang's ``WeightUpdater`` that change weights."""
CHANGES: Final[Mapping[str, tuple[str, ...]]] = {
    UPDATER: UPDATES,
    CHECKER: ("handle",),
    SAVER: ("pause", "resume"),
}
"""SGLang's methods that change weights or release their memory, or may do so, by class."""


class WeightNamed(Protocol):
    """A storage that names pages after the weights."""

    def weights_change(self) -> None:
        """Take note that weights are about to change. Called on the scheduler's thread."""
        ...


class WeightsTracker:
    """Notices changed weights and flushed caches in this process, from ``begin`` on."""

    def __init__(self) -> None:
        self._keepers: WeakSet[Any] = WeakSet()
        self._has_begun = False
        self._is_stale = False
        """True if SGLang's pools may hold pages of earlier weights."""
        self._are_away = False
        """True while SGLang has released the memory of the weights."""
        self._fingerprints: set[str] = set()
        """Users' fingerprints of the weights that are in memory."""
        self._spent: set[str] = set()
        """Users' fingerprints of weights that are no longer in memory."""

    def begin(self, *, is_late: bool = False) -> None:
        """Watch SGLang's classes from now on. Does nothing when called again.

        ``is_late`` means that requests were computed before. Weights may have changed since then,
        so they count as changed.
        """
        if self._has_begun:
            return
        self._has_begun, self._is_stale = True, is_late
        missing: list[str] = []
        for where, names in CHANGES.items():
            kind = _class_at(where)
            for name in names:
                if hasattr(kind, name):
                    setattr(kind, name, self._told_before(getattr(kind, name)))
                else:
                    missing.append(f"{where}.{name}")
        tree = _class_at(TREE)
        if hasattr(tree, "reset"):
            tree.reset = self._told_after(tree.reset)
        else:
            missing.append(f"{TREE}.reset")
        if missing:
            logger.warning(
                "this version of SGLang has no %s, so kvladder may miss a change of weights or a"
                " flush: detach the storage before you change weights, and flush the cache before"
                " you attach it again",
                ", ".join(missing),
            )

    def tell(self, keeper: WeightNamed, fingerprint: str) -> None:
        """Notify ``keeper`` of each change from now on; ``fingerprint`` is its weights' name."""
        self._keepers.add(keeper)
        if fingerprint != "auto":
            self._fingerprints.add(fingerprint)

    def _told_before(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(update)
        def telling(*args: Any, **kwargs: Any) -> Any:
            told = (*args[1:], *kwargs.values())
            if update.__name__ in ("pause", "resume") and WEIGHTS in told:
                self._are_away = update.__name__ == "pause"
            if _changes(update.__name__, told):
                self._change()
            return update(*args, **kwargs)

        return telling

    def _change(self) -> None:
        self._is_stale = True
        self._spent |= self._fingerprints
        self._fingerprints.clear()
        for keeper in list(self._keepers):
            keeper.weights_change()

    def _told_after(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(reset)
        def telling(*args: Any, **kwargs: Any) -> Any:
            found = reset(*args, **kwargs)
            self._is_stale = False
            return found

        return telling

    def require_known(self, fingerprint: str) -> None:
        """Raise ConfigError if pages could get a name that does not match their weights."""
        if self._are_away:
            raise ConfigError(
                "SGLang has released the memory of its weights, so they cannot be read",
                hint="let it resume (POST /resume_memory_occupation), then attach kvladder",
            )
        if self._is_stale:
            raise ConfigError(
                "weights may have changed since SGLang's cache was filled: it may still hold pages"
                " of other weights",
                hint="flush it (POST /flush_cache), then attach kvladder",
            )
        if fingerprint in self._spent:
            raise ConfigError(
                f"the weights have changed since they were named {fingerprint!r}",
                path="model.fingerprint",
                hint="set another text, or auto to read the weights in memory",
            )


def _class_at(where: str) -> Any:
    """Return a class of SGLang's, or None if this version lacks it."""
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _changes(name: str, told: Collection[Any]) -> bool:
    """Return whether a call of one of SGLang's methods, with these arguments, changes weights."""
    if name == "handle":
        return "reset_tensors" in told
    if name == "pause":  # releases memory; weights with a backup on the host come back unchanged
        from sglang.srt.runtime_context import get_exec

        return WEIGHTS in told and not get_exec().features.enable_weights_cpu_backup
    return name in UPDATES


def is_scheduler() -> bool:
    """Return whether this process has loaded SGLang's weight updater, so it computes."""
    return UPDATER.partition(":")[0] in sys.modules


watch = WeightsTracker()
"""Tracker of this process."""
