"""The servers that tests start: together, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.redisserver import RedisServer, ServerProcess, redis_cluster
from tests.kit.failover import SentinelLane, ask, is_linked, is_master
from tests.kit.lanes import Figures
from tests.kit.test_stuck import lives

pytestmark = pytest.mark.real


@pytest.mark.slow
def test_nodes_that_forgot_each_other_meet_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lost = RedisServer.run, list[RedisServer]()

    def forgetful(server: RedisServer, *command: Any, **settings: Any) -> Any:
        if command[:2] == ("CLUSTER", "MEET") and len(lost) < 3:
            lost.append(server)
            return None
        return run(server, *command, **settings)

    monkeypatch.setattr(RedisServer, "run", forgetful)
    with redis_cluster(tmp_path) as servers:
        assert len(lost) == 3
        assert all(len(server.run("CLUSTER", "SLOTS")) == 3 for server in servers)


@pytest.mark.slow
def test_servers_that_became_replicas_of_each_other_get_a_primary(tmp_path: Path) -> None:
    lane = SentinelLane(tmp_path / "lane", Figures(), asyncio.Lock())
    with lane.undo:
        primary, replica = lane.primary, lane.replica
        ask(primary, "REPLICAOF", "127.0.0.1", lane.reached_at(replica))
        lane.repair()
        assert is_master(lane.primary)
        assert is_linked(lane.replica)


def test_a_cluster_that_does_not_form_leaves_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = RedisServer.run, set[int]()

    def unwilling(server: RedisServer, *command: Any, **settings: Any) -> Any:
        started.add(server.pid)
        assert command[:2] != ("CLUSTER", "MEET"), "it meets nobody"
        return run(server, *command, **settings)

    monkeypatch.setattr(RedisServer, "run", unwilling)
    with pytest.raises(AssertionError, match="it meets nobody"), redis_cluster(tmp_path):
        pass
    assert len(started) == 3
    assert not any(map(lives, started))


def test_a_server_that_does_not_become_ready_is_stopped(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log")

    def never() -> bool:
        raise RuntimeError("it never will")

    with pytest.raises(RuntimeError, match="it never will"):
        server.launch(["sleep", "3600"], never)
    assert not lives(server.pid)
