"""The first phase of a plan: handlers are asked what each layer of a model's cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvladder.config import registry
from kvladder.gpu.sizing.base import ResourceHandler


def handlers() -> list[type[ResourceHandler]]:
    """Those that come with kvladder first, then those that other packages add."""
    own = [*registry.BUILT_IN["handlers"]]
    more = [name for name in registry.names("handlers") if name not in own]
    return [registry.load("handlers", name) for name in own + more]


def collected(
    layers: Sequence[Any], asked: Sequence[type[ResourceHandler]] | None = None
) -> list[list[ResourceHandler]]:
    """What each layer of a cache keeps, after one token went through it.

    ``asked`` are the handlers; None for all that there are. A layer that none of them knows keeps
    nothing here.
    """
    kinds = handlers() if asked is None else asked
    return [
        [one for kind in kinds for one in kind.collect(at, layer)]
        for at, layer in enumerate(layers)
    ]
