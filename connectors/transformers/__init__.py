"""Hugging Face models on block pools: a forward pass reads and writes blocks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvladder.connectors.transformers.model import PooledModel as PooledModel


def __getattr__(name: str) -> Any:
    if name == "PooledModel":  # not before it is asked for: it imports transformers
        from kvladder.connectors.transformers.model import PooledModel

        return PooledModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
