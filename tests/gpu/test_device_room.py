"""Device memory that an idle engine gives back and takes again; the bytes are checked."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from kvladder.errors import BlocksBusy, LayoutError, OutOfBlocks, PoolError
from kvladder.gpu.sizing.groups import Group
from tests.gpu.device import FULL, WIDTH, Model
from tests.gpu.test_pool_groups import NEAR
from tests.patience import PATIENCE_S

STATE = Group("state", 4, "state")
HOST = {"arena": {"size": 64 * 4096, "reserve": 0}, "tiers": [{"type": "host"}]}


def serve(engine: Model, tokens: Sequence[int]) -> int:
    """Call ``Model.run`` once there is room."""
    while True:
        try:
            return engine.run(tokens)
        except BlocksBusy:
            engine.settle()


def bytes_of(engine: Model) -> int:
    return sum(one["kv"].untyped_storage().nbytes() for one in engine.cache.tensors)


def test_blocks_of_highest_priority_stay_and_others_come_back_from_host() -> None:
    engine = Model(HOST, FULL, blocks=8)
    serve(engine, range(16))
    serve(engine, range(50, 58))
    whole = bytes_of(engine)
    assert engine.cache.shrink(0.5, timeout_s=PATIENCE_S) == whole // 2
    engine.settle()
    assert bytes_of(engine) == whole // 2
    [pool] = engine.cache.pools
    assert (pool.blocks, pool.cached) == (4, 4)
    assert "all: 4 blocks now" in engine.cache.describe()
    assert engine.cache.stats()["gpu.all"]["capacity"] == 4
    assert serve(engine, [*range(50, 58), 9]) == 8
    assert pool.stats.onboarded == 0, "it was used last"
    with pytest.raises(OutOfBlocks):
        engine.requests.begin(range(100, 120))
    assert engine.cache.grow() == whole // 2
    assert "blocks now" not in engine.cache.describe()
    assert serve(engine, [*range(16), 9]) == 16
    engine.settle()
    assert bytes_of(engine) == whole
    engine.close()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, NEAR), (FULL, STATE), (NEAR,)])
@pytest.mark.parametrize("source", [HOST, {"gpu": {}}])
def test_every_byte_is_right_whenever_memory_is_given_back(
    groups: tuple[Group, ...], source: dict[str, Any]
) -> None:
    draw = Random(len(groups))
    engine = Model(source, *groups, blocks=14)
    for _ in range(60):
        start = 100 * draw.randrange(5)
        tokens = range(start, start + draw.randrange(1, 15))
        try:
            serve(engine, tokens)
        except OutOfBlocks:
            engine.cache.grow()
        turn = draw.random()
        if turn < 0.2:
            engine.cache.shrink(draw.random(), timeout_s=PATIENCE_S)
        elif turn < 0.3:
            engine.cache.grow()
        engine.settle()
        blocks = sum(pool.blocks for pool in engine.cache.pools)
        assert bytes_of(engine) == blocks * 4 * WIDTH
    engine.close()


def test_nothing_is_given_back_while_a_request_holds_it() -> None:
    engine = Model(HOST, FULL)
    request = engine.begin(range(8))
    for call in (lambda: engine.cache.shrink(timeout_s=0.0), engine.cache.grow):
        with pytest.raises(PoolError, match="2 blocks of all are held .*: expected no running"):
            call()
    engine.compute(request)
    suspended = engine.cache.preemption.suspend(request, "tiers")
    assert engine.cache.shrink(timeout_s=PATIENCE_S) > 0
    engine.cache.grow()
    again = engine.cache.resume(suspended)
    engine.settle()
    engine.requests.append(again, [7])
    engine.compute(again)
    engine.requests.release(again)
    engine.close()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_no_other_share_can_be_kept(share: float) -> None:
    engine = Model(HOST, FULL)
    with pytest.raises(ValueError, match="expected a number from 0 to 1"):
        engine.cache.shrink(share, timeout_s=0.0)
    engine.close()


class Elsewhere(Model):
    """An engine whose memory is part of a larger tensor."""

    def allocate(self, group: int, blocks: int) -> dict[str, torch.Tensor]:
        size = self.groups[group].block_tokens
        return {"kv": torch.zeros(2, blocks, size, WIDTH, dtype=torch.uint8)[1]}


def test_memory_that_is_part_of_a_larger_tensor_is_not_given_back() -> None:
    engine = Elsewhere(HOST, FULL)
    serve(engine, range(8))
    with pytest.raises(
        LayoutError, match="kv: its memory cannot be given back .*contiguous blocks"
    ):
        engine.cache.shrink(timeout_s=0.0)
    assert serve(engine, range(9)) == 8
    engine.close()


def test_a_device_out_of_memory_keeps_its_previous_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Model(HOST, FULL, blocks=8)
    serve(engine, range(8))
    engine.cache.shrink(0.5, timeout_s=PATIENCE_S)

    def fails(group: int, blocks: int) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache._room, "_resize", fails)
        with pytest.raises(RuntimeError):
            engine.cache.grow()
    assert serve(engine, [*range(8), 9]) == 8
    engine.cache.grow()
    assert engine.cache.pools[0].blocks == 8
    engine.close()
