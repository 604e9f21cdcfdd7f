"""A ladder of places for the KV cache of an LLM engine, below its GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    __version__: str
    from kvladder.compose import open_cache as open_cache
    from kvladder.errors import ConfigError as ConfigError
    from kvladder.errors import KvladderError as KvladderError
    from kvladder.keys import BlockKey as BlockKey
    from kvladder.keys import KeyScheme as KeyScheme
    from kvladder.layout import Layout as Layout
    from kvladder.manager import CacheManager as CacheManager
    from kvladder.policy.retention import Retention as Retention
    from kvladder.policy.retention import RetentionRange as RetentionRange

__all__ = [
    "BlockKey",
    "CacheManager",
    "ConfigError",
    "KeyScheme",
    "KvladderError",
    "Layout",
    "Retention",
    "RetentionRange",
    "__version__",
    "open_cache",
]

_ROOMS: Final = {
    "errors": ("ConfigError", "KvladderError"),
    "keys": ("BlockKey", "KeyScheme"),
    "layout": ("Layout",),
    "policy.retention": ("Retention", "RetentionRange"),
    "manager": ("CacheManager",),
    "compose": ("open_cache",),
}
"""The modules of the public names, each imported on first use: this file runs for every import."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    for room, names in _ROOMS.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"kvladder.{room}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """Return the version that is installed; ``0+unknown`` in a source tree that is not."""
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version("kvladder"))
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
