"""Offers that TensorRT-LLM takes in part or hands back, and pages that it takes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvladder.connectors.trtllm.options import PATIENCE, STACK
from kvladder.errors import TierError
from kvladder.traces.reader import read_trace
from tests.connectors.executor import BLOCK, Executor, Rank, RequestData, kv_of
from tests.patience import until

PROMPT = list(range(100, 300))
WHOLE = len(PROMPT) // BLOCK


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """Return an engine with the prompt's blocks in its cache."""
    path = tmp_path / "stack.yaml"
    path.write_text("model: {fingerprint: w}\narena: {size: 8 MiB}\ntiers: [{type: host}]\n")
    monkeypatch.setenv(STACK, str(path))
    monkeypatch.setenv(PATIENCE, "60 s")
    made = Executor()
    made.run(PROMPT)
    made.idle()
    yield made
    made.close()


def asked(engine: Executor, own: int = 0) -> SimpleNamespace:
    """A request that was promised all that follows its ``own`` tokens."""
    request = engine.request(PROMPT)
    promised = WHOLE * BLOCK - own
    assert engine.scheduler.get_num_new_matched_tokens(request, own) == (promised, False)
    return request


def loaded(
    engine: Executor, request: SimpleNamespace, *, position: int, step: int, pages: int = 13
) -> list[int]:
    """Return the blocks of the prompt that a first step loads."""
    pool, ids = engine.ranks[0].pool, engine.free[:pages]
    pool[ids] = float("nan")
    engine.step([RequestData(request.request_id, PROMPT, ids, position, step)], [])
    return [n for n, at in enumerate(ids) if torch.equal(pool[at], kv_of(PROMPT, n, 0, None))]


def claims(engine: Executor) -> int:
    """On slots, by the host level and by pins."""
    arena = engine.manager.arena
    return sum(arena.claims(slot) for slot in range(arena.slots))


@pytest.mark.parametrize(
    ("handed_back", "left"),
    [
        ([(32, 64)], range(4, 12)),
        ([(0, 64)], range(4, 12)),
        ([(32, 72)], range(4, 12)),
        ([(160, 192)], range(2, 10)),
        ([(150, 300)], range(2, 10)),
        ([(191, 192)], range(2, 12)),
        ([(32, 64), (160, 192)], range(4, 10)),
        ([(160, 192), (32, 64)], range(4, 10)),
        ([(64, 96)], range(2, 12)),
        ([(32, 32), (0, 32), (192, 200)], range(2, 12)),
        ([(32, 192)], range(0)),
        ([(32, 112), (112, 192)], range(0)),
    ],
)
def test_the_rest_of_a_promise_is_loaded(
    engine: Executor, handed_back: list[tuple[int, int]], left: range
) -> None:
    request = asked(engine, own=32)
    for start, end in handed_back:
        engine.scheduler.cancel_load(request, start, end)
    assert claims(engine) == (WHOLE + 10 if left else WHOLE)
    position = (left.start if left else 2) * BLOCK
    step = len(PROMPT) - position - len(left) * BLOCK
    assert loaded(engine, request, position=position, step=step) == [*left]
    engine.scheduler.request_finished(request, [])
    engine.idle()
    assert claims(engine) == WHOLE


@pytest.mark.parametrize("copied", [False, True])
def test_saves_from_blocks_that_were_taken_away_are_not_published(
    engine: Executor, copied: bool
) -> None:
    other = list(range(500, 700))
    scheduler, worker, pool = engine.scheduler, engine.ranks[0].worker, engine.ranks[0].pool
    request, ids = engine.request(other), engine.free[:13]
    scheduler.get_num_new_matched_tokens(request, 0)
    for n in range(WHOLE):
        pool[ids[n]] = kv_of(other, n, 0, None)
    data = RequestData(request.request_id, other, ids, 0, 200)
    output = SimpleNamespace(new_requests=[data], cached_requests=[])
    worker.bind_connector_meta(scheduler.build_connector_meta(output))
    if copied:
        worker.wait_for_save(None)

        def ended() -> bool:
            worker.get_finished([], [])
            return not worker._saving

        until(ended)
    scheduler.request_reset(request)
    pool[ids] = 0
    if not copied:
        worker.wait_for_save(None)
    engine.idle()
    again = engine.run(other)
    assert (again.matched, again.right) == (WHOLE * BLOCK if copied else 0, True)


