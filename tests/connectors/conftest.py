"""Tests of vLLM's interface run with every tested version of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name.startswith("test_vllm_"):
            item.add_marker(pytest.mark.versions)


@pytest.fixture(autouse=True)
def sglang_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's weights be as at the start of a process, whatever earlier tests did to them."""
    stub = sys.modules.get("tests.connectors.sglang_stub")
    storage = sys.modules.get("kvladder.connectors.sglang.storage")
    if stub is not None and storage is not None:
        stub.forget_watches(monkeypatch)
        monkeypatch.setattr(storage, "watch", type(storage.watch)())
