"""vLLM learns the source of every token of a hit."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvladder.keys import BlockKey
from tests.connectors.scripted import TOKENS, Engine, Request
from tests.patience import until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds

PROMPTS = [Random(seed).choices(range(50), k=7 * TOKENS + 2) for seed in range(2)]


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvladder.connectors.vllm")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Room for eight blocks on the host, for all in files."""
    files = {"type": "files", "path": str(tmp_path), "capacity": "4 MiB", "when": "commit"}
    engine = Engine({"arena": {"size": "32 KiB"}, "fetch": {"budget": "100 %"},
                     "tiers": [{"type": "host"}, files]})  # fmt: skip
    yield engine
    engine.close()


def load(engine: Engine, request: Request, *, own: int) -> int:
    """Load the blocks after the first ``own`` tokens; return the number of loaded tokens."""
    half = engine.half
    half.arrived(request)
    until(lambda: half.ask(request, own)[0] is not None)
    found = half.ask(request, own)[0]
    assert found is not None
    half.allocated(request, [list(range(20, 28))], found)
    return found


def end(engine: Engine, request: Request) -> None:
    """End the load and the request."""
    half, worker = engine.half, engine.workers[0]
    half.finished(request)
    step = half.build(engine._output({}))
    worker.load(step)
    engine.copiers[0].wait([load.job.id for load in step.loads])
    worker.received()
    report = worker.report()
    if report is not None:
        half.report(report)


def test_hits_are_reported_by_their_source(engine: Engine) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as Source

    from kvladder.connectors.vllm.connector import KVLadderConnector

    half, manager = engine.half, engine.half.connector.manager
    connector = KVLadderConnector.__new__(KVLadderConnector)
    connector.scheduler, connector.notices = engine.scheduler, engine.notices
    told = connector.get_external_cache_hit_sources
    for prompt in PROMPTS:  # the second takes the room of most of the first
        engine.add(prompt)
        engine.run()
        until(manager.idle)
    request = Request("mixed", PROMPTS[0])
    assert told(request, 28) == {Source.EXTERNAL_UNSPECIFIED: 28}, "of which nothing is known"
    save = manager.save([BlockKey(one) for one in request.block_hashes[2:3]])
    save.commit()  # it is on the host, between blocks that are not
    host = manager.ladder.indexes["host"]
    on_host = [BlockKey(one) in host for one in request.block_hashes[2:7]]
    assert {True, False} == set(on_host)
    assert load(engine, request, own=2 * TOKENS) == 5 * TOKENS
    expected = {Source.HOST: TOKENS * sum(on_host), Source.DISK: TOKENS * on_host.count(False)}
    assert told(request, 5 * TOKENS) == expected
    assert told(request, 0) == {}
    half._states["mixed"].sources = ["files", "host"]  # as where only a window is loaded
    assert told(request, 5 * TOKENS) == {
        Source.DISK: TOKENS,
        Source.HOST: TOKENS,
        Source.EXTERNAL_UNSPECIFIED: 3 * TOKENS,
    }
    end(engine, request)


def test_a_load_that_ends_early_is_reported_up_to_its_end(engine: Engine) -> None:
    engine.add(PROMPTS[0])
    engine.run()
    until(engine.half.connector.manager.idle)
    request = Request("longer", [*PROMPTS[0][: 3 * TOKENS], *PROMPTS[1]])
    assert load(engine, request, own=0) == 3 * TOKENS
    assert engine.half.sources(request) == {"host": 3 * TOKENS}
    stats = engine.half.stats()
    missed = len(request.block_hashes) - 3
    assert missed > 0
    assert (stats["host"]["hits"], stats["files"]["hits"]) == (3, 0)
    assert stats["host"]["queries"] == 7 + 3 + missed, "the first prompt had none of its seven"
    assert stats["files"]["queries"] == 7 + missed
    end(engine, request)
