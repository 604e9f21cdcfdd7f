"""Clients that have the keys and break every rule cannot harm others, over real NIXL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("nixl", reason="the extra nixl is not installed")

import zmq

from kvladder.tiers.nixl.curve import make_keys
from tests.export.test_served import BLOCKS, Engine, all_come
from tests.kit.rogue import BLOCK_BYTES, SPACE, Rogue
from tests.kit.served import Server
from tests.patience import until

pytestmark = [pytest.mark.slow, pytest.mark.crash]
EIGHT = [*range(8)]
OTHERS = [*range(100, 108)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server", arena="4 MiB") as server:
        yield server


def client(server: Server, folder: Path, space: bytes = SPACE, keys: str = "client.keys") -> Rogue:
    return Rogue(folder, server.address, str(server.keys / keys), space)


def told(client: Rogue, call: str, *arguments: Any) -> Any:
    """Return the answer to a client, on a new connection if the server dropped the old one."""
    found: list[Any] = []

    def is_answered() -> bool:
        found.append(client(call, *arguments))
        is_lost = isinstance(found[-1], str) and found[-1].startswith("TierError")
        return not (is_lost and client("open") is not None)

    until(is_answered)
    return found[-1]


def test_a_reader_cannot_change_the_bytes_of_an_engine(tmp_path: Path) -> None:
    with Server(tmp_path / "keys") as keys:
        export = {"listen": "127.0.0.1:0", "keys": str(keys.keys / "server.keys")}
        with Engine(export=export) as exporter:
            exporter.save()
            address = f"127.0.0.1:{exporter.stats('export')['port']}"
            own = str(keys.keys / "client.keys")
            with Rogue(tmp_path, address, own, bytes(exporter.cache.namespace)) as rogue:
                slots = rogue("slots")
                assert slots >= BLOCKS
                rogue("scribble", [*range(slots)], b"\x66")
                assert exporter.load() == ["host"] * BLOCKS, "and each is what was saved"
            level = keys.level(servers=[], peers=[address], when="never")
            until(lambda: exporter.stats("export")["process"])
            with Engine(level) as reader:
                until(lambda: all_come(reader))


def test_a_client_that_writes_to_foreign_slots_makes_no_block_wrong(
    server: Server, tmp_path: Path
) -> None:
    with client(server, tmp_path) as rogue, client(server, tmp_path) as victim:
        assert all(told(victim, "put", EIGHT))
        rogue("forge", 3, b"\x66")
        until(lambda: victim("open") == "")
        until(lambda: "TierError" not in (found := victim("get", EIGHT)) and found)
        assert {*told(victim, "get", EIGHT)} <= {"right", "missing"}
        assert all(told(victim, "put", OTHERS))
        assert told(victim, "get", OTHERS) == ["right"] * 8
        assert server.process.poll() is None


def test_writes_after_an_aborted_grant_reach_no_client(server: Server, tmp_path: Path) -> None:
    with client(server, tmp_path) as rogue, client(server, tmp_path) as victim:
        op, slots = rogue("offer", EIGHT)
        assert min(slots) >= 0
        rogue("abort", op)
        assert all(told(victim, "put", OTHERS))
        rogue("scribble", slots, b"\x55")
        until(lambda: victim("open") == "")
        assert told(victim, "get", OTHERS) == ["right"] * 8


def test_writes_after_a_commit_reach_no_client(server: Server, tmp_path: Path) -> None:
    with client(server, tmp_path) as rogue, client(server, tmp_path) as victim:
        op, slots = rogue("offer", EIGHT)
        assert rogue("commit", op, EIGHT) == [0] * 8, "nothing was written yet"
        assert all(rogue("put", EIGHT))
        rogue("scribble", slots, b"\x55")
        until(lambda: victim("open") == "")
        assert {*told(victim, "get", EIGHT)} <= {"right", "missing"}


def test_a_client_killed_during_a_put_leaves_no_grant_open(server: Server, tmp_path: Path) -> None:
    with client(server, tmp_path) as rogue, client(server, tmp_path) as victim:
        _, slots = rogue("offer", EIGHT)
        assert min(slots) >= 0
        os.kill(rogue.pid, signal.SIGKILL)
        until(lambda: not server.stats()["export"]["granted"])
        assert all(told(victim, "put", OTHERS))
        assert told(victim, "get", OTHERS) == ["right"] * 8


@pytest.mark.parametrize(
    ("codec", "taken"), [("checksum", b"\x77"), ("aes-gcm", b"")], ids=["checksum", "aes-gcm"]
)
def test_the_first_writer_decides_the_bytes_unless_they_are_encrypted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, taken: bytes
) -> None:
    """A client of the same namespace can store wrong blocks if it has the codec's key."""
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    with Engine(server.level(codecs=[codec])) as victim:
        space, keys = bytes(victim.cache.namespace), victim.keys()
        with client(server, tmp_path, space) as rogue:
            assert all(told(rogue, "put_as", [bytes(key) for key in keys], b"\x77"))
        fetch = victim.cache.fetch(keys)
        fetch.wait()
        found = {bytes(victim.cache.arena.view(slot)[:BLOCK_BYTES]) for slot in fetch.slots}
        fetch.release()
        assert found == ({taken * BLOCK_BYTES} if taken else set())
        if not taken:
            victim.save()
            assert all_come(victim), "and each is what was saved"


def with_tenants(folder: Path, tenants: Mapping[str, Mapping[str, list[bytes]]]) -> Path:
    """Keys of a server, and of clients that are called by their tenant, in a folder."""
    server, client = make_keys(folder)
    found, peers = yaml.safe_load(server.read_text()), yaml.safe_load(client.read_text())["peers"]
    found |= {"peers": [], "tenants": []}
    for name, rights in tenants.items():
        public, secret = zmq.curve_keypair()
        own = folder / f"{name}.keys"
        own.touch(0o600)
        own.write_text(yaml.safe_dump({"secret": secret.decode(), "peers": peers}))
        spaces = {verb: [space.hex() for space in given] for verb, given in rights.items()}
        found["tenants"].append({"name": name, "peers": [public.decode()], **spaces})
    server.write_text(yaml.safe_dump(found))
    return folder


def test_a_tenant_reads_and_writes_its_own_namespaces_and_no_others(tmp_path: Path) -> None:
    red, blue = b"r" * 32, b"b" * 32
    rights = {
        "red": {"write": [red]},
        "blue": {"write": [blue]},
        "green": {"read": [red], "write": [blue]},
    }
    keys = with_tenants(tmp_path / "keys", rights)
    with (
        Server(tmp_path / "server", keys=keys) as server,
        client(server, tmp_path, red, "red.keys") as own,
        client(server, tmp_path, red, "blue.keys") as other,
        client(server, tmp_path, red, "green.keys") as reader,
    ):
        assert all(told(own, "put", EIGHT))
        until(lambda: f"keys do not allow namespace {red.hex()}" in other("open"))
        assert told(reader, "get", EIGHT) == ["right"] * 8
        assert told(reader, "put", OTHERS, b"\x77") == [False] * 8
        assert all(told(own, "put", OTHERS))
        assert told(reader, "get", OTHERS) == ["right"] * 8
        with client(server, tmp_path, blue, "green.keys") as writer:
            assert all(told(writer, "put", EIGHT))
        until(lambda: server.stats()["export"]["messages_refused"] >= 1)
