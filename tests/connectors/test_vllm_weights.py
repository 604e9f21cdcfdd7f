"""Names follow the weights in memory: reloads noticed or announced by a reset, and ranks."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from kvladder.connectors.vllm.identity.weights import Weights
from kvladder.connectors.vllm.requests.lookup import LookupState
from kvladder.connectors.vllm.saves import part_tails
from kvladder.connectors.vllm.step import Report, Seen, StepMetadata
from tests.connectors.scripted import TOKENS, Engine, Request

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOST = {"host": "1 MiB"}
PROMPT = Random(1).choices(range(50), k=7 * TOKENS + 2)
Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Engines that keep their blocks over a reset."""
    engines: list[Engine] = []

    def begin(source: Any = HOST, **options: Any) -> Engine:
        engines.append(Engine(source, **{"on_reset": "keep", **options}))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.half.connector.manager.check()
        engine.close()


def loaded(engine: Engine, prompt: list[int] = PROMPT) -> int:
    """Return how many blocks a request for this prompt gets from the cache."""
    before = engine.loaded
    engine.add(prompt, length=len(prompt) + 1)
    engine.run()
    return engine.loaded - before


def become(engine: Engine, content: bytes, *, noticed: bool, ranks: int | None = None) -> None:
    for models in engine.loaded_models[:ranks]:
        models.load(content, noticed=noticed)


def looked(engine: Engine) -> list[int]:
    return [models.looked for models in engine.loaded_models]


def answer(weights: Weights, *seen: tuple[int, Seen]) -> bool:
    return bool(weights.report(Report(seen=dict(seen))))


def test_weights_are_known_once_all_ranks_have_read_theirs() -> None:
    weights = Weights([b"a", b"b"])
    assert weights.known
    weights.doubt()
    assert not answer(weights, (0, Seen(0, b"a", 1, 1)))
    assert not weights.known
    assert not answer(weights, (1, Seen(0, b"b", 1, 1)))
    assert weights.known


def test_all_ranks_read_their_weights_if_those_of_one_differ() -> None:
    weights = Weights([b"a", b"b"])
    assert answer(weights, (0, Seen(1, b"c", 0, 1)))
    assert not weights.known, "those of the other ranks may be others, too"
    step = StepMetadata()
    weights.prepare(step, runs=True, cache=None)
    assert (step.doubt, step.weights) == (1, (1, 0))
    assert answer(weights, (0, Seen(1, b"c", 1, 1)), (1, Seen(1, b"d", 1, 1)))
    assert weights.known
    assert answer(weights, (0, Seen(2, b"a", 1, 2)), (1, Seen(2, b"b", 1, 2)))
    assert weights.known, "both have told at once"


def test_the_weights_at_start_have_no_mark() -> None:
    weights = Weights([b"a", b"b"])
    marks = [weights.mark]
    for changes, content in enumerate((b"c", b"a", b"d"), start=1):
        answer(weights, (0, Seen(changes, content, 0, changes)))
        marks.append(weights.mark)
    assert marks[0] == marks[2] == 0
    assert len(set(marks)) == 3


def test_vllms_own_cache_is_outdated_if_an_earlier_step_filled_it() -> None:
    weights, before, emptied = Weights([b"a"]), object(), object()
    for cache in (before, emptied):
        weights.prepare(StepMetadata(), runs=True, cache=cache)
    answer(weights, (0, Seen(1, b"b", 0, 2)))  # before the second step's forward pass
    assert weights.outdated(before)
    assert not weights.outdated(emptied)


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_reset_other_weights_have_other_names_and_old_ones_return(
    start: Start, ranks: int
) -> None:
    engine = start(ranks=ranks)
    assert [loaded(engine), loaded(engine)] == [0, 7]
    for content, known in ((b"new", 0), (b"first", 7), (b"new", 7), (b"third", 0)):
        become(engine, content, noticed=False)
        engine.half.reset()
        assert loaded(engine) == known, "the first request waits one step until they are known"
        assert loaded(engine) == 7


