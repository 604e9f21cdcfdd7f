"""Tests of vLLM's interface run with every tested version of it."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name.startswith("test_vllm_"):
            item.add_marker(pytest.mark.versions)
