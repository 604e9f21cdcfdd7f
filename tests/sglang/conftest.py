"""Two tiny models, and a folder for an engine with kvladder below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sglang.engine import HERE, SGLANG, Engine, Server, make_two, prepare, run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.slow)
            if not (SGLANG / "gguf").is_dir():
                item.add_marker(pytest.mark.skip(reason="SGLang is not beside this Python"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of all files."""
    prepare(tmp_path)
    return tmp_path


@pytest.fixture
def models(folder: Path) -> list[Path]:
    """Two models of one shape, with other weights."""
    return make_two(folder)


@pytest.fixture
def adapters(folder: Path) -> dict[str, Any]:
    """Return the engine's settings for two adapters."""
    names = ("one", "two")
    run(folder, str(HERE / "adapter.py"), *(str(folder / name) for name in names))
    paths = [f"{name}={folder / name}" for name in names]
    return {"lora_paths": paths, "lora_backend": "torch_native", "max_loras_per_batch": 2}


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines; ends those that a test has left."""
    begun: list[Engine] = []

    def start_one(model: Path, extra: dict[str, Any], **settings: Any) -> Engine:
        begun.append(Engine(folder, model, extra, **settings))
        return begun[-1]

    yield start_one
    for engine in begun:
        engine.end()


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server as docs/how-to/sglang.md does, with a stack; ends it."""
    begun: list[Server] = []

    def serve_one(model: Path, stack: dict[str, Any], **settings: Any) -> Server:
        (folder / "stack.yaml").write_text(yaml.safe_dump(stack))
        begun.append(Server(folder, model, **settings))
        return begun[-1]

    yield serve_one
    for server in begun:
        server.end()
