"""Pools over real tiers with real bytes: to host and files and back, restarts, salts, faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvladder
from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.device import open_device, opening
from kvladder.errors import ConfigError, OutOfBlocks, PlanError
from kvladder.gpu.pool.events import PoolEvent
from kvladder.gpu.pool.pool import PoolSettings
from kvladder.gpu.sizing.groups import Group, Layer
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.policy.retention import Retention, RetentionRange
from kvladder.testing.redisserver import RedisServer
from tests.gpu.device import Model
from tests.gpu.engine import Indexed, replay
from tests.patience import PATIENCE_S, until


@contextmanager
def model(source: dict[str, Any], *groups: Group, **options: Any) -> Iterator[Model]:
    opened = Model(source, *groups, **options)
    try:
        yield opened
        opened.settle()
        assert all(pool.free == pool.blocks for pool in opened.cache.pools)
    finally:
        opened.close()


def stack(*below: dict[str, Any], slots: int = 16, **host: Any) -> dict[str, Any]:
    arena = {"size": slots * 4096, "reserve": "50 %" if below else 0}
    return {"arena": arena, "tiers": [{"type": "host", **host}, *below]}


def files(path: Path, **options: Any) -> dict[str, Any]:
    """Return files that are written through, so that ``idle`` knows of all work in flight."""
    common = {"type": "files", "path": str(path), "capacity": "8 MiB", "segment": "4 MiB"}
    return {**common, "when": "commit", **options}


def test_blocks_evicted_from_the_device_come_back_from_host() -> None:
    with model(stack()) as engine:
        assert engine.run(range(16)) == 0
        engine.evict()
        assert engine.cache.stats()["host"]["blocks"] == 4
        assert engine.run([*range(16), 99]) == 16
        assert engine.cache.pools[0].stats.onboarded == 4
        stored = engine.cache.stats()["host"]["stored"]
        engine.cache.pools[0].evict(4)  # the host has them: nothing is copied
        engine.settle()
        assert engine.cache.stats()["host"]["stored"] == stored + 1  # the tail alone


@pytest.mark.slow
def test_blocks_evicted_from_host_come_back_from_files_and_after_a_restart(tmp_path: Path) -> None:
    source = stack(files(tmp_path), slots=8)
    with model(source) as engine:
        for start in (0, 100, 200, 300):
            engine.run(range(start, start + 16))
            engine.evict()
        assert engine.cache.stats()["host"]["blocks"] <= 8
        assert engine.run([*range(16), 99]) == 16
        assert engine.cache.stats()["files"]["loaded"] >= 4
    with model(source) as engine:
        assert engine.cache.stats()["files"]["recovered"] >= 12
        assert engine.run([*range(16), 99]) == 16
        assert engine.run(range(100, 117)) == 16
        assert engine.run(range(100, 117), salt="other") == 0
    with model(source, weights="others") as engine:
        assert engine.run([*range(16), 99]) == 0


@pytest.mark.slow
def test_one_device_finds_blocks_of_another_in_a_shared_store(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        shared = {"type": "redis", "url": server.url, "capacity": "8 MiB", "when": "commit"}
        patient = {"timeout": "20 s", "connect_timeout": "20 s"}
        source = {**stack({**shared, **patient}), "fetch": {"deadline": "1 m"}}
        with model(source) as one, model(source) as other:
            assert one.run(range(16)) == 0
            one.evict()

            def is_found() -> bool:
                """Return whether the store has the blocks: one request's answer serves the next."""
                request = other.begin([*range(16), 99])
                other.requests.release(request)
                return request.cached == 16

            until(is_found)
            assert other.cache.stats()["redis"]["loaded"] == 4
            assert other.run([*range(16), 99]) == 16, "and it checks every byte"
            assert other.run(range(17), salt="another") == 0


