"""Purges with receipts over a real Redis that goes away and comes back."""

from __future__ import annotations

from contextlib import contextmanager

import msgspec
import pytest

import kvladder
from kvladder.control.sockets import ask
from kvladder.forgetting.receipt import Receipt, Signer, read_receipt
from kvladder.keys import START
from kvladder.testing.redisserver import RedisServer
from tests.kit.traffic import keys, stored
from tests.patience import until
from tests.tiers.test_redis_faults import LAYOUT, QUICK, cache_over, payload

pytestmark = pytest.mark.slow

KEY = "a key of 16 and more characters"


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


@contextmanager
def purging(server, tmp_path):
    """A cache with receipts over the server, and a control socket."""
    level = {"type": "redis", "url": server.url, "capacity": "64 MiB", "when": "commit", **QUICK}
    source = {
        "arena": {"size": 32 * LAYOUT.slot_bytes},
        "control": str(tmp_path / "kv.sock"),
        "forget": {"path": str(tmp_path / "purges"), "key": KEY},
        "tiers": [{"type": "host"}, level],
    }
    with kvladder.open_cache(source, layout=LAYOUT) as cache:
        yield cache


def save(cache, wanted, salt="", parent=START):
    saving = cache.save(wanted, salt=salt, parent=parent)
    for index, slot in zip(saving.indices, saving.slots, strict=True):
        cache.arena.view(slot)[: LAYOUT.block_bytes] = payload(wanted[index])
    saving.commit()
    until(lambda: all(cache.holding(wanted, levels=["redis"])) and cache.idle())


def purge(tmp_path, **request) -> Receipt:
    ask(tmp_path / "kv.sock", {"command": "purge", **request}, timeout_s=300)
    newest = max((tmp_path / "purges").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return read(newest)


def read(path) -> Receipt:
    receipt = read_receipt(path.read_bytes(), "receipt")
    assert Signer(KEY).wrong(receipt) == ""
    return receipt


def check(tmp_path, receipt: Receipt):
    request = {"command": "receipt", "receipt": msgspec.to_builtins(receipt)}
    return {one["name"]: one for one in ask(tmp_path / "kv.sock", request)["levels"]}


def test_a_purge_is_owed_while_redis_is_away_and_paid_when_it_is_back(server, tmp_path):
    red, blue = keys(1, 2), keys(7)
    with purging(server, tmp_path) as cache:
        save(cache, red, "red")
        save(cache, blue, "blue")
        server.pause()
        receipt = purge(tmp_path, salt="red", wait_s=0.5)
        assert [level.name for level in receipt.owed] == ["redis"]
        assert not any(cache.holding(red))
        found = check(tmp_path, receipt)["redis"]
        assert found["finding"] == "owed"
    with purging(server, tmp_path) as cache:  # Redis still does not answer
        path = tmp_path / "purges" / f"{receipt.id}.json"
        until(lambda: read(path).levels[1].why.startswith("left out: "))
        server.resume()
        until(lambda: read(path).complete)
        assert server.run("DBSIZE") == 1, "only the other tenant's block"
        found = check(tmp_path, read(path))
        assert [one["finding"] for one in found.values()] == ["clean", "clean"]
        save(cache, red, "red")
        found = check(tmp_path, read(path))["redis"]
        assert (found["finding"], found["newer"]) == ("clean", 2), "saved since: it may stay"


def test_a_prefix_is_found_in_redis_though_no_index_names_it(server, tmp_path):
    whole, beside = keys(1, 2, 3), keys(1, 9)
    with purging(server, tmp_path) as cache:
        save(cache, whole)
        save(cache, beside[1:], parent=beside[0])
    with cache_over(server.url) as other:  # another deployment: its block has no known parent
        stored(other, keys(1, 2, 3, 4)[3:])
    with purging(server, tmp_path) as cache:
        assert not any(cache.holding(whole)), "nothing was looked up since the start"
        scope = {"keys": [key.hex() for key in whole[:2]]}
        receipt = purge(tmp_path, **scope)
        assert receipt.complete
        assert (receipt.levels[1].blocks, receipt.levels[1].unknown) == (1, 1), "beside those named"
        assert server.run("DBSIZE") == 2, "the beside block, and the other deployment's"
        found = check(tmp_path, receipt)
        assert [one["finding"] for one in found.values()] == ["clean", "clean"]
        with cache_over(server.url) as other:
            stored(other, whole[:1])
        found = check(tmp_path, receipt)["redis"]
        assert found["left"] == 1, "another deployment stored it again"
