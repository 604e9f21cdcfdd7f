"""A purge of a Redis Cluster, in simulation, while its slots move."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvladder.policy.offload import OffloadRule
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.sim.fleet.loop import FleetLoop, Process
from tests.sim.fleet.net import Net
from tests.sim.fleet.redis import RedisCluster, Session


async def _purged(cluster: RedisCluster) -> None:
    """Save blocks of a salt, purge it from another engine, and wait until that is done."""

    def level() -> LevelSpec:
        tier = RedisTier(RedisOptions(url=f"redis://{cluster.addresses}", cluster=True))
        return LevelSpec(tier, OffloadRule(min_priority=0, when="commit"))

    cache = await SimCache.open(level(), slots=32)
    for number in range(20):
        cache.save(cache.keys(number), salt="one")
        await cache.settle()
    await cache.aclose()
    assert len([*cluster.blocks()]) == 20
    cache = await SimCache.open(level(), slots=32)
    for _ in cache.manager.purge("one"):
        await asyncio.sleep(0)
    for _ in range(600):
        if not cache.manager.removals:
            break
        await asyncio.sleep(0.1)
    assert not cache.manager.removals, "the purge never ends"
    await cache.aclose()


def test_a_purge_finds_blocks_that_move_to_a_node_that_it_has_scanned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = FleetLoop(1)
    net = loop.net = Net(loop, Random(1))
    cluster = RedisCluster(loop, net, lambda _key, _value: None)
    scan, moved = Session.do_scan, list[int]()

    def scanned(session: Session, cursor: bytes, *rest: bytes) -> object:
        reply = scan(session, cursor, *rest)
        first, *_, last = cluster.nodes[:3]
        if session.node is first and reply[0] == b"0" and not moved:
            moved.append(len(last.data))
            cluster.move(last, first, {*last.slots})
        return reply

    monkeypatch.setattr(Session, "do_scan", scanned)
    engine = Process("engine", loop)
    loop.run_until_complete(engine.run(loop.create_task, _purged(cluster)))
    assert moved
    assert moved[0] > 0
    assert [*cluster.blocks()] == []
    cluster.close()
    loop.run_until_complete(asyncio.sleep(1.0))
    loop.close()
