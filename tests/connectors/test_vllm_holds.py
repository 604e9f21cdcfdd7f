"""Blocks of vLLM that are being saved: they are given to no other request, and nothing stalls.

Under vLLM's own scheduler, with a model runner that writes to blocks before the connector fences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from kvladder.connectors.vllm.holds import Holds
from tests.connectors.simulated import Simulation
from tests.connectors.test_vllm_simulated import prompt

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BLOCKS = {"state": 12, "states": 16, "all": 28, "full": 18}
"""The number of blocks by model, too few for two prompts of this many tokens."""
WHOLE = 56
Start = Callable[..., Simulation]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Simulation] = []

    def begin(model: str = "state", *, early: bool = True, **options: Any) -> Simulation:
        one = Simulation(
            tmp_path,
            {"host": "1 MiB"},
            model,
            blocks=BLOCKS[model],
            budget=64,
            early=early,
            **options,
        )
        made.append(one)
        one.add(prompt(9, 8))  # its save makes the ranks map the arena
        one.run()
        return one

    yield begin
    for one in made:
        held(one, False)
        one.run()
        one.close()


def held(one: Simulation, state: bool) -> None:
    """Keep copies from ending, or let them."""
    for rank in one.ranks:
        assert rank.copier is not None
        rank.copier.held = state


def served(one: Simulation, *, tokens: int = WHOLE, seed: int = 1) -> str:
    """Run a request to its end, with its saves still in flight."""
    held(one, True)
    request_id = one.add(prompt(seed, tokens))
    for _ in range(20):
        one.step()
        if request_id not in one.requests:
            break
    assert request_id not in one.requests
    assert one.half.busy
    return request_id


def hits_of(one: Simulation, seed: int = 1) -> int:
    """Return the number of that request's tokens in the cache, once all copies have ended."""
    held(one, False)
    one.run()
    one.reset()
    before = one.hits
    one.add(prompt(seed, WHOLE))
    one.run()
    return one.hits - before


def steps(one: Simulation, count: int = 5) -> None:
    for _ in range(count):
        one.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", ["state", "states", "all"])
def test_a_block_is_not_reused_while_it_is_saved(start: Start, model: str, overlap: bool) -> None:
    one = start(model, overlap=overlap)
    served(one)
    other = one.add(prompt(2, WHOLE))
    steps(one)
    assert one.scheduler.requests[other].num_computed_tokens == 0  # it waits for the saves alone
    held(one, False)
    steps(one, 30)
    assert other not in one.requests
    assert hits_of(one) == hits_of(one, seed=2) > 0


def test_no_request_is_preempted_for_blocks_that_saves_will_soon_free(start: Start) -> None:
    one = start()
    running = one.add(prompt(2, 15), length=40)
    one.step()
    served(one, tokens=48)
    steps(one, 20)
    assert one.half.freeing
    assert not one.scheduler.requests[running].num_preemptions
    held(one, False)
    one.run()
    assert len(one.answers[running]) == 40
    assert not one.half.freeing


def test_requests_are_preempted_where_the_ends_of_saves_free_too_little(start: Start) -> None:
    one = start()
    both = [one.add(prompt(seed, 24), length=40) for seed in (1, 2)]
    alive = [one.scheduler.requests[request_id] for request_id in both]
    one.run()
    assert [len(one.answers[i]) for i in both] == [40, 40]
    assert sum(request.num_preemptions for request in alive) > 0


@pytest.mark.parametrize("running", [False, True])
def test_vllm_s_own_cache_can_be_emptied_while_blocks_are_saved(
    start: Start, running: bool
) -> None:
    one = start()
    first = served(one)
    if running:
        one.add(prompt(3, 8), length=4)
        one.step()
    assert one.scheduler.reset_prefix_cache(reset_running_requests=running)
    assert not one.half.freeing
    second = one.add(prompt(2, WHOLE))
    steps(one)
    assert second not in one.requests  # it had the blocks while they were saved
    assert hits_of(one) < WHOLE // 8 * 8  # so they were not stored
    assert one.answers[first] == one.answers[f"r{one._count}"]


def test_blocks_of_an_aborted_request_are_held_too(start: Start) -> None:
    one = start()
    held(one, True)
    first = one.add(prompt(1, WHOLE), length=9)
    one.step()
    one.abort(first)
    other = one.add(prompt(2, WHOLE))
    steps(one)
    assert other in one.requests
    assert hits_of(one) > 0


def test_blocks_that_cannot_be_held_are_not_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holds, "take", lambda *_: None)
    one = start()
    served(one)
    one.add(prompt(2, WHOLE))
    steps(one)
    assert hits_of(one) == 0  # nor is anything wrong read: each read is checked


def test_a_failed_step_holds_no_blocks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saves never begin, so none of them ends."""
    one = start()
    said: list[str] = []
    monkeypatch.setattr(
        one.connector, "notices", SimpleNamespace(say=lambda kind, _: said.append(kind))
    )

    def fail(*_: Any, **__: Any) -> int:
        raise RuntimeError("no step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.half._computing, "begin", fail)
        request_id = one.add(prompt(1, WHOLE))
        one.step()
    assert said == ["build_connector_meta"]
    assert not one.half._holds._held
    one.run()
    assert one.answers[request_id]
    assert one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == one.blocks - 1


@pytest.mark.parametrize(("model", "early"), [("state", False), ("full", True)])
def test_no_block_is_held_where_the_fence_comes_in_time(
    start: Start, model: str, early: bool
) -> None:
    one = start(model, early=early)
    served(one)
    pool = one.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == one.blocks - 1
    one.add(prompt(2, WHOLE))
    steps(one)
    assert hits_of(one) == hits_of(one, seed=2) > 0


def test_every_block_is_free_when_the_engine_is_idle(start: Start) -> None:
    one = start()
    served(one)
    assert one.scheduler.has_requests()  # so vLLM makes steps until the saves have ended
    pool = one.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() < one.blocks - 1
    held(one, False)
    one.run()
    assert pool.get_num_free_blocks() == one.blocks - 1
    assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)
