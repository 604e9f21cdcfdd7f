"""The connector for TensorRT-LLM, against an executor that keeps the rules of the real one."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.config import registry
from kvladder.connectors.trtllm import KVLadderScheduler, KVLadderWorker, bases
from kvladder.connectors.trtllm.options import PATIENCE, STACK, read
from kvladder.connectors.trtllm.step import _HALVES
from kvladder.errors import ConfigError, LayoutError
from tests.connectors.executor import BLOCK, Executor, RequestData, args_of, kv_of
from tests.connectors.moody import MoodyTier
from tests.patience import PATIENCE_S, until

PROMPT, OTHER = list(range(100, 300)), list(range(500, 650))
Make = Callable[..., Executor]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the stack that engines are given."""

    def write(
        *, weights: str = "w1", tier: str = "files", arena: str = "8 MiB", more: str = ""
    ) -> Path:
        path = tmp_path / "stack.yaml"
        place = f"path: {tmp_path}/kv, " if tier == "files" else ""
        path.write_text(
            f"""
model: {{fingerprint: {weights}}}
arena: {{size: {arena}}}
tiers:
  - {{name: host, type: host}}
  - {{name: cold, type: {tier}, {place}capacity: 64 MiB, when: commit{more}}}
"""
        )
        monkeypatch.setenv(STACK, str(path))
        monkeypatch.setenv(PATIENCE, "60 s")
        return path

    write()
    return write


@pytest.fixture
def make(stack: object) -> Iterator[Make]:
    """Makes engines, and closes them."""
    engines: list[Executor] = []

    def begin(*args: Any, **more: Any) -> Executor:
        engine = Executor(*args, **more)
        engines.append(engine)
        if len(engine.ranks) > 1:
            engine.until(lambda: engine.scheduler._cache.complete)
        return engine

    yield begin
    for engine in engines:
        engine.close()
    assert not _HALVES


# ---- tokens, and their sources


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_computed_blocks_are_loaded_and_right(make: Make, ranks: int) -> None:
    engine = make(ranks=ranks)
    cold = engine.run(PROMPT)
    assert (cold.matched, cold.right) == (0, True)
    engine.idle()
    again = engine.run(PROMPT)
    assert (again.matched, again.right, again.saves) == (192, True, False)
    longer = engine.run([*PROMPT, *[7] * 40])
    assert (longer.matched, longer.right) == (192, True)
    engine.idle()
    assert engine.run([*PROMPT, *[7] * 40]).matched == 224


def test_the_last_token_of_a_prompt_is_always_computed(make: Make) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.idle()
    assert engine.run(PROMPT[:193]).matched == 192
    assert engine.run(PROMPT[:192]).matched == 176


@pytest.mark.parametrize("at_once", [7, 16, 48, 4096])
@pytest.mark.parametrize("by_step", [False, True])
def test_prompts_arrive_in_pieces_of_any_length(make: Make, at_once: int, by_step: bool) -> None:
    engine = make()
    assert engine.run(PROMPT, at_once=at_once, by_step=by_step).right
    engine.idle()
    found = engine.run(PROMPT, at_once=at_once, by_step=by_step)
    assert (found.matched, found.right) == (192, True)


def test_answers_are_cached_like_prompts(make: Make) -> None:
    engine = make()
    told = list(range(900, 940))
    assert engine.run(PROMPT, answer=told).right
    engine.idle()
    found = engine.run([*PROMPT, *told, 1])
    assert (found.matched, found.right) == (240, True)


def test_blocks_that_the_engine_holds_are_saved_and_not_loaded(make: Make) -> None:
    engine = make()
    assert engine.run(PROMPT, own=64).right
    engine.idle()
    whole = engine.run(PROMPT)
    assert (whole.matched, whole.right) == (192, True)
    rest = engine.run(PROMPT, own=96)
    assert (rest.matched, rest.right) == (96, True)
    assert engine.run(PROMPT, own=100).matched == 0, "a part of a block is the engine's own"
    assert engine.run(PROMPT, own=192).matched == 0


def test_salts_share_nothing(make: Make) -> None:
    engine, salts = make(), list[dict[str, Any]]([{"cache_salt": "one"}, {}])
    for more in salts:
        cold = engine.run(PROMPT, **more)
        assert (cold.matched, cold.right) == (0, True), more
        engine.idle()
        assert engine.run(PROMPT, **more).matched == 192
    assert engine.run(PROMPT, cache_salt="two").matched == 0


