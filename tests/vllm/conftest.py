"""One tiny model, one answer without kvladder and one filled directory for all tests here."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import HERE, PROMPTS, Run, Started, environment, make, shared_memory
from tests.vllm.server import Server

Start = Callable[..., Run]
LOG_SHOWN = 3000
"""Characters at the end of an engine's log."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


def show_log(process: Started) -> None:
    """Print its end, which pytest shows where the test fails."""
    print(process.log.read_text()[-LOG_SHOWN:])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, with other weights."""
    return [make(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


@pytest.fixture(scope="session")
def model(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path that engines are given: a link to the first model."""
    link = tmp_path_factory.mktemp("current") / "model"
    link.symlink_to(models[0])
    return link


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the model's answer to each prompt without kvladder."""
    spec = {"model": str(model), "extra": None, "steps": [["each", {"prompts": PROMPTS}]]}
    run = Run(tmp_path_factory.mktemp("reference"), spec, environment())
    tokens: list[list[int]] = run.finish()[0]["tokens"]
    assert len({tuple(one) for one in tokens}) == len(PROMPTS)
    assert min(len(set(one)) for one in tokens) > 8, "the model says too little to tell"
    return tokens


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start an engine; afterwards nothing of it must be left."""
    before = shared_memory()
    runs: list[Run] = []

    def begin(extra: Any, *steps: Any, env: dict[str, str] | None = None, **spec: Any) -> Run:
        whole = {"model": str(model), "extra": extra, "steps": list(steps), **spec}
        runs.append(Run(tmp_path / f"run{len(runs)}", whole, environment(**env or {})))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
        print(run.so_far())  # where the test fails
        show_log(run)
    assert [run.alive() for run in runs] == [[]] * len(runs)
    left = {name for name in shared_memory() - before if "kvladder" in name}
    assert not left


@pytest.fixture
def started() -> Iterator[list[Server]]:
    """Servers that the test starts, for it to add to: afterwards nothing of them is left."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()
        show_log(server)


@pytest.fixture(scope="session")
def filled(
    model: Path, reference: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """A directory with all prompts, and the results of the engine that filled it.

    In one of pytest's workers, that is a ``fresh`` process: names of blocks must not stand on the
    seed of its ``hash``.
    """
    directory = tmp_path_factory.mktemp("filled")
    extra = {"host": "64 MiB", "files": str(directory / "kv"), "capacity": "64 MiB"}
    extra["record"] = str(directory / "trace.jsonl")
    steps = [
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["each", {"prompts": PROMPTS}],
        ["each", {"prompts": PROMPTS}],
        ["stats"],
        ["shutdown"],
    ]
    spec = {"model": str(model), "extra": extra, "steps": steps}
    fresh = is_first(tmp_path_factory.getbasetemp())
    results = Run(directory, spec, environment(), fresh=fresh).finish()
    return directory / "kv", results


def is_first(base: Path) -> bool:
    """Return whether no other worker of this test run has asked; ``base`` is this one's folder."""
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    try:
        (common / "asked").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture
def files(filled: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """A copy of the filled directory, for the test to use up."""
    shutil.copytree(filled[0], tmp_path / "kv")
    return tmp_path / "kv"
