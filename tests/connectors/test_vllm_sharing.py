"""Requests that begin alike, in vLLM's scheduler half."""

from __future__ import annotations

import importlib.util
import warnings
from random import Random

import pytest

from tests.connectors.scripted import Engine, Request

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():  # whatever vLLM warns of when it is imported
    warnings.simplefilter("ignore")
    from kvladder.connectors.vllm.running import RunningScheduler

pytestmark = pytest.mark.slow


def test_a_request_waits_for_blocks_that_another_loads_into_vllms_own_cache() -> None:
    engine = Engine({"host": "1 MiB"})
    tokens = Random(1).choices(range(50), k=30)
    engine.add(tokens)
    engine.run()
    half: RunningScheduler = engine.half
    half._loads.shared = True
    first, second, third = (Request(name, tokens) for name in ("one", "two", "three"))
    for request in (first, second):
        half.arrived(request)
        assert half.ask(request, 0) == (28, True)
    half.allocated(first, [[30, 31, 32, 33, 34, 35, 36]], 28)
    half.arrived(third)
    assert half.ask(second, 0) == half.ask(third, 0) == (None, False)
    assert half.ask(third, 28) == (0, False)  # it needs nothing of it
    half.finished(first)
    assert half.ask(second, 0) == (None, False)  # the copy continues
    step = half.build(engine._output({}))
    for worker in engine.workers:
        worker.load(step)
        engine.copiers[0].wait([load.job.id for load in step.loads])
        worker.received()
        report = worker.report()
        assert report is not None
        half.report(report)
    assert half.ask(second, 0) == half.ask(third, 0) == (28, True)
    for request in (second, third):
        half.finished(request)
    engine.close()
