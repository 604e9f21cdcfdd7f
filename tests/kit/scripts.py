"""Scripts of ``.ci`` as modules, for tests."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.kit.source import ROOT


def script(name: str) -> Any:
    """Import ``.ci/NAME.py``. Skip the calling module if the tests run beside a wheel."""
    path = ROOT / ".ci" / f"{name}.py"
    if not (path.exists() and (ROOT / "tiers").exists()):
        pytest.skip("the tests run beside an installed package", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