def test_salts_and_adapters_share_nothing_through_the_tiers() -> None:
    with model(stack(slots=32), blocks=32) as engine:
        for name in ({"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {}):
            assert engine.run(range(9), **name) == 0
        engine.evict()
        for name in ({"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {}):
            assert engine.run(range(9), **name) == 8


def test_the_blocks_of_one_salt_are_purged_everywhere() -> None:
    for windows in (0, 1):
        groups = [Group("all", 4), *[Group("near", 4, "window", 8)] * windows]
        with model(stack(slots=32), *groups, blocks=32) as engine:
            with pytest.raises(ValueError, match="empty"):
                engine.cache.purge("")
            for salt in ("a", "b"):
                engine.run(range(9), salt=salt)
            engine.evict()
            for salt in ("a", "b"):
                engine.run(range(100, 109), salt=salt)
            engine.cache.purge("a")
            engine.settle()
            for start in (0, 100):
                assert engine.run(range(start, start + 9), salt="a") == 0
                assert engine.run(range(start, start + 9), salt="b") == 8


def test_a_level_takes_blocks_above_its_threshold_and_others_are_forgotten() -> None:
    with model({**stack(min_priority=40), "gpu": {"events": 1000}}) as engine:
        high = Retention((RetentionRange(0, 8, 80),))
        engine.run(range(16), retention=high)
        engine.evict()
        assert engine.cache.stats()["host"]["blocks"] == 2
        kinds = [type(event).__name__ for event in engine.cache.take_events()]
        assert kinds.count("PoolRemoved") == 2
        assert engine.run([*range(16), 99]) == 8


def test_blocks_evicted_from_the_last_level_leave_the_index() -> None:
    with model({**stack(slots=4), "gpu": {"events": 1000}}) as engine:
        seen: list[PoolEvent] = []
        index: Indexed = {}
        for start in (0, 100, 200):
            engine.run(range(start, start + 16))
            engine.evict()
            seen += engine.cache.take_events()
        replay(seen, index)
        pool = engine.cache.pools[0]
        assert len(index) == len(pool._ledger.index) == 4
        assert {level for _, level, _ in index.values()} == {"tiers"}
        assert engine.run([*range(200, 216), 99]) == 16


def test_removed_blocks_are_gone_from_both_sides() -> None:
    with model(stack()) as engine:
        engine.run(range(16))
        engine.evict()
        first = engine.requests.sequences[0].scheme.chain(
            range(4), parent=engine.requests.sequences[0].scheme.root()
        )
        engine.cache.pools[0].remove(first)
        engine.settle()
        assert engine.cache.stats()["host"]["blocks"] == 0
        assert engine.run([*range(16), 99]) == 0
        engine.cache.reset()
        assert engine.run([*range(16), 99]) == 0


def test_a_tier_that_gives_nothing_back_is_a_miss(tmp_path: Path) -> None:
    source = stack(files(tmp_path), slots=4)
    with model(source, blocks=8) as engine:
        engine.run(range(16))
        engine.evict()
        engine.run(range(100, 116))
        engine.evict()
    for segment in tmp_path.rglob("*"):
        if segment.name.startswith("seg-"):
            data = bytearray(segment.read_bytes())
            for at in range(len(data)):
                data[at] ^= 0x5A
            segment.write_bytes(data)
    with model(source, blocks=8) as engine:
        request = engine.begin([*range(16), 99])
        assert request.lost
        assert request.cached > 0
        engine.requests.release(request)
        engine.settle()
        assert engine.run([*range(16), 99]) == 0


def test_a_full_device_waits_for_its_offloads() -> None:
    with model(stack(), blocks=4) as engine:
        engine.run(range(16))
        with pytest.raises(OutOfBlocks, match="blocks are needed"):
            engine.requests.begin(range(100, 116))
        engine.settle()
        assert engine.run(range(100, 116)) == 0


def test_settings_of_the_pools_are_shown_and_take_effect() -> None:
    own = {"partial": "copy", "events": 10, "shares": [1]}
    with model({**stack(), "gpu": own}) as engine:
        text = engine.cache.describe()
        for line in ("gpu.partial  ", "gpu.shares", "partial matches: copy", "16 blocks of 4"):
            assert line in text
        engine.run(range(6))
        assert engine.cache.pools[0].settings.partial == "copy"
        assert engine.cache.take_events()


@pytest.mark.parametrize(
    ("gpu", "memory", "first"),
    [
        ({}, int(0.9 * 900_000), 0.5),
        ({"fraction": 0.5}, 450_000, 0.5),
        ({"max_tokens": 64}, 64 * 1024, 0.5),
        ({"shares": [3, 1]}, int(0.9 * 900_000), 0.75),
        ({"memory": "256 KiB"}, 256 * 1024, 0.5),
        ({"memory": "256 KiB", "shares": [3, 1]}, 256 * 1024, 0.75),
    ],
)
def test_pools_get_the_memory_that_settings_give_them(
    gpu: dict[str, Any], memory: int, first: float
) -> None:
    """A pass takes 100,000 of 1,000,000 bytes that are free; a token 512 in each of two pools."""
    layers = [Layer("0", 4, 16, "float32"), Layer("1", 2, 32, "float32")]
    plan = CachePlan(layers, block_tokens=4, max_tokens=32)
    given: dict[str, Any] = {"fields": {}, "free_bytes": 1_000_000, "peak_bytes": 100_000}
    with open_device({"gpu": gpu}, plan, **given) as cache:
        assert cache.division.memory == memory
        parts = [round(memory * part) // 2048 for part in (first, 1 - first)]
        assert [pool.blocks for pool in cache.pools] == parts


def test_a_plan_states_the_result_of_each_setting_once(tmp_path: Path) -> None:
    layers = [Layer("0", 4, 16, "float32")]
    options: dict[str, Any] = {"fields": {}, "free_bytes": 1_000_000}
    for gpu, told in (
        ({}, ["reuse: on", "partial matches: take"]),
        ({"partial": "off"}, ["reuse: on", "partial matches: off"]),
        ({"reuse": False}, ["reuse: off: nothing is kept", "partial matches: off"]),
    ):
        plan = CachePlan(layers, block_tokens=4, max_tokens=32).check()
        with open_device({"gpu": gpu}, plan, **options) as cache:
            text = cache.describe()
            assert all(one in text for one in told)
            assert text.count("partial matches") == 1
            assert "reuse of blocks" not in text
            assert "partial copies" not in text
    path = tmp_path / "stack.yaml"
    path.write_text("gpu: {shares: [1, 2, 3]}\n")
    with pytest.raises(ConfigError, match=r"stack\.yaml.* gpu\.shares: "):
        open_device(path, CachePlan(layers, block_tokens=4, max_tokens=32), **options)


def test_partial_matches_are_off_where_reuse_is_off() -> None:
    with model({"gpu": {}}, reuse=False) as engine:
        assert "partial matches: off" in engine.cache.describe()
    with pytest.raises(ConfigError, match=r"gpu\.partial: copy .*auto or off"):
        Model({"gpu": {"partial": "copy"}}, reuse=False)


@pytest.mark.parametrize(
    ("gpu", "path"),
    [
        ({"fraction": 1.0}, "gpu.fraction"),
        ({"fraction": 0}, "gpu.fraction"),
        ({"memory": 0}, "gpu.memory"),
        ({"partial": "some"}, "gpu.partial"),
        ({"max_tokens": 0}, "gpu.max_tokens"),
        ({"evnts": 1}, "gpu.evnts"),
        ({"shares": 2.5}, "gpu.shares"),
        ({"shares": [-1, 0]}, "gpu.shares[0]"),
        ({"shares": [1, 0]}, "gpu.shares[1]"),
        ({"shares": [1, float("inf")]}, "gpu.shares[1]"),
        ({"shares": [float("nan")]}, "gpu.shares[0]"),
        ({"memory": "1 MiB", "fraction": 0.5}, "gpu.fraction"),
        ({"memory": "1 MiB", "max_tokens": 64}, "gpu.max_tokens"),
        ({"reuse": "no"}, "gpu.reuse"),
        ({"reuse": False, "partial": "copy"}, "gpu.partial"),
    ],
)
def test_wrong_settings_are_refused(gpu: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as got:
        load_config({**stack(), "gpu": gpu}, env={})
    assert got.value.path == path


def test_without_reuse_nothing_is_served_kept_or_handed_down() -> None:
    with model({**stack(), "gpu": {"reuse": False}}) as engine:
        text = engine.cache.describe()
        assert "reuse: off" in text
        assert "partial matches: off" in text
        for _ in range(2):
            assert engine.run(range(15)) == 0
        assert engine.cache.pools[0].cached == 0
        engine.evict()
        assert engine.cache.stats()["host"]["blocks"] == 0


def test_pools_stand_alone_without_tiers() -> None:
    with model({"gpu": {}}, blocks=4) as engine:
        text = engine.cache.describe()
        assert text.startswith("no tiers: blocks that leave the device are lost")
        assert "arena" not in text
        assert engine.run(range(8)) == 0
        assert engine.run(range(9)) == 8
        running = engine.begin([*range(8), 99])
        engine.compute(running)
        suspended = engine.cache.suspend(running)
        assert suspended.how == "recompute", "there is nowhere to copy it to"
        resumed = engine.cache.resume(suspended)
        assert resumed.cached == 8
        engine.compute(resumed)
        engine.requests.release(resumed)
        assert engine.cache.hand_down(timeout_s=0.0), "nothing outlives the engine"
        engine.cache.purge("a salt")
        engine.evict()
        assert engine.run(range(9)) == 0
        assert engine.cache.stats()["arena"] == {"slots": 0, "free": 0}
        engine.cache.reset()


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"gpu": {}, "tiers": [{"type": "host"}]}, "arena.size"),
        ({"gpu": {}, "arena": {"size": "1 MiB"}}, "tiers"),
        ({"gpu": {}, "fetch": {"when": "always"}}, "fetch"),
        ({"gpu": {}, "export": {"listen": "0.0.0.0:7700", "keys": "k"}}, "export"),
        ({"events": {}}, "tiers"),
    ],
)
def test_an_incomplete_stack_is_refused(source: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as got:
        load_config(source, env={})
    assert got.value.path == path


def test_an_engine_with_a_pool_of_its_own_needs_tiers() -> None:
    with pytest.raises(ConfigError, match=r"gpu: has no effect here .*a block pool of its own"):
        kvladder.open_cache({"gpu": {}}, layout=kvladder.Layout(16, 4096))


def test_pools_on_the_device_record_nothing(tmp_path: Path) -> None:
    source: dict[str, Any] = {"gpu": {}, "record": {"path": str(tmp_path / "trace.jsonl")}}
    with pytest.raises(ConfigError, match=r"record: has no effect here .*without arena: and tiers"):
        load_config(source, env={})
    source |= {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}]}
    with pytest.raises(ConfigError, match=r"record: has no effect here .*pools on the device look"):
        open_manager(load_config(source, env={}), kvladder.Layout(16, 4096), pools=True)


@pytest.mark.parametrize("tokens", [1, 12])
def test_block_sizes_that_no_pool_can_use_are_refused(tokens: int) -> None:
    source = {**stack(), "block": {"tokens": tokens}}
    assert load_config(source, env={}).block.tokens == tokens
    with pytest.raises(ConfigError, match=r"block\.tokens: .*a power of two above 1"):
        load_config({**source, "gpu": {}}, env={})


def test_a_memory_size_and_a_fraction_exclude_each_other_from_any_source() -> None:
    source = {**stack(), "gpu": {"memory": "1 MiB", "max_tokens": None}}
    assert load_config(source, env={}).gpu.memory_bytes == 1 << 20
    says = r"gpu\.fraction: 0\.5 \(.* leave out gpu\.memory, 1 MiB, .*KVLADDER__GPU__FRACTION"
    with pytest.raises(ConfigError, match=says):
        load_config(source, env={"KVLADDER__GPU__FRACTION": "0.5"})


@pytest.mark.slow
def test_no_block_is_lost_if_the_arena_is_full_when_a_device_is_handed_down(
    tmp_path: Path,
) -> None:
    source = stack(files(tmp_path, when="evict"), slots=4)
    with model({**source, "arena": {"size": 4 * 4096, "reserve": 0}}) as engine:
        engine.run(range(100, 116))
        engine.evict()  # not yet written to files
        assert engine.cache.stats()["files"]["blocks"] == 0
        engine.run(range(16))
        engine.run(range(200, 216))
        assert engine.cache.hand_down(timeout_s=PATIENCE_S)
        assert engine.cache.pools[0].cached == 0
    with model(source) as engine:
        for start in (0, 100, 200):
            assert engine.run([*range(start, start + 16), 99]) == 16


def test_nothing_is_handed_down_to_a_tier_that_fails(tmp_path: Path) -> None:
    with model(stack(files(tmp_path))) as engine:
        engine.run(range(16))
        calls = engine.cache.manager._stack.levels[0].client
        for _ in range(3):
            calls.breakers["put"].failure(engine.cache.manager.ladder.clock.now())
        assert not engine.cache.hand_down(timeout_s=PATIENCE_S)
        assert engine.cache.pools[0].cached == 4
        calls.breakers["put"].success()
        assert engine.cache.hand_down(timeout_s=PATIENCE_S)
        assert engine.cache.pools[0].cached == 0


def test_nothing_is_handed_down_where_no_level_outlives_the_engine() -> None:
    with model(stack()) as engine:
        engine.run(range(16))
        assert engine.cache.hand_down(timeout_s=PATIENCE_S)
        assert engine.cache.pools[0].cached == 4


@pytest.mark.parametrize("timeout_s", [0.0, 30.0])
def test_blocks_that_cannot_be_handed_down_stay_on_the_device(
    timeout_s: float, tmp_path: Path
) -> None:
    with model(stack(files(tmp_path), slots=4)) as engine:
        engine.run(range(16))
        slots = engine.cache.port.lease(4 if timeout_s else 0)  # as suspended requests do
        assert slots is not None
        assert not engine.cache.hand_down(timeout_s=timeout_s)
        assert engine.cache.pools[0].cached == 4
        engine.cache.port.unlease(slots)
        assert engine.cache.hand_down(timeout_s=PATIENCE_S)
        assert engine.cache.pools[0].cached == 0
        assert engine.run([*range(16), 99]) == 16


def test_an_engine_with_its_own_pool_has_no_gpu_section() -> None:
    layout = kvladder.Layout(4, 4096)
    with pytest.raises(ConfigError, match="has no effect here"):
        kvladder.open_cache({**stack(), "gpu": {}}, layout=layout)


def test_memory_that_holds_no_sequence_is_refused_and_nothing_stays_open() -> None:
    with pytest.raises(PlanError, match="do not hold one sequence"):
        Model(stack(), blocks=3)
    with pytest.raises(PlanError, match="context: 0"):
        Model(stack(), context=0)


def test_two_groups_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="give each group its own name"):
        Model(stack(), Group("all", 4), Group("all", 4))


