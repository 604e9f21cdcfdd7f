"""Tests of vLLM's interface run with every tested version of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvladder.connectors.listener import abstract

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name.startswith("test_vllm_"):
            item.add_marker(pytest.mark.versions)


@pytest.fixture(autouse=True)
def sglang_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's weights be as at the start of a process, whatever earlier tests did to them.

    Objects frozen before a test count as not frozen. A search for SGLang's objects would visit a
    million of them: collecting tests made and froze these, so the model is made again. Python would
    count all of them one by one, so it is only noted whether a test freezes some.
    """
    stub = sys.modules.get("tests.connectors.sglang_stub")
    if stub is None:
        return
    vars(stub)["target"] = stub.ModelRunner()
    freeze, unfreeze, frozen = gc.freeze, gc.unfreeze, list[bool]()

    def freezing() -> None:
        freeze()
        frozen.append(True)

    def unfreezing() -> None:
        unfreeze()
        frozen.clear()

    monkeypatch.setattr(gc, "freeze", freezing)
    monkeypatch.setattr(gc, "unfreeze", unfreezing)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))
    storage = sys.modules.get("kvladder.connectors.sglang.storage")
    if storage is not None:
        stub.forget_watches(monkeypatch)
        monkeypatch.setattr(storage, "watch", type(storage.watch)())


Started = tuple["subprocess.Popen[str]", str]


@pytest.fixture
def address(tmp_path: Path) -> str:
    """The address of a socket where ranks meet."""
    return abstract(f"test-{os.getpid()}-{tmp_path.name}")


@pytest.fixture
def rank(address: str) -> Iterator[Callable[..., Started]]:
    """Start ranks in processes of their own, up to their first line; end those that are left."""
    begun: list[subprocess.Popen[str]] = []

    def start(script: str, *args: str) -> Started:
        process = subprocess.Popen(
            [sys.executable, "-c", script, address.replace("\0", "@"), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[1],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])},
        )
        begun.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    yield start
    for process in begun:
        process.kill()
        process.communicate()
