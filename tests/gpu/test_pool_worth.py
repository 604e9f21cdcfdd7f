"""Priorities travel both ways between the device and the tiers, and are never stale."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention, RetentionRange
from kvladder.tiers.ladder.records.meta import BlockMeta
from tests.gpu.device import FULL, Model
from tests.gpu.engine import Engine, priority_of
from tests.patience import PATIENCE_S

ANY = OffloadRule(min_priority=0)


def at(priority: int, duration_s: float | None = None) -> Retention:
    return Retention((RetentionRange(0, None, priority, duration_s),))


def prios(engine: Engine, tokens: Sequence[int]) -> list[int | None]:
    return [priority_of(engine.pool, key) for key in engine.keys(tokens)]


def model(*, blocks: int = 4, slots: int = 8, host: Any = (), tiers: Sequence[Any] = ()) -> Model:
    stack = {"arena": {"size": slots * 4096}, "tiers": [{"type": "host", **dict(host)}, *tiers]}
    return Model(stack, FULL, blocks=blocks)


def key(model: Model, tokens: Sequence[int]) -> BlockKey:
    return model.requests.sequences[0].scheme.chain(tokens)[-1]


def meta(model: Model, tokens: Sequence[int]) -> BlockMeta | None:
    with model.cache.manager.ladder.lock:
        return model.cache.manager.ladder.meta(key(model, tokens))


# ---- down


@pytest.mark.parametrize("inclusive", [False, True])
def test_a_block_retained_again_on_the_device_has_its_new_priority_below(inclusive: bool) -> None:
    e = Engine(8, host=4, inclusive=inclusive, rule=ANY)
    e.run(range(4))
    e.pool.evict(1)
    e.run(range(5), retention=at(90))
    e.pool.evict(8)
    assert e.host.blocks[e.keys(range(4))[0]].priority == 90


def test_host_learns_the_priority_time_and_uses_of_a_block() -> None:
    m = model()
    m.run(range(4))
    m.evict()
    for _ in range(3):
        m.run(range(5), retention=at(90, 1000.0))
    m.evict()
    held = meta(m, range(4))
    assert held is not None
    assert (held.priority, held.floor, held.hits) == (90, 90, 3)
    assert held.until_s < inf
    m.close()


def test_a_block_lowered_below_the_threshold_leaves_the_level() -> None:
    m = model(host={"min_priority": 35})
    m.run(range(4))
    m.evict()
    m.run(range(5), retention=at(5))
    m.evict()
    assert meta(m, range(4)) is None
    assert m.run([*range(4), 9]) == 0
    m.settle()
    m.close()


def test_a_block_below_hosts_threshold_goes_to_a_level_that_takes_it() -> None:
    cold = {"type": "memory", "name": "cold", "capacity": "1 MiB", "min_priority": 0}
    m = model(host={"min_priority": 35}, tiers=[cold])
    m.run(range(4))
    m.evict()
    m.run(range(5), retention=at(5))
    m.evict()
    with m.cache.manager.ladder.lock:
        assert m.cache.manager.ladder.where(key(m, range(4))) == "cold"
    assert m.run([*range(4), 9]) == 4
    m.settle()
    m.close()


def test_a_block_used_on_the_device_is_evicted_last_below() -> None:
    m = model(slots=6)
    m.run(range(4))
    m.evict()
    user = m.begin([*range(4), 9])
    m.compute(user)
    for turn in range(1, 6):
        m.run(range(1000 * turn, 1000 * turn + 4))
        m.cache.pools[0].evict(1)
        m.settle()
    m.requests.release(user, store=False)
    m.evict()
    m.run(range(9000, 9004))
    m.evict()
    assert meta(m, range(4)) is not None
    assert meta(m, range(1000, 1004)) is None
    m.close()


def test_a_save_that_lowers_a_priority_below_the_threshold_gives_the_block_up() -> None:
    m = model(host={"min_priority": 35})
    m.run(range(4))
    m.evict()
    save = m.cache.manager.save([key(m, range(4))], priorities=[5])
    assert save.slots == []
    assert meta(m, range(4)) is None
    m.settle()
    m.close()


# ---- up


def test_a_restart_keeps_the_priority_of_blocks_in_files(tmp_path: Path) -> None:
    nvme = {"type": "files", "name": "nvme", "path": str(tmp_path), "capacity": "1 MiB"}

    def opened() -> Model:
        return model(blocks=8, tiers=[{**nvme, "when": "commit"}])

    m = opened()
    m.run(range(4), retention=at(90))
    m.evict()
    assert m.cache.manager.flush(timeout_s=PATIENCE_S)
    m.close()
    m = opened()
    assert m.run([*range(4), 1]) == 4
    assert priority_of(m.cache.pools[0], key(m, range(4))) == 90
    [stored] = [e for e in m.cache.snapshot() if e.blocks[0].key == key(m, range(4))]
    assert stored.blocks[0].priority == 90
    m.settle()
    m.evict()
    held = meta(m, range(4))
    assert held is not None
    assert held.hits == 1, "what brought it up is one use, not two"
    m.close()


def test_a_retention_that_the_tiers_remember_ends_in_time() -> None:
    e = Engine(8, host=4, rule=ANY, inclusive=True)
    e.run(range(4), retention=at(90, 2.0))
    e.pool.evict(8)
    other = Engine(8, host=4, rule=ANY, inclusive=True)
    other.host.blocks, other.host.free = e.host.blocks, e.host.free
    assert other.run(range(5)) == 4
    assert prios(other, range(4)) == [90]
    other.clock.now_s = 3.0
    assert prios(other, range(4)) == [35]


# ---- floors


def test_a_raised_ancestor_lets_its_followers_through() -> None:
    e = Engine(8, host=8)
    e.run(range(12), retention=Retention((RetentionRange(0, 4, 5),)))
    e.run(range(5), retention=Retention((RetentionRange(0, 4, 90),)))
    e.pool.evict(8)
    assert all(key in e.host.blocks for key in e.keys(range(12)))


def test_an_ancestor_with_an_ended_retention_holds_back_its_followers() -> None:
    e = Engine(8, host=8, rule=OffloadRule(min_priority=50))
    e.run(range(8), retention=Retention((RetentionRange(0, 4, 80, 1.0), RetentionRange(4, 8, 80))))
    e.clock.now_s = 2.0
    e.pool.evict(8)
    assert not e.host.blocks
    assert [victim.floor for victim in e.host.offered] == [35, 35]


def test_floors_follow_every_change_of_a_priority() -> None:
    e = Engine(16, host=16, rule=ANY)
    e.run(range(20))
    for turn, (priority, block) in enumerate([(60, 0), (10, 2), (80, 2), (5, 4), (35, 0)]):
        kept = Retention((RetentionRange(4 * block, 4 * block + 1, priority),))
        e.run([*range(20), turn], retention=kept)
        rows, found = e.pool._ledger.nodes, e.pool._ledger.index.match(e.keys(range(20)))
        assert [rows.floor(node) for node in reversed(found)][::-1] == [
            min(rows.priority[node] for node in found[: at + 1]) for at in range(len(found))
        ]


# ---- the source of a priority


def test_a_fork_that_rewinds_changes_nothing_for_other_sequences() -> None:
    def worth(*, rewinds: bool) -> list[int | None]:
        e = Engine(16)
        kept = Retention((RetentionRange(0, 4, 60),))
        one = e.sequences.begin(range(12), retention=kept)
        [other] = e.sequences.fork(one, 1)
        if rewinds:
            e.sequences.rewind(other, 8)
        e.run(range(12), retention=at(80))
        e.compute(one)
        return prios(e, range(12))

    assert worth(rewinds=True) == worth(rewinds=False) == [60, 80, 80]


def test_an_answer_keeps_its_priority_when_a_request_states_none() -> None:
    e = Engine(16)
    e.run(range(4), range(4, 13), retention=Retention(decode_priority=80))
    assert prios(e, range(12)) == [35, 80, 80]
    e.pool.retain(pins := e.pool.acquire(e.keys(range(12))))
    again = e.sequences.begin(range(4), retention=Retention((RetentionRange(0, 4, 60),)))
    e.compute(again)
    e.generate(again, range(4, 13))
    e.release(again)
    assert prios(e, range(12)) == [60, 80, 80]
    e.pool.release(pins)
    e.pool.release(pins)
