"""Bad input raises its named error and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import pytest

from kvladder.errors import ConfigError, NotHeld, OutOfBlocks, PlanError
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.pool import PoolSettings
from kvladder.gpu.pool.retain import Retain
from kvladder.gpu.requests.sequence import KVSequence
from kvladder.gpu.sizing.divide import kv_bytes_per_token, pool_bytes
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine

HALF: Any = 0.5
NUMBER: Any = 0
NOTHING: Any = None
Call = Callable[[Engine, KVSequence], object]


def ranges(*held: tuple[int, int | None, int]) -> Retention:
    return Retention(tuple(RetentionRange(*one) for one in held))


def released_fork(engine: Engine, sequence: KVSequence) -> None:
    other = engine.sequences.fork(sequence, 1)[0]
    engine.sequences.release(other)
    engine.sequences.fork(other, 1)


def shared_and_wrong(engine: Engine, sequence: KVSequence) -> None:
    slots = sequence.table
    engine.pool.retain(slots[:1])
    try:
        engine.pool.release([slots[1], slots[0], 1.5])  # type: ignore[list-item]
    finally:
        engine.pool.release(slots[:1])


def committed(engine: Engine, sequence: KVSequence, retain: Retain) -> None:
    content = Content(sequence.keys[:1], sequence.root, sequence.root.key, b"\0" * 16)
    engine.pool.commit(sequence.table[:1], content, retain=[retain])


CALLS: dict[str, tuple[type[Exception], Call]] = {
    "block size 12": (ConfigError, lambda e, s: PoolSettings(8, 12)),
    "block size 1": (ConfigError, lambda e, s: PoolSettings(8, 1)),
    "no blocks": (ConfigError, lambda e, s: PoolSettings(0, 4)),
    "fraction 1": (PlanError, lambda e, s: pool_bytes(free=100, fraction=1.0)),
    "fraction 0": (PlanError, lambda e, s: pool_bytes(free=100, fraction=0.0)),
    "overlap": (ValueError, lambda e, s: e.begin([1], retention=ranges((0, 9, 1), (8, 16, 1)))),
    "reversed": (ValueError, lambda e, s: e.begin([1], retention=ranges((9, 8, 1)))),
    "priority 101": (ValueError, lambda e, s: e.begin([1], retention=ranges((0, 8, 101)))),
    "priority -1": (ValueError, lambda e, s: e.begin([1], retention=ranges((0, 8, -1)))),
    "decode 101": (ValueError, lambda e, s: e.begin([1], retention=Retention((), 101))),
    "duration": (ValueError, lambda e, s: RetentionRange(0, 8, 50, -0.1)),
    "decode duration": (ValueError, lambda e, s: Retention((), 50, -0.1)),
    "priority 0.5": (ValueError, lambda e, s: RetentionRange(0, 8, HALF)),
    "priority as text": (ValueError, lambda e, s: Retention((), "9")),  # type: ignore[arg-type]
    "duration nan": (ValueError, lambda e, s: RetentionRange(0, 8, 50, nan)),
    "decode duration nan": (ValueError, lambda e, s: Retention((), 50, nan)),
    "commit at 101": (ValueError, lambda e, s: committed(e, s, Retain(101))),
    "commit at -1": (ValueError, lambda e, s: committed(e, s, Retain(-1))),
    "commit at 300": (ValueError, lambda e, s: committed(e, s, Retain(300))),
    "commit for nan seconds": (ValueError, lambda e, s: committed(e, s, Retain(50, nan))),
    "no heads": (PlanError, lambda e, s: kv_bytes_per_token(1, 0, 64, 2)),
    "no head size": (PlanError, lambda e, s: Layer("a", 1, 0, "fp8")),
    "too many blocks": (OutOfBlocks, lambda e, s: e.pool.allocate(100)),
    "too long a prompt": (OutOfBlocks, lambda e, s: e.begin(range(1000))),
    "not held": (NotHeld, lambda e, s: e.pool.release([DeviceSlot(7)])),
    "twice at once": (NotHeld, lambda e, s: e.pool.release([s.table[0], s.table[0]])),
    "no slot": (NotHeld, lambda e, s: e.pool.release([DeviceSlot(99)])),
    "a prompt of -1": (ValueError, lambda e, s: e.sequences.begin([1, 2], prompt_tokens=-1)),
    "a prompt of 3": (ValueError, lambda e, s: e.sequences.begin([1, 2], prompt_tokens=3)),
    "adapter 0": (AttributeError, lambda e, s: e.begin([1], lora=NUMBER)),
    "no salt": (AttributeError, lambda e, s: e.begin([1], salt=NOTHING)),
    "no integer": (TypeError, lambda e, s: e.pool.release([s.table[0], HALF])),
    "no integer among shared": (TypeError, shared_and_wrong),
    "fork of what was released": (NotHeld, released_fork),
    "layers that contradict": (
        PlanError,
        lambda e, s: CachePlan(
            [Layer("a", 1, 64, "fp8"), Layer("a", 2, 64, "fp8")], block_tokens=16, max_tokens=64
        ).check(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_is_refused_before_anything_has_changed(name: str) -> None:
    error, call = CALLS[name]
    engine = Engine(8, events_max=100)
    engine.run(range(100, 106))
    sequence = engine.begin(range(10))
    engine.events.take()
    pool = engine.pool

    def state() -> object:
        order = pool._ledger.order.ordered()
        return pool.free, pool.cached, order, list(sequence.table), pool.stats.as_dict()

    before = state()
    with pytest.raises(error):
        call(engine, sequence)
    assert state() == before
    assert engine.events.take() == []
    engine.check()