def test_blocks_of_a_wrong_size_are_refused() -> None:
    for tokens in (0, 1, 12):
        with pytest.raises(ConfigError, match=r"all: .*power of two"):
            Group("all", tokens)


def test_a_refused_pool_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stack(files(tmp_path))
    threads = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(opening, "make_pools", lambda *_, **__: PoolSettings(0, 4))
        with pytest.raises(ConfigError, match="blocks"):
            Model(source)
    for thread in set(threading.enumerate()) - threads:  # it may be just about to end
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with model(source) as engine:  # its directory is not locked
        assert engine.run(range(16)) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("windows", [0, 1])
def test_every_device_serves_suspends_and_resumes_alike(
    device: str, windows: int, tmp_path: Path
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    groups = [Group("all", 4), *[Group("near", 4, "window", 8)] * windows]
    with model(stack(files(tmp_path), slots=32), *groups, device=device) as engine:
        engine.run(range(16))
        engine.evict()
        request = engine.begin([*range(16), 99])
        assert request.cached == 16
        engine.compute(request)
        suspended = engine.cache.preemption.suspend(request, "tiers")
        engine.settle()
        again = engine.cache.resume(suspended)
        engine.settle()
        engine.compute(again)
        engine.requests.release(again)
    with model(stack(files(tmp_path), slots=32), *groups, device=device) as engine:
        assert engine.run([*range(16), 99]) == 16


# ---- sessions


def prefix(engine: Model, tokens: Any, session: str) -> None:
    request = engine.begin(tokens)
    engine.compute(request)
    engine.cache.use_session(session, request)
    engine.requests.release(request)


def test_ending_a_session_removes_the_blocks_that_only_it_used() -> None:
    with model(stack()) as engine:
        prefix(engine, range(12), "a")
        engine.evict()
        prefix(engine, [*range(4), *range(50, 58)], "b")
        assert engine.cache.stats()["host"]["blocks"] == 3
        engine.cache.end_session("a")
        assert engine.cache.stats()["host"]["blocks"] == 1, "what b has, too"
        assert engine.run([*range(4), *range(50, 58), 9]) == 12
        assert engine.run([*range(12), 9]) == 4
        for call in (engine.cache.end_session, engine.cache.prefetch):
            with pytest.raises(ValueError, match="'a' has ended"):
                call("a")
        request = engine.begin(range(4))
        with pytest.raises(ValueError, match="'a' has ended"):
            engine.cache.use_session("a", request)
        engine.compute(request)
        engine.requests.release(request)


def test_blocks_used_without_a_session_outlast_it() -> None:
    with model(stack()) as engine:
        engine.run(range(8))  # there before the session
        prefix(engine, range(12), "a")
        prefix(engine, range(50, 62), "a")
        engine.run(range(50, 54))  # and used later
        engine.evict()
        prefix(engine, range(50, 62), "a")  # blocks loaded for it remain its own
        running = engine.begin(range(13))
        engine.cache.end_session("a")
        engine.compute(running)
        engine.requests.release(running)
        engine.evict()
        assert engine.run([*range(12), 9]) == 12, "a running request used all of it"
        assert engine.run([*range(50, 62), 9]) == 4


def test_on_the_device_blocks_of_an_ended_session_are_evicted_first() -> None:
    with model({"gpu": {}}, blocks=6) as engine:
        prefix(engine, range(8), "a")
        prefix(engine, range(50, 58), "b")
        prefix(engine, range(8), "a")  # used last
        engine.cache.end_session("a")
        engine.run(range(90, 106))
        assert engine.run([*range(50, 58), 9]) == 8
        assert engine.run([*range(8), 9]) == 0


def test_a_session_is_prefetched_from_files(tmp_path: Path) -> None:
    with model({**stack(files(tmp_path)), "fetch": {"deadline": "10 m"}}) as engine:
        prefix(engine, range(12), "a")
        engine.evict()
        manager = engine.cache.manager
        [run], _ = manager.sessions.last("a")
        with manager._stack.lock:
            manager._stack.host.forget(run, "evicted")
        assert manager.lookup(run) == (0, 3)
        engine.cache.prefetch("a")
        arrive(engine)
        assert manager.lookup(run).host == 3
        assert engine.run([*range(12), 9]) == 12


def test_a_prefetch_loads_the_blocks_that_the_next_request_reads_and_lacks(
    tmp_path: Path,
) -> None:
    patient = {**stack(files(tmp_path)), "fetch": {"deadline": "10 m"}}
    with model(patient, Group("all", 4), Group("near", 4, "window", 5)) as engine:
        prefix(engine, range(24), "a")
        engine.evict()
        engine.run(range(8))  # the first blocks are hot, and on the device alone
        manager = engine.cache.manager
        (every, near), _ = manager.sessions.last("a")
        manager.remove([*every[:2], *near[:4]])
        with manager._stack.lock:
            manager._stack.host.forget([*every[2:], *near[4:]], "evicted")
        engine.cache.prefetch("a")
        arrive(engine)
        assert manager.lookup(every[2:]).host == 4
        assert manager.lookup(near[5:]).host == 1, "what a window of 5 tokens reads"
        assert manager.lookup(near[4:5]).host == 0


def arrive(engine: Model) -> None:
    """Wait until all prefetched blocks have arrived."""

    def came() -> bool:
        engine.cache.poll()
        return not engine.cache.port.rising

    until(came)
