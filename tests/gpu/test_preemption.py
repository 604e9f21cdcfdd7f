"""Suspending a running request and going on with it, with real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvladder.arena import Slot
from kvladder.device.preempt import How, Suspended
from kvladder.errors import NotHeld, NotReady, OutOfBlocks
from kvladder.gpu.copy.copier import CopyJob, Direction
from kvladder.gpu.requests.requests import Request
from kvladder.gpu.sizing.groups import Group
from kvladder.keys import BlockKey
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.device import FULL, Model
from tests.gpu.engine import priority_of

NEAR = Group("near", 4, "window", 8)
STATE = Group("state", 4, "state")


def model(*groups: Group, slots: int = 64, blocks: int = 12, **options: Any) -> Model:
    arena = {"size": slots * 4096, "reserve": 0}
    return Model({"arena": arena, "tiers": [{"type": "host"}]}, *groups, blocks=blocks, **options)


def running(engine: Model) -> Request:
    """Return a request with three generated tokens; the last one is not computed."""
    request = engine.begin(range(13))
    for token in (50, 51, 52):
        engine.compute(request)
        engine.requests.append(request, [token])
    return request


def back(engine: Model, suspended: Suspended) -> Request:
    request = engine.cache.resume(suspended)
    assert not request.ready or suspended.how == "recompute" or not request.arriving
    engine.settle()
    assert request.ready
    return request


@pytest.mark.parametrize("groups", [(FULL,), (FULL, NEAR), (FULL, STATE), (NEAR,)])
@pytest.mark.parametrize("how", ["tiers", "recompute"])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_suspended_request_continues_where_it_was(
    groups: tuple[Group, ...], how: How, crowded: bool
) -> None:
    engine = model(*groups)
    request = running(engine)
    tokens, computed = list(request.tokens), request.computed
    suspended = engine.cache.preemption.suspend(request, how)
    engine.settle()
    assert suspended.copies_left == 0
    assert suspended.how == how
    assert all(pool.used == 0 for pool in engine.cache.pools)
    if crowded:  # other requests take the whole device in between, and nothing stays cached
        engine.evict()
        engine.cache.reset()
        others = [pool.allocate(pool.blocks) for pool in engine.cache.pools]
        with pytest.raises(OutOfBlocks):
            engine.cache.resume(suspended)
        for pool, slots in zip(engine.cache.pools, others, strict=True):
            pool.release(slots)
    again = back(engine, suspended)
    assert list(again.tokens) == tokens
    if how == "tiers":
        assert again.computed == computed
    elif crowded:
        assert again.computed == 0
    engine.compute(again)
    engine.requests.append(again, [53])
    engine.compute(again)
    engine.requests.release(again)
    with pytest.raises(NotReady, match="already resumed or discarded"):
        engine.cache.resume(suspended)
    engine.settle()
    assert all(pool.free == pool.blocks for pool in engine.cache.pools)
    engine.close()


def test_blocks_still_on_the_device_are_shared_and_not_copied() -> None:
    engine = model()
    suspended = engine.cache.suspend(running(engine))
    engine.settle()
    request = engine.cache.resume(suspended)
    [part] = request.parts
    assert part.stored == 3  # the tail alone is copied
    engine.settle()
    engine.compute(request)
    engine.requests.release(request)
    engine.close()


def test_a_request_without_room_for_all_of_its_blocks_is_recomputed() -> None:
    engine = model(slots=3)
    suspended = engine.cache.suspend(running(engine))
    assert (suspended.how, suspended.copies_left) == ("recompute", 0)
    assert engine.cache.manager.arena.free == 3
    engine.compute(back(engine, suspended))
    engine.close()


def test_a_recomputed_request_may_get_room_for_a_part_at_first() -> None:
    engine = model(FULL, NEAR)
    suspended = engine.cache.preemption.suspend(running(engine), "recompute")
    engine.cache.reset()
    others = [pool.allocate(pool.blocks - 2) for pool in engine.cache.pools]
    with pytest.raises(OutOfBlocks):
        engine.cache.resume(suspended)
    request = engine.cache.resume(suspended, room=8)
    assert [len(table) for table in request.tables] == [2, 2]
    engine.compute(request, 8)
    for pool, slots in zip(engine.cache.pools, others, strict=True):
        pool.release(slots)
    engine.requests.extend(request, len(request.tokens))
    engine.compute(request)
    engine.requests.release(request)
    engine.close()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, NEAR)])
@pytest.mark.parametrize("forgotten", [False, True])
def test_generated_blocks_keep_their_priority_in_a_recompute(
    groups: tuple[Group, ...], forgotten: bool
) -> None:
    engine = model(*groups)
    retention = Retention((RetentionRange(0, None, 80),), decode_priority=5)
    request = engine.begin(range(8), retention=retention)
    for token in range(50, 59):
        engine.compute(request)
        engine.requests.append(request, [token])
    engine.compute(request)
    keys, pools = list(request.parts[0].keys), engine.cache.pools
    assert [priority_of(pools[0], key) for key in keys] == [80, 80, 5, 5]
    suspended = engine.cache.preemption.suspend(request, "recompute")
    if forgotten:
        for pool in pools:
            pool.evict(pool.blocks)
        engine.settle()
        engine.cache.manager.clear()
        engine.settle()
    request = back(engine, suspended)
    assert (request.cached == 0) == forgotten
    engine.compute(request)
    assert [priority_of(pools[0], key) for key in keys] == [80, 80, 5, 5]
    assert request.parts[0].prompt_tokens == 8
    engine.requests.release(request)
    engine.close()


def test_a_copy_that_fails_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model()
    request = running(engine)
    submit = engine.cache.port.copier.submit
    with monkeypatch.context() as patched:
        bad = {"slots": (10_000,) * 4}
        patched.setattr(
            engine.cache.port.copier,
            "submit",
            lambda job: submit(type(job)(job.id, job.direction, job.blocks, **bad)),
        )
        suspended = engine.cache.suspend(request)
    engine.settle()
    assert suspended.how == "recompute"
    assert engine.cache.manager.arena.free == 64
    engine.compute(back(engine, suspended))
    engine.close()


def test_the_way_measured_as_cheaper_is_taken() -> None:
    engine = model()
    request = running(engine)
    preemption = engine.cache.preemption
    assert preemption.choice(request) == "tiers"
    engine.cache.port.byte_s.update({"offload": 1.0, "onboard": 2.0})
    size = 4 * 4 * 24
    preemption.prefilled(10, 1.0)
    assert preemption.costs_s(request) == {"tiers": size * 3.0, "recompute": pytest.approx(1.5)}
    assert preemption.choice(request) == "recompute"
    assert engine.cache.suspend(request).how == "recompute"
    for _ in range(100):
        preemption.prefilled(1, 1e9)
    assert preemption.choice(running(engine)) == "tiers"
    engine.close()


@pytest.mark.parametrize("way", ["offload", "onboard"])
def test_one_measured_direction_stands_for_both(way: Direction) -> None:
    engine = model()
    request = running(engine)
    size = 4 * 4 * 24
    engine.cache.port.byte_s[way] = 1.0
    engine.cache.preemption.prefilled(15, 1.5 * size)
    assert engine.cache.preemption.costs_s(request)["tiers"] == size * 2.0
    assert engine.cache.preemption.choice(request) == "recompute"
    engine.close()


def test_copies_are_measured() -> None:
    engine = model()
    suspended = engine.cache.suspend(running(engine))
    engine.settle()
    engine.cache.reset()
    back(engine, suspended)
    assert {way for way, seconds in engine.cache.port.byte_s.items() if seconds > 0} == {
        "offload",
        "onboard",
    }
    engine.close()


def test_a_request_is_not_used_while_it_is_suspended() -> None:
    engine = model()
    request = running(engine)
    suspended = engine.cache.suspend(request)
    for call in (
        lambda: engine.requests.append(request, [1]),
        lambda: engine.cache.suspend(request),
        lambda: engine.cache.resume(suspended),
        lambda: engine.cache.preemption.discard(suspended),
    ):
        with pytest.raises(NotReady):
            call()
    engine.settle()
    with pytest.raises(NotHeld):
        engine.cache.suspend(request)
    engine.cache.preemption.discard(suspended)
    with pytest.raises(NotReady, match="already resumed or discarded"):
        engine.cache.resume(suspended)
    assert engine.cache.manager.arena.free == 64
    engine.close()


def test_closing_drops_suspended_requests_and_copies_in_flight() -> None:
    for settled in (True, False):
        engine = model()
        suspended = engine.cache.suspend(running(engine))
        if settled:
            engine.settle()
            engine.cache.resume(suspended)
        engine.close()


class Lazy:
    """Keeps the copies of an engine from beginning."""

    def __init__(self, engine: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self._port = engine.cache.port
        self._submit = self._port.copier.submit
        self.jobs: list[CopyJob] = []
        monkeypatch.setattr(self._port.copier, "submit", self.jobs.append)

    def go(self, *, well: bool) -> None:
        """Have the oldest one end; if not ``well``, it fails."""
        job = self.jobs.pop(0)
        bad = tuple(Slot(10_000) for _ in job.slots)
        self._submit(job if well else replace(job, slots=bad))
        self._port.copier.wait([job.id])
        self._port.poll()


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("own_first", [True, False])
def test_a_resumed_request_waits_for_blocks_that_another_one_loads(
    well: bool, own_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model()
    suspended = engine.cache.preemption.suspend(running(engine), "tiers")
    engine.settle()
    engine.evict()
    lazy = Lazy(engine, monkeypatch)
    other = engine.requests.begin([*range(12), 99])
    again = engine.cache.resume(suspended)
    assert len(lazy.jobs) == 2  # the other's three blocks, and the tail
    order = [True, well] if own_first else [well, True]
    if own_first:
        lazy.jobs.reverse()
    for fine in order:
        assert not again.ready
        lazy.go(well=fine)
    assert (again.ready, again.lost, other.lost) == (well, not well, not well)
    if well:
        engine.compute(again)
    engine.requests.release(again)
    engine.requests.release(other)
    engine.settle()
    assert engine.cache.pools[0].free == 12
    engine.close()


FORGET: dict[str, Callable[[Model, Sequence[BlockKey]], object]] = {
    "purge": lambda engine, keys: engine.cache.purge("t"),
    "reset": lambda engine, keys: engine.cache.reset(),
    "remove": lambda engine, keys: engine.cache.pools[0].remove(keys),
}


@pytest.mark.parametrize("groups", [(FULL,), (FULL, NEAR)])
@pytest.mark.parametrize("how", ["tiers", "recompute"])
@pytest.mark.parametrize("suspended_first", [True, False])
@pytest.mark.parametrize("forget", FORGET)
def test_forgotten_blocks_do_not_come_back_with_a_resumed_request(
    groups: tuple[Group, ...], how: How, suspended_first: bool, forget: str
) -> None:
    engine = model(*groups, blocks=24, context=32)
    request = engine.begin(range(13), salt="t")
    engine.compute(request)
    keys = request.parts[0].keys
    if not suspended_first:
        FORGET[forget](engine, keys)
    suspended = engine.cache.preemption.suspend(request, how)
    engine.settle()
    if suspended_first:
        FORGET[forget](engine, keys)
    again = back(engine, suspended)
    for token in range(50, 60):
        engine.compute(again)
        engine.requests.append(again, [token])
    engine.requests.release(again)
    assert engine.run([*range(13), *range(50, 60)], salt="t") == 0
    engine.cache.check()
    engine.close()