def test_requests_with_an_adapter_are_left_alone(make: Make) -> None:
    """Their number is all that can be seen, and another adapter may have it by the next one."""
    engine = make()
    for number, content in ((3, "old"), (3, "new"), (0, "")):
        engine.adapters[number] = content
        found = engine.run(PROMPT, lora_task_id=number)
        assert (found.right, found.matched, found.saves) == (True, 0, False)
        engine.idle()
    assert engine.run(PROMPT).matched == 0


@pytest.mark.parametrize(
    "more",
    [
        {"multimodal_hashes": [[1, 2]]},
        {"prompt_embedding_table": torch.zeros(2, 2)},
        {"py_multimodal_data": {"image": 1}},
    ],
)
def test_requests_with_other_inputs_are_left_alone(make: Make, more: dict[str, Any]) -> None:
    engine = make()
    for _ in range(2):
        found = engine.run(PROMPT, **more)
        assert (found.matched, found.saves) == (0, False)
    engine.idle()
    assert engine.run(PROMPT).matched == 0
    engine.run(OTHER, multimodal_hashes=[])
    engine.idle()
    assert engine.run(OTHER).matched == 144


@pytest.mark.parametrize("by_step", [False, True])
def test_priorities_decide_which_levels_take_a_block(make: Make, stack: Any, by_step: bool) -> None:
    stack(more=", min_priority: 50")
    engine = make()
    engine.run(PROMPT, priorities=[80] * 4 + [40] * 9, by_step=by_step)
    engine.run(OTHER, priorities=[40] * 4 + [80] * 6, by_step=by_step)  # 40 counts for all of it
    engine.idle()
    assert engine.manager.stats()["cold"]["blocks"] == 4
    assert engine.run(PROMPT).matched == 192


def test_another_process_finds_the_blocks_of_this_one(make: Make, stack: Any) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.idle()
    engine.close()
    found = make().run(PROMPT)
    assert (found.matched, found.right) == (192, True)


def test_other_weights_and_arguments_find_nothing(make: Make, stack: Any) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.close()
    stack(weights="w2")
    other = make()
    assert other.run(PROMPT).matched == 0
    other.close()
    stack()
    assert make(args_of(dtype="float16")).run(PROMPT).matched == 0


# ---- failures


