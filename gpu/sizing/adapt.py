"""Applies settings to a model's resources: the type of its cache, and narrower windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvladder.errors import ConfigError
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.handlers import Side

SCALED: Final = ("fp8", "float8_e4m3fn", "float8_e5m2")
"""Types that need scales of 4 bytes, for keys and for values of each head of each token."""
SCALES: Final = ".scales"
"""Suffix in the name of the side buffer that holds a layer's scales."""


def windows_of(layers: Sequence[Layer], windows: Sequence[int]) -> list[int | None]:
    """Return the window of each layer, narrowed by ``windows``, which is repeated over the layers.

    Only layers that keep keys and values count. 0 leaves a layer as it is. A window is never wider
    than the model's own.

    Raises
    ------
    ConfigError
        There are more windows than layers.
    """
    if len(windows) > len(layers):
        what, hint = (
            f"{len(windows)} windows",
            f"expected at most {len(layers)}, one for each layer",
        )
        hint += " that keeps keys and values; a shorter list is repeated"
        raise ConfigError(what, path="gpu.windows", hint=hint)
    if not windows:
        return [layer.window for layer in layers]
    given = [windows[at % len(windows)] or None for at in range(len(layers))]
    both = [(layer.window, own) for layer, own in zip(layers, given, strict=True)]
    return [min((one for one in pair if one is not None), default=None) for pair in both]


def adapted(
    resources: Sequence[ResourceHandler], *, dtype: str = "auto", windows: Sequence[int] = ()
) -> list[ResourceHandler]:
    """Return the handlers with another type and narrower windows; raise like ``windows_of``."""
    layers = [one for one in resources if isinstance(one, Layer)]
    seen = dict(zip(layers, windows_of(layers, windows), strict=True))
    found: list[ResourceHandler] = []
    for one in resources:
        if not isinstance(one, Layer):
            found.append(one)
            continue
        kept = one.dtype if dtype == "auto" else dtype
        found.append(replace(one, dtype=kept, window=seen[one]))
        if dtype in SCALED:
            found.append(Side(f"{one.name}{SCALES}", one.name, 4 * one.factor))
    return found
