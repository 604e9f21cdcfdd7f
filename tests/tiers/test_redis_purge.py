"""``kvladder purge`` and the purge of a running cache, against a real server."""

from __future__ import annotations

import re

import pytest
import yaml

from kvladder.cli import main
from kvladder.keys import BlockKey
from kvladder.testing.redisserver import RedisServer
from tests.kit.traffic import keys, stored
from tests.patience import until
from tests.tiers.test_redis_faults import cache_over, load, payload

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["here", "isolated"])
def config(server, tmp_path, request):
    redis = {"type": "redis", "url": server.url, "capacity": "1 GiB", "isolate": request.param}
    path = tmp_path / "stack.yaml"
    path.write_text(
        yaml.safe_dump({"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, redis]})
    )
    return str(path)


def salted(cache, key: BlockKey, salt: str):
    saving = cache.save([key], salt=salt)
    for slot in saving.slots:
        cache.arena.view(slot)[: 64 << 10] = payload(key)
    saving.commit()
    until(cache.idle)


def test_the_command_purges_a_salt_and_then_all(server, config, capsys):
    with cache_over(server.url) as cache:
        stored(cache, keys(1, 2))
        salted(cache, keys(7)[0], "tenant")
        (namespace,) = re.findall("^namespace ([0-9a-f]{64})$", cache.describe(), re.MULTILINE)
    purge = ["purge", config, "--namespace", namespace]
    assert main([*purge, "--salt", "nobody"]) == 0
    assert capsys.readouterr().out == "redis: 0 values removed\n"
    assert main([*purge, "--salt", "tenant"]) == 0
    assert capsys.readouterr().out == "redis: 1 value removed\n"
    assert server.run("DBSIZE") == 2
    assert main(purge) == 0
    assert capsys.readouterr().out == "redis: 2 values removed\n"
    assert server.run("DBSIZE") == 0


def test_the_command_checks_a_server(server, config, capsys):
    assert main(["check", config]) == 0
    assert "  redis: servers 127.0.0.1:" in capsys.readouterr().out
    server.kill()
    assert main(["check", config]) == 0
    said = capsys.readouterr().out
    assert "warning: tiers[1]: 127.0.0.1:" in said
    assert "(check that the server runs): the cache would start without this level" in said


@pytest.mark.parametrize(
    ("more", "path"),
    [
        (["--salt", "tenant"], "--namespace: missing"),
        (["--namespace", "beef"], "--namespace"),
        (["--namespace", "0" * 64, "--salt", ""], "--salt"),
    ],
)
def test_the_command_refuses_wrong_targets(config, capsys, more, path):
    assert main(["purge", config, *more]) == 2
    assert path in capsys.readouterr().err


def test_the_command_needs_a_tier_that_outlives_an_engine(tmp_path, capsys):
    path = tmp_path / "stack.yaml"
    path.write_text("arena: {size: 1 MiB}\ntiers: [{type: host}]\n")
    assert main(["purge", str(path), "--namespace", "0" * 64]) == 2
    assert "no tier keeps blocks after its engine ends" in capsys.readouterr().err


def test_a_running_cache_purges_a_salt_and_clears(server):
    with cache_over(server.url) as cache, cache_over(server.url) as other:
        stored(cache, keys(1, 2))
        salted(other, keys(7)[0], "tenant")
        list(cache.purge("tenant"))
        until(cache.idle)
        assert server.run("DBSIZE") == 2
        cache.clear()
        until(cache.idle)
        assert server.run("DBSIZE") == 0
        assert load(other, keys(1, 2))[0] == 0