def test_a_flipped_byte_shortens_the_match(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.close()
    wanted = kv_of(PROMPT, 3, 0, None)[1, 1].numpy().tobytes()
    for path in (tmp_path / "kv").rglob("seg-*"):
        data = bytearray(path.read_bytes())
        while (place := data.find(wanted)) >= 0:
            data[place + 9] ^= 1
        path.write_bytes(data)
    os.sync()
    found = make().run(PROMPT)
    assert (found.matched, found.right) == (48, True)


class Cold(MoodyTier):
    """Never answers once it ``hangs``, except a tier that ``recovers``."""

    hangs = recovers = False

    async def _trouble(self) -> None:
        while Cold.hangs:
            await (asyncio.sleep(0.01) if Cold.recovers else asyncio.Event().wait())


def test_a_tier_that_hangs_costs_patience_and_no_tokens(
    make: Make, stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registered, ("tiers", "cold"), Cold)
    stack(tier="cold", arena="128 KiB", more=", timeout: 1 s")
    monkeypatch.setenv(PATIENCE, "10 ms")
    engine = make()
    engine.run(PROMPT)
    engine.idle()
    for other in range(3):  # the blocks of host are now only in the tier
        engine.run([other] * 200)
        engine.idle()
    monkeypatch.setattr(Cold, "hangs", True)
    for _ in range(3):
        found = engine.run(PROMPT)
        assert found.right
        assert found.matched < 192
    monkeypatch.setattr(Cold, "hangs", False)


@pytest.mark.parametrize("ends", [True, False])
def test_blocks_loaded_after_the_last_step_are_released(
    make: Make, stack: Any, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    monkeypatch.setitem(registry._registered, ("tiers", "cold"), Cold)
    stack(tier="cold", more=", timeout: 60 s")
    monkeypatch.setenv(PATIENCE, "10 ms")
    engine = make()
    engine.run(PROMPT)
    engine.idle()
    with engine.manager._stack.lock:  # the blocks of host are now only in the tier
        engine.manager._stack.host.forget([*engine.manager._stack.host.index], "evicted")
    monkeypatch.setattr(Cold, "hangs", True)
    monkeypatch.setattr(Cold, "recovers", True)
    assert engine.run(PROMPT).matched == 0
    rising = engine.scheduler._cache.connector.rising
    assert len(rising) == 1
    monkeypatch.setattr(Cold, "hangs", False)
    until(lambda: engine.manager.stats()["cold"]["loaded"] == 12)
    if ends:  # and no step follows; a claim left on a slot fails the test
        engine.ranks[0].worker.close()
    else:  # before anything is promised to the next request
        engine.scheduler.get_num_new_matched_tokens(engine.request(OTHER[:8]), 0)
    assert not rising


def test_blocks_loaded_too_late_serve_the_next_request(
    make: Make, stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.close()
    monkeypatch.setenv(PATIENCE, "1 us")
    engine = make()
    first = engine.run(PROMPT)
    assert first.right
    engine.until(lambda: engine.manager.stats()["cold"]["loaded"] == 12)
    engine.idle()
    found = engine.run(PROMPT)
    assert (found.matched, found.right) == (192, True)


def test_a_prompt_larger_than_the_arena_is_served_in_part(make: Make, stack: Any) -> None:
    stack(arena="128 KiB")
    engine = make()
    slots = engine.manager.arena.slots
    assert slots < 12
    assert engine.run(PROMPT).right
    engine.idle()
    found = engine.run(PROMPT)
    assert found.right
    assert found.matched <= slots * BLOCK


def test_an_engine_survives_errors_of_its_connector(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.idle()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(engine.manager, "fetch", broken)
        assert engine.run(PROMPT).matched == 0
    with monkeypatch.context() as patched:
        patched.setattr(engine.manager, "save", broken)
        assert engine.run(OTHER).right
    assert "a request is not cached: RuntimeError('broken')" in caplog.text
    assert "a request is not saved: RuntimeError('broken')" in caplog.text
    assert engine.run(PROMPT).matched == 192
    bad = engine.request([-1] * 40)
    assert engine.scheduler.get_num_new_matched_tokens(bad, 0) == (0, False)


def test_tokens_that_do_not_fit_the_step_are_not_saved(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    request = engine.request(PROMPT)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    ids = list(range(20))
    engine.step([RequestData(request.request_id, PROMPT, ids[:13], 0, 200)], [])
    engine.step([], [RequestData(request.request_id, [1, 2], [], 200, 1)])
    assert "its known tokens end at 202, but the step ends at 201" in caplog.text
    for position in range(201, 260):
        engine.step([], [RequestData(request.request_id, [3], [], position, 1)])
    engine.scheduler.request_finished(request, ids)
    engine.idle()
    assert engine.manager.stats()["host"]["blocks"] == 12
    unlike = engine.request(PROMPT)
    engine.scheduler.get_num_new_matched_tokens(unlike, 192)
    engine.step([RequestData(unlike.request_id, OTHER, ids[:10], 0, 150)], [])
    engine.scheduler.request_finished(unlike, ids)
    engine.idle()
    assert engine.run(OTHER).matched == 0


def test_promised_blocks_stay_whatever_else_is_saved(make: Make, stack: Any) -> None:
    stack(arena="512 KiB")
    engine = make()
    engine.run(PROMPT)
    engine.idle()
    request = engine.request(PROMPT)
    promised, _ = engine.scheduler.get_num_new_matched_tokens(request, 0)
    assert promised == 192
    for other in range(8):  # more than there is room for
        engine.run([other] * 200)
        engine.idle()
    pool, ids = engine.ranks[0].pool, engine.free[:13]
    engine.step([RequestData(request.request_id, PROMPT, ids, 0, 8)], [])
    assert all(torch.equal(pool[ids[n]], kv_of(PROMPT, n, 0, None)) for n in range(12))
    engine.scheduler.request_finished(request, ids)


def test_blocks_of_a_request_are_kept_until_their_copies_have_ended(make: Make) -> None:
    engine = make()
    scheduler, worker = engine.scheduler, engine.ranks[0].worker
    request = engine.request(PROMPT)
    scheduler.get_num_new_matched_tokens(request, 0)
    data = RequestData(request.request_id, PROMPT, list(range(13)), 0, 200)
    output = SimpleNamespace(new_requests=[data], cached_requests=[])
    worker.bind_connector_meta(scheduler.build_connector_meta(output))
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    assert scheduler.request_finished(request, data.new_block_ids), "nobody has seen them end"
    handed = [request.request_id]
    while request.request_id not in worker.get_finished(handed, [])[0]:
        handed = []
    assert not scheduler.request_finished(request, data.new_block_ids)


def claims(engine: Executor) -> int:
    """Return the claims on slots: one per block of the host level, one per pin."""
    arena = engine.manager.arena
    return sum(arena.claims(slot) for slot in range(arena.slots))


def test_requests_that_never_run_leave_nothing_pinned(make: Make) -> None:
    engine = make()
    engine.run(PROMPT)
    engine.idle()
    ways: list[Callable[[Any], object]] = [
        lambda request: engine.scheduler.request_finished(request, []),
        engine.scheduler.request_reset,
        lambda request: engine.scheduler.cancel_load(request, 0, 192),
        lambda request: engine.scheduler.get_num_new_matched_tokens(request, 192),
    ]
    for end in ways:
        request = engine.request(PROMPT)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (192, False)
        assert claims(engine) == 24
        end(request)
        assert claims(engine) == 12


# ---- ranks


def test_nothing_is_promised_before_all_ranks_can_copy(stack: object) -> None:
    engine = Executor(ranks=2)
    quiet = engine.ranks[1].worker
    quiet._met = True  # it never arrives
    assert engine.run(PROMPT).right
    assert not engine.run(PROMPT).saves
    assert engine.run(PROMPT).matched == 0
    engine.close()


def test_a_rank_with_other_tensors_is_named(
    stack: object, caplog: pytest.LogCaptureFixture
) -> None:
    def register(worker: KVLadderWorker, pool: torch.Tensor) -> None:
        worker.register_kv_caches(pool if worker._rank == 0 else pool.to(torch.float16))

    engine = Executor(ranks=2, register=register)
    engine.until(lambda: "rank 1 has other tensors" in caplog.text)
    assert engine.run(PROMPT).matched == 0
    engine.close()


def test_a_foreign_client_keeps_no_rank_from_joining(stack: object) -> None:
    engine = Executor(ranks=2)
    meeting = engine.scheduler._cache.meeting
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(meeting.address)
        stranger.sendall(b"\0\0\0\x04abcd")
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(meeting.address)
            engine.until(lambda: engine.scheduler._cache.complete)
    engine.run(PROMPT)
    engine.idle()
    assert engine.run(PROMPT).matched == 192
    engine.close()


OTHER_RANK = """
import pickle, sys
import torch
from tests.connectors.executor import *
worker = KVLadderWorker(args_of(ranks=2))
worker._rank = 1
pool = torch.zeros(BLOCKS, LAYERS, 2, ELEMENTS)
worker.register_kv_caches(pool)
while True:
    told = pickle.load(sys.stdin.buffer)
    if told is None:
        break
    step, compute, handed = told
    worker.bind_connector_meta(step)
    worker.start_load_kv(None)
    for index, tokens in compute:
        pool[index] = kv_of(tokens, len(tokens) // BLOCK - 1, 1, None)
    worker.wait_for_save(None)
    worker.get_finished(handed, [])
    pickle.dump(pool.sum(dim=(1, 2, 3)).tolist(), sys.stdout.buffer)
    sys.stdout.buffer.flush()
worker.close()
"""


@pytest.mark.slow
def test_a_rank_may_be_a_process_of_its_own(stack: object) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    to, back = child.stdin, child.stdout
    assert to is not None
    assert back is not None
    engine = Executor(args_of(ranks=2))
    scheduler, near = engine.scheduler, engine.ranks[0].worker

    def step(data: list[RequestData], compute: list[tuple[int, list[int]]]) -> list[float]:
        output = SimpleNamespace(new_requests=data, cached_requests=[])
        made = scheduler.build_connector_meta(output)
        near.bind_connector_meta(made)
        near.start_load_kv(None)
        near.wait_for_save(None)
        pickle.dump((made, compute, []), to)
        to.flush()
        near.get_finished([], [])
        found: list[float] = pickle.load(back)
        return found

    try:
        while not scheduler._cache.complete:
            step([], [])
        blocks = [(n, PROMPT[: (n + 1) * BLOCK]) for n in range(12)]
        request = engine.request(PROMPT)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        sums = step([RequestData(request.request_id, PROMPT, list(range(13)), 0, 200)], blocks)
        while scheduler.request_finished(request, []):
            step([], [])
        again = engine.request(PROMPT)
        assert scheduler.get_num_new_matched_tokens(again, 0) == (192, False)
        data = RequestData(again.request_id, PROMPT, list(range(20, 33)), 0, 8)
        assert step([data], [])[20:32] == sums[:12]
        scheduler.request_finished(again, [])
    finally:
        pickle.dump(None, to)
        to.close()
        assert child.wait(PATIENCE_S) == 0
        back.close()
    near.close()


# ---- at start


def test_unsupported_settings_are_refused_by_name(stack: Any) -> None:
    refused: list[tuple[Any, str]] = [
        (args_of(pipeline_parallel_size=2), "llm_args.pipeline_parallel_size"),
        (args_of(context_parallel_size=2), "llm_args.context_parallel_size"),
        (args_of(enable_attention_dp=True), "llm_args.enable_attention_dp"),
        (args_of(speculative_config=object()), "llm_args.speculative_config"),
        (args_of(), "llm_args.kv_cache_config.max_attention_window"),
        (args_of(), "llm_args.kv_cache_config.enable_block_reuse"),
    ]
    refused[4][0].kv_cache_config.max_attention_window = [128]
    refused[5][0].kv_cache_config.enable_block_reuse = False
    for args, where in refused:
        for half in (KVLadderScheduler, KVLadderWorker):
            with pytest.raises(ConfigError) as raised:
                half(args)
            assert raised.value.path == where
            assert raised.value.hint
    worker = KVLadderWorker(args_of(ranks=2, gpus_per_node=1))
    with pytest.raises(ConfigError, match="ranks on one machine"):
        worker.register_kv_caches(torch.zeros(4, 2, 2, 8))
    worker.close()


def test_the_stack_and_the_patience_come_from_the_environment(stack: Any) -> None:
    path = str(stack())
    assert read({STACK: path})[0].patience_s == 0.05
    assert read({STACK: path, PATIENCE: "20 ms"})[0].patience_s == 0.02
    for environment, where in [({}, STACK), ({STACK: path, PATIENCE: "soon"}, PATIENCE)]:
        with pytest.raises(ConfigError) as raised:
            read(environment)
        assert raised.value.path == where
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read({STACK: "/nowhere.yaml"})


def test_pools_of_regions_are_taken_and_windows_are_not(make: Make) -> None:
    def region(tensor: torch.Tensor) -> Any:
        flat = tensor.view(torch.uint8).flatten(1)
        return SimpleNamespace(as_tensor=lambda: flat)

    def layout(parts: list[torch.Tensor], window: int | None = None) -> Any:
        group = SimpleNamespace(regions=[region(one) for one in parts], window_size=window)
        return SimpleNamespace(groups=[group], tokens_per_block=BLOCK)

    def register(worker: KVLadderWorker, pool: torch.Tensor) -> None:
        pools.append([pool[:, :1].contiguous(), pool[:, 1:].contiguous()])
        worker.register_kv_cache_layout(layout(pools[-1]))

    pools: list[list[torch.Tensor]] = []
    engine = make(register=register)
    request = engine.request(PROMPT)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    for part in pools[0]:
        part[:13] = torch.randn_like(part[:13])
    engine.step([RequestData(request.request_id, PROMPT, list(range(13)), 0, 200)], [])
    engine.scheduler.request_finished(request, [])
    engine.idle()
    again = engine.request(PROMPT)
    assert engine.scheduler.get_num_new_matched_tokens(again, 0) == (192, False)
    engine.step([RequestData(again.request_id, PROMPT, list(range(20, 33)), 0, 8)], [])
    engine.scheduler.request_finished(again, [])
    assert all(torch.equal(part[20:32], part[:12]) for part in pools[0])
    worker = KVLadderWorker(args_of())
    with pytest.raises(LayoutError, match=r"windows \[128\]"):
        worker.register_kv_cache_layout(layout([torch.zeros(4, 2, 2, 8)], 128))
    worker.close()


def test_without_tensorrt_llm_stand_ins_are_used() -> None:
    assert bases.rank() == 0
    assert issubclass(KVLadderWorker, bases.WorkerBase)
    worker: Any = bases._Worker(None)
    worker.bind_connector_meta(1)
    assert worker.get_connector_meta() == 1
    worker._clear_connector_meta()
    assert worker.get_connector_meta() is None
    assert worker.register_forward_pass_callable() is None
