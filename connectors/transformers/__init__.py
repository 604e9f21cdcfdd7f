"""Hugging Face models on block pools, and caches for ``generate`` that grow in place."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvladder.errors import needed

if TYPE_CHECKING:
    from kvladder.connectors.transformers.growing import GrowingCache as GrowingCache
    from kvladder.connectors.transformers.growing import Prefixes as Prefixes
    from kvladder.connectors.transformers.model import PooledModel as PooledModel

_ROOMS = {"GrowingCache": "growing", "Prefixes": "growing", "PooledModel": "model"}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:  # imported on demand: it imports transformers
        with needed("transformers"):
            return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
