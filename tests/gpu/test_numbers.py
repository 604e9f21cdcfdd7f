"""Integers of any kind, and nothing else, are accepted wherever a number is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvladder.gpu.pool.pool import PoolSettings
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.gpu.sizing.divide import blocks_of, divide, kv_bytes_per_token, pool_bytes
from kvladder.gpu.sizing.groups import Group, Layer
from kvladder.gpu.sizing.handlers import ConvState, PerSequence, Side, State, Unpaged
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention, RetentionRange
from kvladder.testing.stacks import SimCache
from tests.gpu.device import FULL, Model
from tests.gpu.engine import Engine
from tests.stack.caches import cache_of

KINDS: dict[str, Callable[[int], Any]] = {
    "int8": np.int8,
    "uint8": np.uint8,
    "int64": np.int64,
    "tensor": torch.tensor,
}
ODD: tuple[Any, ...] = (0.5, 3.0, True, "3", None, np.float32(3), [3])


def sequences(n: Callable[[int], Any]) -> object:
    """A long prompt, so that small kinds overflow where they are computed with."""
    e = Engine(100)
    slots = e.pool.allocate(n(3))
    e.pool.release(slots)
    s = e.sequences.begin(range(300), cached_max=n(9), room=n(100), prompt_tokens=n(100))
    e.sequences.extend(s, n(120))
    for position in range(100):
        block, within = divmod(position, 4)
        e.device.kv[s.table[block]][within] = e.kv(s, position)
    e.sequences.commit(s, n(100))
    e.sequences.rewind(s, n(120))
    [fork] = e.sequences.fork(s, n(1))
    e.release(fork)
    e.release(s)
    e.run(range(12), extra=[(n(5), b"image")])
    kinds = {type(number) for number in (s.computed, s.prompt_tokens, e.pool.stats.allocated)}
    return e.pool.evict(n(2)), len(s.tokens), s.computed, kinds


def requests(n: Callable[[int], Any]) -> object:
    stack = {"arena": {"size": 1 << 20}, "tiers": [{"type": "host"}]}
    m = Model(stack, FULL, Group("near", 4, "window", 8), blocks=100, context=n(120), step=n(120))
    r = m.begin(range(120), cached_max=n(0), room=n(60), prompt_tokens=n(100))
    m.requests.extend(r, n(100))
    m.compute(r, n(100))
    m.requests.rewind(r, n(10))
    [fork] = m.requests.fork(r, n(1))
    again = m.cache.resume(m.cache.preemption.suspend(fork, "recompute"), room=n(100))
    for one in (r, again):
        m.requests.release(one)
    m.settle()
    m.close()
    return r.computed, type(r.computed)


def plans(n: Callable[[int], Any]) -> object:
    resources: list[ResourceHandler] = [
        Layer("kv", n(8), n(64), "float16"),
        Layer("near", n(8), n(64), "float16", n(100), n(2)),
        Side("scales", "kv", n(4)),
        State("s", n(8), n(64), n(16), "float32"),
        ConvState("c", n(32), n(4), "float32"),
        PerSequence("p", (n(100), n(100)), "float32"),
        Unpaged("u", n(100), "float32"),
    ]
    plan = CachePlan(
        resources, block_tokens=n(16), max_tokens=n(100), step=n(32), checkpoint_tokens=n(16)
    )
    plan.check().group().size(1 << 30, fraction=0.5, sequences=n(2), peak=n(100))
    sizes = kv_bytes_per_token(n(80), n(8), n(100), n(2)), blocks_of(n(100), n(16))
    memory = pool_bytes(free=1 << 20, fraction=0.5, other=n(100), max_tokens=n(100))
    shares = divide([(Group("g", n(16)), n(100))], 1 << 20, context=n(100), step=n(50))
    return str(plan), sizes, memory, str(shares), PoolSettings(n(8), n(4))


def retentions(n: Callable[[int], Any]) -> object:
    ranges = RetentionRange(n(0), n(4), n(80), n(5)), RetentionRange(n(4), None, n(10))
    retention = Retention(ranges, n(90), n(7), n(20))
    return repr(retention)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", [sequences, requests, plans, retentions])
def test_every_entry_point_takes_integers_of_every_kind(
    door: Callable[[Callable[[int], Any]], object], kind: str
) -> None:
    make: Callable[[int], Any] = KINDS[kind]
    assert door(make) == door(int)


async def test_saves_take_integers_of_every_kind() -> None:
    async with cache_of() as cache:
        keys = SimCache.keys(1, 2)
        given: dict[str, Any] = {"priorities": np.array([80, 60]), "parent_floor": np.uint8(70)}
        save = cache.manager.save(keys, **given)
        assert (save.floor, type(save.floor)) == (60, int)
        save.abort()


@pytest.mark.parametrize("given", ["priorities", "durations_s"])
async def test_a_save_names_the_list_whose_length_differs_from_the_keys(given: str) -> None:
    async with cache_of() as cache:
        for short in ([], [1, 2, 3]):
            wrong: dict[str, Any] = {given: short}
            with pytest.raises(ValueError, match=f"{given}: .* 2 keys, found {len(short)}"):
                cache.manager.save(SimCache.keys(1, 2), **wrong)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_values_that_are_not_integers_are_refused(odd: Any) -> None:
    e = Engine(8)
    s = e.begin(range(6))
    calls: list[Callable[[], object]] = [
        lambda: whole(odd),
        lambda: e.pool.allocate(odd),
        lambda: e.pool.evict(odd),
        lambda: e.sequences.commit(s, odd),
        lambda: e.sequences.rewind(s, odd),
        lambda: e.sequences.fork(s, odd),
        lambda: RetentionRange(odd, 9, 50),
        lambda: RetentionRange(0, 9, odd),
        lambda: Retention((), odd),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r".+"):
            call()
    assert e.pool.used == 2
    e.check()


@pytest.mark.parametrize("raw", [b"\1\2\3\4\5\6\7\x08", bytearray(b"\1\2\3\4")])
def test_bytes_are_no_token_ids(raw: Any) -> None:
    e = Engine(8)
    with pytest.raises(ValueError, match="token ids as byte"):
        e.sequences.begin(raw)
    s = e.begin(range(3))
    with pytest.raises(ValueError, match="a sequence of integers"):
        e.sequences.append(s, raw)
    assert len(s.tokens) == 3


def test_a_bool_among_token_ids_is_a_number() -> None:
    s = Engine(8).sequences.begin([True, 2, False])
    assert [*s.tokens] == [1, 2, 0]
