"""The first phase of a plan: asks handlers what each layer of a model's cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvladder.config import registry
from kvladder.gpu.sizing.base import ResourceHandler


def handlers() -> list[type[ResourceHandler]]:
    """Return all handlers: kvladder's own first, then those of other packages."""
    own = [*registry.BUILT_IN["handlers"]]
    more = [name for name in registry.names("handlers") if name not in own]
    return [registry.load("handlers", name) for name in own + more]


def collected(
    layers: Sequence[Any], asked: Sequence[type[ResourceHandler]] | None = None
) -> list[list[ResourceHandler]]:
    """Return what each layer of a cache keeps after one token.

    ``asked`` are the handlers to use; None for all. A layer that no handler knows gets an empty
    list.
    """
    kinds = handlers() if asked is None else asked
    return [
        [one for kind in kinds for one in kind.collect(at, layer)]
        for at, layer in enumerate(layers)
    ]
