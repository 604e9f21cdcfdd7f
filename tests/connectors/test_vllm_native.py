"""kvladder below vLLM's own offloading: as a tier of its tiering, and as its cache policy."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvladder.connectors import weights
from kvladder.errors import ConfigError
from tests.patience import PATIENCE_S, until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():  # whatever vLLM warns of when it is imported
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvladder.connectors.vllm_native import tier as vllm_native_tier

pytestmark = pytest.mark.slow

ROW = 5000
CONTEXT = ReqContext("r")
PATHS = {"type": "KVLadderTier", "module_path": "kvladder.connectors.vllm_native.tier"}


def spec(model: Path, *, tp: int = 1) -> Any:
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l0",))
    parallel = SimpleNamespace(world_size=tp, tp_size=tp, pp_size=1, pcp_size=1, dcp_size=1)
    config = SimpleNamespace(
        groups=(group,),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        model=SimpleNamespace(name=str(model), dtype="float32"),
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config)


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(bytes([number]) * 32, group)


class Native:
    """Calls a tier as vLLM's tiering does."""

    def __init__(
        self, model: Path, folder: Path, /, *, tp: int = 1, rows: int = 8, **settings: Any
    ) -> None:
        self.rows = np.zeros((rows, ROW), dtype=np.int8)
        stack: dict[str, Any] = {"host": "64 KiB", "files": str(folder), "capacity": "8 MiB"}
        stack["fetch"] = {"deadline": f"{PATIENCE_S} s"}
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(
            {**PATHS, **stack, **settings}, memoryview(self.rows.data), spec(model, tp=tp)
        )
        self._jobs = 0

    def run(self, submit: Any, keys: list[Any], rows: list[int]) -> Any:
        self._jobs += 1
        load = submit == self.tier.submit_load
        submit(TransferJob(self._jobs, keys, np.array(rows), load, CONTEXT))
        assert self.tier.has_pending_work()
        ended: list[Any] = []

        def has_ended() -> bool:
            ended.extend(self.tier.get_finished_jobs())
            return bool(ended)

        until(has_ended)
        [result] = ended
        assert result.job_id == self._jobs
        return result

    def has(self, number: int, group: int = 0) -> bool:
        return bool(self.tier.lookup(key(number, group), CONTEXT) is LookupResult.HIT)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights in a folder, as if an engine began whenever it asks for them."""
    monkeypatch.setattr(weights, "process_start_s", lambda: float("inf"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"weights" * 1000)
    return folder


@pytest.fixture
def natives() -> Iterator[list[Native]]:
    made: list[Native] = []
    yield made
    for native in made:
        native.tier.shutdown()


def test_blocks_handed_down_by_vllm_come_back_in_the_next_process(
    model: Path, tmp_path: Path, natives: list[Native]
) -> None:
    first = Native(model, tmp_path / "kv")
    random = np.random.default_rng(0)
    first.rows[:] = random.integers(-128, 127, first.rows.shape)
    kept = first.rows.copy()
    assert first.run(first.tier.submit_store, [key(1), key(2), key(1, 1)], [3, 5, 6]).success
    assert [first.has(1), first.has(2), first.has(1, 1), first.has(2, 1)] == [
        True,
        True,
        True,
        False,
    ]
    first.tier.shutdown()
    second = Native(model, tmp_path / "kv")
    natives.append(second)
    assert second.has(2)
    result = second.run(second.tier.submit_load, [key(2), key(1, 1)], [0, 1])
    assert (result.success, result.transfer_bytes) == (True, 2 * ROW)
    assert (second.rows[:2] == kept[[5, 6]]).all()
    assert not second.tier.has_pending_work()


def hinted(*actions: tuple[str, dict[str, Any]], number: int = 0) -> ReqContext:
    """Return a request with hints in its parameters, as over HTTP."""
    made = [
        {"action_id": f"a{n}", "action_type": verb, "action_version": "1", "payload": payload}
        for n, (verb, payload) in enumerate(actions)
    ]
    told = {"protocol_version": "0.1", "message_id": f"{number}", "actions": made}
    return ReqContext("hinted", kv_transfer_params={"kv_hints": told})


def test_a_requests_hints_rank_and_move_its_own_blocks(
    model: Path, tmp_path: Path, natives: list[Native]
) -> None:
    native = Native(model, tmp_path / "kv")
    natives.append(native)
    manager = native.tier.manager
    native.run(native.tier.submit_store, [key(1), key(2), key(3)], [0, 1, 2])
    until(manager.idle)
    other = {"keys": [(bytes([3]) * 32).hex()]}
    context = hinted(("pin", {"ttl_s": 600}), ("demote", {"to": "out", **other}))
    native.tier.on_new_request(context)
    for position, one in enumerate((key(1), key(2))):
        context.set_offload_key_position(one, 16 * (position + 1))
    native.tier.on_request_finished(context)
    assert manager.stats()["hints"]["pin"] == {"accepted": 1}
    assert manager.stats()["hints"]["demote"] == {"rejected": 1}
    names = [vllm_native_tier.block_key(key(number)) for number in (1, 2, 3)]
    with manager._stack.lock:
        metas = [manager._stack.meta(name) for name in names]
    assert [meta.priority for meta in metas] == [100, 100, 35]
    context = hinted(("demote", {"to": "out"}), number=1)
    native.tier.on_new_request(context)
    context.set_offload_key_position(key(1), 16)
    native.tier.on_request_finished(context)
    assert [native.has(number) for number in (1, 2, 3)] == [False, True, True]


def test_other_weights_or_ranks_find_nothing(
    model: Path, tmp_path: Path, natives: list[Native]
) -> None:
    first = Native(model, tmp_path / "kv")
    first.run(first.tier.submit_store, [key(1)], [0])
    first.tier.shutdown()
    ranks = Native(model, tmp_path / "kv", tp=2)
    assert not ranks.has(1)
    ranks.tier.shutdown()
    (model / "model.bin").write_bytes(b"others!" * 1000)
    others = Native(model, tmp_path / "kv")
    natives.append(others)
    assert not others.has(1)


def test_weights_that_vllm_may_not_have_read_are_refused(
    model: Path, tmp_path: Path, natives: list[Native], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the files are younger than this process
    with pytest.raises(ConfigError, match=r"model\.bin was replaced after the engine began"):
        Native(model, tmp_path / "kv")
    natives.append(Native(model, tmp_path / "kv", model={"fingerprint": "mine"}))


def test_a_damaged_block_is_a_failed_load_and_then_a_miss(
    model: Path, tmp_path: Path, natives: list[Native]
) -> None:
    first = Native(model, tmp_path / "kv")
    first.rows[:] = 7
    first.run(first.tier.submit_store, [key(1), key(2)], [0, 1])
    first.tier.shutdown()
    for path in (tmp_path / "kv").rglob("seg-*"):
        data = path.read_bytes()
        at = data.rfind(bytes([7]) * 64)
        if at > 0:
            path.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    second = Native(model, tmp_path / "kv")
    natives.append(second)
    result = second.run(second.tier.submit_load, [key(1), key(2)], [0, 1])
    assert not result.success
    assert len(result.successful_keys or ()) < 2
    assert [second.has(1), second.has(2)].count(False) == 1


def test_jobs_end_when_they_are_drained(model: Path, tmp_path: Path, natives: list[Native]) -> None:
    native = Native(model, tmp_path / "kv")
    natives.append(native)
    native.tier.submit_store(TransferJob(1, [key(1)], np.array([0]), False, CONTEXT))
    native.tier.submit_load(TransferJob(2, [key(9)], np.array([1]), True, CONTEXT))
    native.tier.drain_jobs()
    found = {result.job_id: result.success for result in native.tier.get_finished_jobs()}
    assert found == {1: True, 2: False}


def test_hashes_below_256_bits_are_never_kept(
    model: Path, tmp_path: Path, natives: list[Native]
) -> None:
    native = Native(model, tmp_path / "kv")
    natives.append(native)
    short = make_offload_key(bytes(8), 0)
    assert native.run(native.tier.submit_store, [short], [0]).success
    assert native.tier.lookup(short, CONTEXT) is LookupResult.MISS


def test_wrong_settings_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        Native(model, tmp_path / "kv", hosst="1 MiB")
    with pytest.raises(ConfigError, match=r"secondary_tiers.host: cannot be combined with config"):
        Native(model, tmp_path / "kv", config="stack.yaml")
    with pytest.raises(ConfigError, match=r"record: has no effect .*vLLM's own offloading look up"):
        Native(model, tmp_path / "kv", record=str(tmp_path / "trace.jsonl"))


# ---- the cache policy


def context(priority: int | None) -> ReqContext:
    return ReqContext("r", None if priority is None else {"kvladder": {"priority": priority}})


def test_the_policy_evicts_the_lowest_priority_then_the_least_recently_used() -> None:
    policy = CachePolicyFactory.get_cache_policy_cls(
        "PrioritizedLRUPolicy", "kvladder.connectors.vllm_native.policy"
    )(8)
    for number, priority in enumerate([80, None, 10, None]):
        policy.on_store_miss([key(number)], context(priority))
        block = ChunkStatus(number)
        policy.insert(key(number), block)
        block.ref_cnt = 0
        policy.mark_evictable(key(number))
    policy.touch([key(1)], context(None))
    assert policy.evict(5, set()) is None
    evicted = policy.evict(3, {key(3)})
    assert evicted is not None
    assert [name for name, _ in evicted] == [key(2), key(1), key(0)]
    policy.touch([key(3)], context(90))
    policy.mark_non_evictable(key(3))
    assert policy.evict(1, set()) is None
    policy.mark_evictable(key(3))
    policy.clear()
    assert policy.get(key(3)) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_policy_agrees_with_a_sorted_list(seed: int) -> None:
    random = Random(seed)
    policy: Any = CachePolicyFactory.get_cache_policy_cls(
        "PrioritizedLRUPolicy", "kvladder.connectors.vllm_native.policy"
    )(32)
    order: list[tuple[int, Any]] = []  # the least recently used first
    free = list(range(32))
    for number in range(400):
        if free and random.random() < 0.5:
            priority = random.choice([10, 35, 60])
            name = make_offload_key(number.to_bytes(32), 0)
            policy.on_store_miss([name], context(priority))
            block = ChunkStatus(free.pop())
            block.ref_cnt = 0
            policy.insert(name, block)
            order.append((priority, name))
        elif order and random.random() < 0.5:
            entry = order.pop(random.randrange(len(order)))
            policy.touch([entry[1]], context(None))
            order.append(entry)
        elif order:
            expected = min(order, key=lambda entry: entry[0])
            ((name, block),) = policy.evict(1, set())
            assert name == expected[1]
            order.remove(expected)
            free.append(block.chunk_id)


def test_names_cover_the_fields_that_vllm_gives_its_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvladder.connectors.vllm_native.tier import layout_of

    def named() -> Any:
        return layout_of(spec(tmp_path).config, ROW, "x").namespace()

    file = tmp_path / "processor_config.json"
    found = [named()]
    for text in ("1", "2"):
        file.write_text(text)
        found.append(named())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    found.append(named())
    monkeypatch.setenv("VLLM_PORT", "4711")
    assert named() == found[-1]
    assert len(set(found)) == len(found)


def test_jobs_larger_than_the_arena_go_piece_by_piece(
    model: Path, tmp_path: Path, natives: list[Native], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena has eight slots; blocks pass through them to files and back."""
    monkeypatch.setattr("kvladder.tiers.ladder.batched.ROOM_S", PATIENCE_S)
    keys, rows = [key(number) for number in range(40)], [*range(40)]
    first = Native(model, tmp_path / "kv", rows=40)
    natives.append(first)
    assert first.tier.manager.arena.slots == 8
    first.rows[:] = np.random.default_rng(0).integers(-128, 127, first.rows.shape)
    kept = first.rows.copy()
    assert first.run(first.tier.submit_store, keys, rows).transfer_bytes == 40 * ROW
    first.rows[:] = 0
    assert first.run(first.tier.submit_load, keys, rows[::-1]).success
    assert (first.rows == kept[::-1]).all()
    assert "dropped_room" not in first.tier.manager.stats()["host"]
    first.tier.shutdown()
    second = Native(model, tmp_path / "kv", rows=40)
    natives.append(second)
    jobs = [
        TransferJob(
            number, keys[start : start + 20], np.array(rows[start : start + 20]), True, CONTEXT
        )
        for number, start in enumerate((0, 20))
    ]
    for job in jobs:
        second.tier.submit_load(job)
    second.tier.drain_jobs()
    assert all(result.success for result in second.tier.get_finished_jobs())
    assert (second.rows == kept).all()
    second.tier.manager.check()