@pytest.mark.parametrize("changed", [1, 2])
def test_a_reload_that_is_seen_needs_no_reset(start: Start, changed: int) -> None:
    """Only one of the ranks may have other weights; the step that sees it loads and saves none."""
    engine = start(ranks=2)
    assert [loaded(engine), loaded(engine)] == [0, 7]
    for content, known in ((b"new", 0), (b"first", 7)):
        become(engine, content, noticed=True, ranks=changed)
        before = engine.half.connector.manager.stats()["host"]["stored"]
        engine.add(PROMPT, length=len(PROMPT) + 1)
        engine.run()
        assert engine.half.connector.manager.stats()["host"]["stored"] == before
        assert loaded(engine) == known
        assert loaded(engine) == 7


def test_weights_that_are_read_again_and_are_the_same_keep_their_names(start: Start) -> None:
    engine = start(ranks=2)
    assert [loaded(engine), loaded(engine)] == [0, 7]
    assert looked(engine) == [1, 1], "once at start"
    engine.half.reset()
    assert loaded(engine) == 7
    become(engine, b"first", noticed=True)
    assert loaded(engine) == 7
    assert looked(engine) == [3, 3]
    for _ in range(3):
        assert loaded(engine) == 7
    assert looked(engine) == [3, 3], "and not in each step"


def test_weights_are_not_read_while_the_engine_may_be_asleep(start: Start) -> None:
    """Steps without a request are made while it sleeps, too: its weights are not in memory."""
    engine = start()
    assert loaded(engine) == 0
    engine.half.reset()
    for _ in range(3):
        assert not engine.step().doubt
    assert looked(engine) == [1]
    assert loaded(engine) == 7
    assert looked(engine) == [2]


def test_a_request_with_blocks_of_other_weights_is_not_saved(start: Start) -> None:
    engine = start()
    longer = Random(2).choices(range(50), k=12 * TOKENS)
    engine.add(longer, length=len(longer) + 1)
    engine.step(budget=5 * TOKENS)
    become(engine, b"new", noticed=True)
    engine.run()
    assert loaded(engine, longer) == 0
    assert loaded(engine, longer) == 11
    become(engine, b"first", noticed=True)
    engine.step()
    assert loaded(engine, longer) == 5, "what was complete before"


def test_loads_in_flight_are_abandoned_and_their_blocks_kept(start: Start) -> None:
    engine = start()
    assert loaded(engine) == 0
    for copier in engine.copiers:
        copier.held = True
    request = engine.add(PROMPT, length=len(PROMPT) + 1)
    while not request.num_computed_tokens:
        engine.step()
    assert engine.loaded == 7
    become(engine, b"new", noticed=True)
    engine.step()
    for copier in engine.copiers:
        copier.held = False
    state = engine.half._states[request.request_id]
    assert state.lookup.state is LookupState.LOADING
    while state.lookup.loading:
        engine.step()
    assert state.lookup.state is LookupState.COMPUTES, (
        "the blocks that came are of the weights before"
    )
    engine.run()
    assert engine.half.stats()["host"]["blocks"] == 7
    become(engine, b"first", noticed=True)
    engine.add(PROMPT, length=len(PROMPT) + 1)
    engine.run()
    assert loaded(engine) == 7


def test_a_request_that_begins_in_vllms_own_outdated_cache_stays_apart(start: Start) -> None:
    class Pool:
        cached_block_hash_to_block = object()

    pool = Pool()
    engine = start(pool=pool)
    assert loaded(engine) == 0
    become(engine, b"new", noticed=True)
    loaded(engine)
    request = Request("begun", PROMPT)
    engine.half.arrived(request)
    assert engine.half.ask(request, 2 * TOKENS) == (0, False)
    assert engine.half._states["begun"].apart
    engine.half.finished(request)
    for resumes in (False, True):  # vLLM asks after whole blocks, and takes a part of one more
        request = Request("tail", PROMPT)
        engine.half.arrived(request)
        assert engine.half.ask(request, 0) == (0, False)
        assert not engine.half._states["tail"].apart
        new = [] if resumes else [SimpleNamespace(req_id="tail", num_computed_tokens=TOKENS - 1)]
        ids, computed = (["tail"], [TOKENS - 1]) if resumes else ([], [])
        cached = SimpleNamespace(req_ids=ids, num_computed_tokens=computed, resumed_req_ids={*ids})
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        part_tails(engine.half._states, output)
        assert engine.half._states["tail"].apart
        engine.half.finished(request)
    pool.cached_block_hash_to_block = object()  # vLLM has emptied it
    request = Request("clean", PROMPT)
    engine.half.arrived(request)
    engine.half.ask(request, 2 * TOKENS)
    assert not engine.half._states["clean"].apart
    engine.half.finished(request)


