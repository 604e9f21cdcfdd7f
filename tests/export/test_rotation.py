"""Keys of servers and clients change while caches continue, as docs/how-to/operations.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvladder import Layout, open_cache
from kvladder.cli import main
from kvladder.control.sockets import ask
from kvladder.errors import ConfigError
from kvladder.testing.redisserver import RedisServer
from tests.kit.served import Server
from tests.kit.traffic import forgotten, loaded, stored
from tests.kit.traffic import keys as blocks
from tests.patience import until

pytest.importorskip("zmq", reason="the extra nixl is not installed")

from kvladder.tiers.nixl.curve import make_keys

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "rotated"})


def edit(file: Path, **changed: Any) -> dict[str, Any]:
    """Write a key file anew with changed entries, and return what it was."""
    before: dict[str, Any] = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(before | changed))
    return before


def level(server: Server, **more: Any) -> dict[str, Any]:
    """Return the level of an engine that finds a server by its address, or by its roster."""
    told = server.level(**more)
    if "roster" in server.stack["export"]:
        del told["servers"]
        told["roster"] = server.stack["export"]["roster"]
    return told


def connects(server: Server, keys: Path) -> bool:
    """Return whether a server takes a client's keys; raise other errors."""
    far = level(server, keys=str(keys), required=True)
    try:
        with open_cache(
            {"arena": {"size": "4 MiB"}, "tiers": [{"type": "host"}, far]}, layout=LAYOUT
        ):
            return True
    except ConfigError as error:
        if "key" not in str(error):
            raise
        return False


def stack(server: Server, keys: Path) -> dict[str, Any]:
    """Return the settings of an engine that keeps its blocks in the server."""
    far = level(server, keys=str(keys), breaker={"failures": 1, "retry": "100 ms"})
    fetch = {"when": "always", "deadline": "10 s"}
    return {"arena": {"size": "4 MiB"}, "tiers": [{"type": "host"}, far], "fetch": fetch}


def engine(server: Server, keys: Path) -> Any:
    """Return the open cache of an engine that keeps its blocks in the server."""
    return open_cache(stack(server, keys), layout=LAYOUT)


def use(cache: Any, *numbers: int) -> None:
    """Store blocks in the far level and read them from there, as soon as it serves."""
    wanted = blocks(*numbers)

    def come_back() -> bool:
        stored(cache, wanted)
        forgotten(cache, wanted)
        return loaded(cache, wanted).blocks == len(wanted)

    until(come_back, every_s=0.1)


def lost(server: Server) -> int:
    """Return how many sessions the server has ended."""
    return int(server.stats()["export"]["clients_lost"])


def said(server: Server, text: str) -> int:
    """Return how often the server has told its operator a text."""
    found: list[dict[str, Any]] = ask(server.folder / "control", {"command": "status"})["notices"]
    return sum(text in str(one) for one in found)


def test_clients_get_new_keys_while_the_server_runs(tmp_path):
    with Server(tmp_path / "server") as server:
        own, old = server.keys / "server.keys", server.keys / "client.keys"
        made, new = make_keys(tmp_path / "new")
        added = yaml.safe_load(made.read_text())["peers"]
        edit(new, peers=yaml.safe_load(old.read_text())["peers"])
        assert not connects(server, new)
        with engine(server, old) as cache:
            use(cache, 1, 2)
            process = server.stats()["export"]["process"]
            before = edit(own, peers=yaml.safe_load(own.read_text())["peers"] + added)
            until(lambda: said(server, "have changed") == 1)
            assert connects(server, new)
            use(cache, 3, 4)
            assert lost(server) == 0, "the old key still counts"

            own.write_text("secret: and then nothing")
            until(lambda: said(server, "keeps the keys that it had"))
            use(cache, 5, 6)
            assert lost(server) == 0

            edit(own, **before | {"peers": added})
            until(lambda: lost(server) == 1)
            assert not connects(server, old)
            new.replace(old)
            use(cache, 7, 8)
            assert server.stats()["export"]["process"] == process, "it was not started again"
        assert not said(server, before["secret"])


def test_a_server_of_a_roster_gets_another_secret_key_while_its_clients_find_it(tmp_path):
    with (
        RedisServer(tmp_path / "redis") as redis,
        Server(tmp_path / "server", roster=redis.url) as server,
    ):
        own, client = server.keys / "server.keys", server.keys / "client.keys"
        made, theirs = make_keys(tmp_path / "new")
        secret = yaml.safe_load(made.read_text())["secret"]
        (new,) = yaml.safe_load(theirs.read_text())["peers"]
        (old,) = yaml.safe_load(client.read_text())["peers"]

        def announced() -> list[str]:
            found = [name.decode() for name in redis.run("KEYS", "kvladder:far-ends:*")]
            return [name.removeprefix("kvladder:far-ends:") for name in found]

        assert announced() == [old]
        with engine(server, client) as cache:
            use(cache, 1, 2)
            edit(client, peers=[old, new])
            edit(own, secret=secret)
            until(lambda: lost(server) == 1)
            use(cache, 3, 4)
            until(lambda: announced() == [new])
            edit(client, peers=[new])
            assert connects(server, client), "a client that starts finds the list of the new key"
            use(cache, 5, 6)


def test_a_server_gets_another_secret_key_while_it_and_its_clients_run(tmp_path):
    with Server(tmp_path / "server") as server:
        own, client = server.keys / "server.keys", server.keys / "client.keys"
        made, theirs = make_keys(tmp_path / "new")
        secret = yaml.safe_load(made.read_text())["secret"]
        (new,) = yaml.safe_load(theirs.read_text())["peers"]
        (old,) = yaml.safe_load(client.read_text())["peers"]
        with engine(server, client) as cache:
            use(cache, 1, 2)
            edit(client, peers=[old, new])
            edit(own, secret=secret)
            until(lambda: lost(server) == 1)
            use(cache, 3, 4)
            assert connects(server, client), "a client that starts tries both keys"
            edit(client, peers=[old])
            assert not connects(server, client)
            edit(client, peers=[new])
            assert connects(server, client)


def test_a_client_that_loses_its_rights_is_told_so_and_owes_no_removal(tmp_path, capsys):
    with Server(tmp_path / "server") as server:
        own, client = server.keys / "server.keys", server.keys / "client.keys"
        config = tmp_path / "stack.yaml"
        config.write_text(
            yaml.safe_dump(stack(server, client) | {"control": str(tmp_path / "kv.sock")})
        )
        with open_cache(config, layout=LAYOUT) as cache:
            use(cache, 1, 2)
            may_read = {"name": "reader", "read": [cache.namespace.hex()]}
            may_read["peers"] = yaml.safe_load(own.read_text())["peers"]
            edit(own, peers=[], tenants=[may_read])
            until(lambda: lost(server) == 1)

            def denied() -> int:
                cache.remove(blocks(1))
                return cache.denied

            until(denied, every_s=0.1)
            until(lambda: not cache.removals)
            assert loaded(cache, blocks(1)).blocks == 1, "the server still has it"
            assert main(["purge", str(config), "--all"]) == 2
            said = capsys.readouterr().err
            assert "far: 3 removals denied" in said, "the purge, and the blocks that it knew"
            assert "purge with a client that may remove blocks" in said
            assert "in progress" not in said
            told = ask(tmp_path / "kv.sock", {"command": "status"})["notices"]
            assert any("does not let this client remove blocks" in str(one) for one in told)
