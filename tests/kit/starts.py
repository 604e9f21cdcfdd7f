"""The line between wrong settings, which end a start, and a world that is broken today."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

import kvladder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.preflight import Findings, preflight

REQUIRED = "leave out required: true, to start without this level"


def refused(source: Mapping[str, Any], layout: Layout, *, foretold: bool = True) -> ConfigError:
    """Return the error of opening a cache that requires the last level of ``source``.

    Checks that ``kvladder check`` predicts the error, and opens a cache that does not require the
    level. With wrong settings that cache fails too. If a resource is broken today, it opens without
    the level, and ``kvladder check`` predicts that with a warning.
    """
    required = copy.deepcopy(dict(source))
    required["tiers"][-1]["required"] = True
    error = _refusal(required, layout)
    if foretold:
        assert _error_of(required).path == error.path
    if REQUIRED not in error.hint:
        assert _refusal(source, layout).path == error.path
        return error
    with kvladder.open_cache(source, layout=layout) as cache:
        (left_out,) = [
            line for line in cache.describe().splitlines() if " is left out: it " in line
        ]
    assert error.hint.removesuffix(f"; or {REQUIRED}") in left_out
    if foretold:
        found = preflight(load_config(source))
        assert found.errors == []
        assert [text for text in found.warnings if "would start without this level" in text]
    return error


def _refusal(source: Mapping[str, Any], layout: Layout) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        kvladder.open_cache(source, layout=layout).close()
    assert caught.value.path.startswith("tiers[1]")
    return caught.value


def _error_of(source: Mapping[str, Any]) -> ConfigError:
    """Return the first error that ``kvladder check`` prints."""
    try:
        found: Findings = preflight(load_config(source))
    except ConfigError as error:
        return error
    return found.errors[0]
