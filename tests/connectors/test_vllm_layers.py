"""Loads by layer: which are, and that each layer waits for its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count

import pytest

from tests.connectors.scripted import Engine

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
from tests.connectors.test_vllm_halves import HOST, prompt, served


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def test_a_load_goes_by_layer_where_it_delays_no_other_request(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(HOST, load="layers")
    engines.append(engine)
    manager = engine.half.connector.manager
    for seed in (1, 2, 3):
        served(engine, prompt(seed))
    layered, others = engine.copiers[0].layered, count(9)

    def together(*seeds: int) -> int:
        """Return how many of these requests loaded by layer; one runs before the others."""
        before = len(layered)
        engine.add(prompt(next(others), 8), length=90)
        engine.step(64)
        for seed in seeds:
            engine.add(prompt(seed))
        engine.step(64)
        engine.run()
        return len(layered) - before

    served(engine, prompt(1))
    assert len(layered) == 1  # alone
    block_s = engine.half.connector.loading_s(1)
    assert block_s is not None
    assert engine.half.connector.loading_s(7) == pytest.approx(7 * block_s)
    monkeypatch.setattr(engine.half.connector, "loading_s", float)  # a second for each block
    assert together(1) == 0  # it is not known how long computing takes
    monkeypatch.setattr(manager, "computing_s", lambda tokens: 3.5 * tokens)
    assert together(1) == 1  # to load 7 blocks takes no longer than to compute 2 tokens
    assert together(2, 3) == 1
    monkeypatch.setattr(manager, "computing_s", lambda tokens: 3.4 * tokens)
    assert together(1) == 0


@pytest.mark.parametrize(
    ("wrong", "found"), [(None, 0), ("a layer waits for nothing", 1), ("failures are told late", 1)]
)
def test_layers_that_read_too_early_are_found(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, wrong: str | None, found: int
) -> None:
    engine = Engine(HOST, load="layers")
    engines.append(engine)
    served(engine, prompt(1))
    worker = engine.workers[0]
    if wrong == "a layer waits for nothing":
        monkeypatch.setattr(worker, "await_layer", lambda layer: None)
    elif wrong:
        engine.copiers[0].failing = 1.0
        monkeypatch.setattr(worker, "_end_layers", lambda: None)
    engine.kv[0].zero_()
    engine.add(prompt(1))
    if found:
        with pytest.raises(AssertionError, match="reads another token's KV"):
            engine.step(64)
        engine.copiers[0].failing = 0.0
        return
    engine.run()
    assert engine.loaded == 7
