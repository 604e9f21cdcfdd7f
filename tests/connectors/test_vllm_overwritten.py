"""A save never stores bytes that another request has written to its blocks."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kvladder.keys import BlockKey
from tests.connectors.scripted import TOKENS, Engine, Request

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():  # whatever vLLM warns of when it is imported
    warnings.simplefilter("ignore")
    from kvladder.connectors.vllm.step import StepMetadata

pytestmark = pytest.mark.slow
STACK = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}]}
BLOCKS = 9


def ended(engine: Engine) -> None:
    """All copies end and are reported."""
    for copier in engine.copiers:
        copier.held, copier.failing = False, 0.0
    while engine.half.busy:
        for worker in engine.workers:
            worker.received()
            report = worker.report()
            if report is not None:
                engine.half.report(report)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Return an engine whose first request has ended during its saves: its blocks are free."""
    one = Engine(STACK, blocks=BLOCKS)
    one.add(list(range(32)), length=33)
    one.step(24)
    for copier in one.copiers:
        copier.held = True
    one.step(24)
    one.step(24)
    assert not one.entries
    assert one.half.busy
    yield one
    one.close()


def reads_right(engine: Engine) -> None:
    engine.add([*range(24), 7], length=26)
    engine.run()  # which checks every byte that is read


@pytest.mark.parametrize("way", ["async", "sync"])
def test_another_connector_s_load_waits_for_a_save_of_its_blocks(engine: Engine, way: str) -> None:
    other = Request("other", [500 + n for n in range(33)])
    engine.half.arrived(other)
    assert engine.half.ask(other, 0) == (0, False)
    table = list(engine.free)
    engine.half.allocated(other, [table], 0)  # as MultiConnector calls connectors not chosen
    output = engine._output({})
    if way == "sync":  # all but the last token are loaded in the very step
        new: Any = type("New", (), {"block_ids": [table], "num_computed_tokens": 32})
        output.scheduled_new_reqs.append(new)
    step = engine.half.build(output)
    assert step.fence
    for worker in engine.workers:
        worker.begin(step)
    engine.kv[0][:] = -7  # the other connector's load
    ended(engine)
    reads_right(engine)


def test_a_save_with_a_failed_fence_is_not_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError("by the script")

    other = Request("other", [500 + n for n in range(33)])
    engine.half.arrived(other)
    engine.half.ask(other, 0)
    engine.half.allocated(other, [list(engine.free)], 0)
    step = engine.half.build(engine._output({}))
    assert step.fence
    for worker, copier in zip(engine.workers, engine.copiers, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(copier, "fence", fails)
            with pytest.raises(OSError, match="by the script"):  # which the connector outlives
                worker.begin(step)
    engine.kv[0][:] = -7  # so the step writes while the saves still read
    ended(engine)
    reads_right(engine)


def test_blocks_that_vllm_has_itself_are_not_waited_for(engine: Engine) -> None:
    other = Request("other", list(range(33)))
    engine.half.arrived(other)
    engine.half.ask(other, 32)
    engine.half.allocated(other, [list(engine.free)], 0)
    assert engine.half.build(engine._output({})).fence == []
    engine.half.finished(other)
    ended(engine)


def test_a_failed_step_fences_no_save_so_that_none_is_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.half.build

    def fails(*_: Any) -> None:
        raise MemoryError("by the script")

    def harmless(output: Any) -> StepMetadata:  # as the connector does
        with pytest.raises(MemoryError):
            real(output)
        return StepMetadata()

    engine.add([100 + n for n in range(32)], length=33)
    with monkeypatch.context() as patch:
        patch.setattr(engine.half._saver, "full", fails)
        patch.setattr(engine.half, "build", harmless)
        engine.step(32)
    ended(engine)
    engine.run()
    reads_right(engine)


def test_a_step_made_before_its_load_failed_is_not_saved() -> None:
    """vLLM schedules a step before it processes the output of the one before."""
    engine = Engine(STACK, load="sync")
    engine.add(list(range(16)), length=17)
    engine.run()
    request = engine.add([*range(16), *range(200, 232)], length=49)
    entry = engine.entries[request.request_id]
    for copier in engine.copiers:
        copier.failing, copier.failing_way = 1.0, "onboard"
    found, _ = engine.half.ask(request, 0)
    assert found == 16
    assert engine._room(entry, 48)
    engine.half.allocated(request, [list(entry.table)], found)
    entry.state = "running"
    request.num_computed_tokens = found
    steps = []
    for _ in range(2):
        steps.append(engine.half.build(engine._output({request.request_id: 16})))
        request.num_computed_tokens += 16
    (worker,) = engine.workers
    outcomes = []
    for step in steps:
        worker.begin(step)
        worker.load(step)
        engine.kv[0][:, entry.table[4:]] = -1  # computed on blocks that were not loaded
        worker.save(step)
        worker.received()
        outcomes.append((worker.bad_blocks(), worker.report()))
    assert outcomes[0][0] == set(entry.table[:4])
    for bad, report in outcomes:
        engine.half.unfilled(bad)
        if report is not None:
            engine.half.report(report)
    ended(engine)
    engine.half.finished(request)
    later = [BlockKey(one) for one in request.block_hashes[(found + 16) // TOKENS :]]
    assert engine.half.connector.manager.lookup(later).total == 0
    engine.close()
