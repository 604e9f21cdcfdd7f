"""The cluster of Redis servers that tests start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.redisserver import RedisServer, start_cluster

pytestmark = pytest.mark.real


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
    servers = start_cluster(tmp_path)
    try:
        assert len(lost) == 3
        assert all(len(server.run("CLUSTER", "SLOTS")) == 3 for server in servers)
    finally:
        for server in servers:
            server.kill()