@pytest.mark.parametrize("error", [RuntimeError("illegal memory access"), TypeError("a bug")])
@pytest.mark.parametrize("noticed", [True, False])
def test_unreadable_weights_have_no_name(start: Start, error: Exception, noticed: bool) -> None:
    engine = start()
    assert [loaded(engine), loaded(engine)] == [0, 7]
    (models,) = engine.loaded_models
    models.failing = error
    become(engine, b"new", noticed=noticed)
    if not noticed:
        engine.half.reset()
    given_up = loaded(engine)
    assert given_up in ((0, 7) if noticed else (0,))
    assert [loaded(engine), loaded(engine)] == [0, 0]
    models.failing = None
    engine.half.reset()
    assert [loaded(engine), loaded(engine)] == [0, 7], "nothing was saved meanwhile"
    become(engine, b"first", noticed=True)
    loaded(engine)
    assert loaded(engine) == 7


def test_unreadable_weights_are_retried_seldom(start: Start) -> None:
    """Each attempt takes as long as a full read; the cache is used again once one succeeds."""
    engine = start(blocks=80)
    (models,) = engine.loaded_models
    assert loaded(engine) == 0
    models.failing = RuntimeError("out of memory")
    become(engine, b"first", noticed=True)
    before = models.looked
    engine.add(PROMPT, length=len(PROMPT) + 200)
    for steps in (1, 9, 90):
        for _ in range(steps):
            engine.step()
    assert 4 <= models.looked - before <= 8
    models.failing = None
    for _ in range(100):
        engine.step()
    engine.run()
    assert loaded(engine) == 7


def test_weights_unreadable_at_the_start_end_no_engine(start: Start) -> None:
    engine = start(failing=RuntimeError("out of memory"))
    assert [loaded(engine), loaded(engine)] == [0, 0]
    engine.loaded_models[0].failing = None
    engine.half.reset()
    loaded(engine)
    assert loaded(engine) == 7


def test_requests_wait_a_bounded_number_of_steps_for_weights(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvladder.connectors.vllm.identity import weights as vllm_weights
    from kvladder.connectors.vllm.identity.watch import ModelWatch

    engine = start()
    monkeypatch.setattr(vllm_weights, "PATIENCE", 5)
    monkeypatch.setattr(ModelWatch, "look", lambda self, turn, doubt: False)
    engine.half.reset()
    assert loaded(engine) == 0


def test_a_reset_forgets_the_blocks_of_this_engine_alone(start: Start, tmp_path: Any) -> None:
    files = {"type": "files", "path": str(tmp_path), "capacity": "4 MiB", "when": "commit"}
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, files]}
    engine = start(source, on_reset="forget")
    assert [loaded(engine), loaded(engine)] == [0, 7]
    engine.half.reset()
    stats = engine.half.stats()
    assert (stats["host"]["blocks"], stats["files"]["blocks"]) == (0, 0)
    assert [loaded(engine), loaded(engine)] == [0, 7]


def test_messages_about_weights_can_be_pickled(start: Start) -> None:
    engine = start(ranks=2)
    engine.half.reset()
    engine.add(PROMPT, length=len(PROMPT) + 1)
    step = engine.half.build(engine._output({}))
    again = pickle.loads(pickle.dumps(step))
    assert (again.weights, again.doubt, again.turn) == (step.weights, step.doubt, step.turn)
    engine.run()


def test_kv_tensors_are_released_for_a_sleep_and_taken_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    worker = engine.workers[0]
    worker.detach()
    worker.restore()
    assert engine.copiers == [], "there was nothing to copy yet"
    assert loaded(engine) == 0
    for _ in range(2):
        worker.detach()
    with monkeypatch.context() as asleep:
        asleep.setattr(engine.copiers[0], "submit", None)  # nothing touches the tensors' memory
        loaded(engine)
    for _ in range(2):
        worker.restore()
    assert [loaded(engine), loaded(engine)] == [0, 7], "a load that failed forgot its blocks"
    assert len(engine.copiers) == 1, "what is registered stays so"