@pytest.mark.parametrize(
    ("taken", "pages", "copies"),
    [
        (192, 13, range(12)),
        (32, 4, range(4)),
        (24, 2, range(2)),
        (0, 4, range(4)),
        (0, 0, range(0)),
    ],
)
def test_a_promise_may_be_taken_in_part(
    engine: Executor, taken: int, pages: int, copies: range
) -> None:
    request = asked(engine)
    request.py_num_connector_matched_tokens = taken
    engine.scheduler.update_state_after_alloc_by_layer_group(request, [[]])
    found = loaded(engine, request, position=0, step=16, pages=pages)
    assert found == [*copies]
    engine.scheduler.request_finished(request, [])
    assert claims(engine) == WHOLE


@pytest.mark.parametrize("at_first", [5, 25])
def test_blocks_that_were_not_taken_are_computed_before_they_are_saved(
    engine: Executor, at_first: int
) -> None:
    longer = [*PROMPT, *range(700, 900)]
    request = engine.request(longer)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (192, False)
    request.py_num_connector_matched_tokens = 32
    ids, pool = engine.free[:25], engine.ranks[0].pool
    pool[ids] = float("nan")
    engine.scheduler.update_state_after_alloc(request, ids[:at_first])
    told, position, blocks = longer, 32, 0
    for end in (80, 208, 400):
        needed = max(at_first, end // BLOCK)
        start = position if blocks else 0
        data = RequestData(request.request_id, told, ids[blocks:needed], start, end - position)

        def compute(rank: Rank, part: range = range(position // BLOCK, end // BLOCK)) -> None:
            for n in part:
                rank.pool[ids[n]] = kv_of(longer, n, 0, None)

        engine.step([] if blocks else [data], [data] if blocks else [], compute)
        told, position, blocks = [], end, needed
    engine.scheduler.request_finished(request, [])
    engine.idle()
    again = engine.run([*longer, 1])
    assert (again.matched, again.right) == (400, True)


def test_a_promise_that_cannot_be_kept_stops_the_engine(engine: Executor) -> None:
    request = asked(engine)
    with pytest.raises(ValueError, match="12 blocks were promised"):
        engine.step([RequestData(request.request_id, PROMPT, [1, 2, -1], 0, 8)], [])
    request = asked(engine)
    with pytest.raises(TierError, match="promised blocks could not be copied"):
        engine.step([RequestData(request.request_id, PROMPT, [999] * 13, 0, 8)], [])
    engine.ranks[0].worker._broken.clear()
    engine.scheduler.request_finished(request, [])


def test_a_recording_has_one_line_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trace_path = tmp_path / "recorded.yaml", tmp_path / "trace.jsonl"
    stack = "model: {fingerprint: w}\narena: {size: 8 MiB}\ntiers: [{type: host}]\n"
    path.write_text(f"{stack}record: {trace_path}\n")
    monkeypatch.setenv(STACK, str(path))
    monkeypatch.setenv(PATIENCE, "60 s")
    made = Executor()
    made.run(PROMPT, answer=[1, 2, 3])
    made.idle()
    made.run([*PROMPT, *[7] * 40])
    made.run(PROMPT[-5:])
    made.close()
    trace = read_trace(trace_path)
    told = [(one.input_tokens, one.output_tokens, len(one.blocks)) for one in trace.requests]
    assert [(tokens, blocks) for tokens, _, blocks in told] == [(200, 12), (240, 15), (5, 0)]
    assert told[0][1] in (2, 3), "the last token is told with no step"
    assert (trace.unique, trace.block_tokens) == (15, BLOCK)
    assert [one.asked for one in trace.requests] == [(0, 12), (0, 14), (0, 0)]
    assert not any(one.answer for one in trace.requests)
    assert [one.order for one in trace.requests] == [(1, 2, 3), (4, 5, 6), (7, 8, 8)]
