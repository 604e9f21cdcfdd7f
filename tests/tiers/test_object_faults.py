"""Caches over real object stores that are shared, killed, stopped, overrun or taken away."""

from __future__ import annotations

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import kvladder
from kvladder.layout import Layout
from kvladder.tiers.object.tier import ObjectTier
from tests.kit.objectserver import BUCKET, ObjectServer
from tests.kit.traffic import forgotten, keys, loaded, stored
from tests.patience import PATIENCE_S, until
from tests.tiers import objecttests  # noqa: F401 - starts the library
from tests.tiers.test_redis_faults import LATE_S, QUICK

pytestmark = pytest.mark.slow
LAYOUT = Layout(block_tokens=16, block_bytes=256 << 10, fields={"model": "faults"})


@contextmanager
def cache_over(url, options=None, *, salt="", **settings):
    """A cache with a small host level over an object store."""
    level = {"type": "object", "url": url, "options": options or {}, "capacity": "64 MiB"}
    level |= {"when": "commit", "probe_cache": "1 ms", **QUICK, **settings}
    source = {
        "arena": {"size": 32 * LAYOUT.slot_bytes},
        "block": {"salt": salt},
        "fetch": {"deadline": "5 s", "budget": "100 %"},
        "tiers": [{"type": "host"}, level],
    }
    with kvladder.open_cache(source, layout=LAYOUT) as cache:
        yield cache


def load(cache, wanted):
    """Return how many leading blocks arrive from below the host level, each checked."""
    forgotten(cache, wanted)
    came = loaded(cache, wanted)
    assert not came.wrong_bytes
    assert came.took_s < LATE_S
    return came.blocks


def comes_back(cache, wanted):
    """Return whether all blocks saved now are read back."""
    stored(cache, wanted)
    return load(cache, wanted) == len(wanted)


@pytest.fixture
def server(tmp_path):
    with ObjectServer(tmp_path) as server:
        yield server


@pytest.fixture(params=["server", "folder"])
def store(request, tmp_path):
    """Return the store of a cache."""
    if request.param == "folder":
        return f"file://{tmp_path}", {}
    server = request.getfixturevalue("server")
    return f"s3://{BUCKET}/kv", server.options


def patient(**settings):
    """Return long timeouts for tests in which nothing is slow on purpose."""
    return {"timeout": "1 m", **settings}


@pytest.mark.parametrize("codecs", [["checksum"], ["zstd", "aes-gcm"]])
def test_two_caches_share_blocks_that_no_other_cache_sees(store, codecs, monkeypatch):
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    wanted, settings = keys(1, 2, 3), patient(codecs=codecs)
    with cache_over(*store, **settings) as first, cache_over(*store, **settings) as second:
        stored(first, wanted)
        assert load(second, [*wanted, *keys(9)]) == 3
        stats = second.stats()["object"]
        assert (stats["found"], stats["hits"], stats["stored"]) == (3, 3, 0)
        with cache_over(*store, salt="secret", **settings) as stranger:
            assert load(stranger, wanted) == 0
            assert stranger.stats()["object"]["corrupt"] == 0
        second.remove(wanted[1:])
        until(second.idle)
        assert load(first, wanted) == 1


def test_a_purge_removes_blocks_of_other_caches(store):
    with cache_over(*store, **patient()) as first, cache_over(*store, **patient()) as second:
        tenants, others = keys("tenant", 1), keys("other", 1)
        stored(first, tenants, salt="tenant")
        stored(first, others)
        list(second.purge("tenant"))
        until(second.idle)
        assert (load(second, tenants), load(second, others)) == (0, 2)
        second.clear()
        until(second.idle)
        assert load(second, others) == 0


def test_a_server_that_is_killed_and_restarted_is_used_again(server):
    wanted = keys(1, 2, 3)
    with cache_over(f"s3://{BUCKET}/kv", server.options) as cache:
        until(lambda: comes_back(cache, wanted))
        server.kill()
        assert load(cache, wanted) == 0
        stored(cache, keys(4, 5))
        assert cache.stats()["object"]["errors"]
        server.start()  # with a bucket that is empty
        until(lambda: comes_back(cache, wanted))


def test_a_server_that_is_silent_for_a_while_is_used_again(server):
    wanted = keys(1, 2, 3)
    with cache_over(f"s3://{BUCKET}/kv", server.options) as cache:
        until(lambda: comes_back(cache, wanted))
        server.pause()
        assert load(cache, wanted) == 0
        stored(cache, keys(4, 5))
        server.resume()
        until(lambda: comes_back(cache, wanted))


def test_a_removed_bucket_gives_misses(server):
    wanted = keys(1, 2)
    with cache_over(f"s3://{BUCKET}/kv", server.options, **patient()) as cache:
        server.ask("DELETE", BUCKET)
        stored(cache, wanted)
        assert cache.stats()["object"]["errors"]
        assert load(cache, wanted) == 0


class Throttling(BaseHTTPRequestHandler):
    """Answers all requests except lists with a demand to slow down."""

    timeout = 1.0  # a connection that a client keeps open does not keep a thread

    protocol_version = "HTTP/1.1"

    def _answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lists = "list-type" in self.path
        body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        self.send_response(200 if lists else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, *_):
        pass


def test_a_store_that_throttles_costs_no_more_than_its_blocks():
    with ThreadingHTTPServer(("127.0.0.1", 0), Throttling) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            options = {"endpoint": address, "allow_http": True, "skip_signature": True}
            with cache_over("s3://blocks", options, timeout="2 s") as cache:
                stored(cache, keys(1, 2))
                assert load(cache, keys(1, 2)) == 0
                assert cache.stats()["object"]["errors"]
        finally:
            server.shutdown()
            thread.join()


class Holding(Throttling):
    """Passes requests on to a store, the first put only once ``goes_on`` is set."""

    def _answer(self):
        between = self.server
        assert isinstance(between, Between)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_held = self.command == "PUT" and not between.held.is_set()
        if is_held:
            between.held.set()
            between.goes_on.wait(PATIENCE_S)
        there = http.client.HTTPConnection("127.0.0.1", between.behind)
        there.request(self.command, self.path, body, dict(self.headers))
        answer = there.getresponse()
        found = answer.read()
        there.close()
        if is_held:  # the client has gone
            between.done.set()
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"connection", "date", "server"}:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(found)

    do_GET = do_PUT = do_HEAD = do_POST = _answer


class Between(ThreadingHTTPServer):
    """A proxy between a cache and the store at the port ``behind``."""

    def __init__(self, behind):
        super().__init__(("127.0.0.1", 0), Holding)
        self.behind = behind
        self.held, self.goes_on, self.done = (threading.Event() for _ in range(3))


def test_a_put_that_the_store_carries_out_after_a_purge_leaves_nothing(server, monkeypatch):
    monkeypatch.setattr(ObjectTier, "late_s", 10.0)
    with Between(server.port) as between:
        thread = threading.Thread(target=between.serve_forever)
        thread.start()
        try:
            options = {**server.options, "endpoint": f"http://127.0.0.1:{between.server_port}"}
            with cache_over(f"s3://{BUCKET}/kv", options) as cache:
                stored(cache, keys("tenant"), salt="tenant")
                assert between.held.is_set()
                assert cache.stats()["object"]["stored"] == 0
                list(cache.purge("tenant"))
                until(lambda: cache.removals <= 1)  # all but the put that may still be carried out
                between.goes_on.set()
                until(between.done.is_set)
                assert b"<Key>" in server.ask("GET", BUCKET), "the store has carried it out"
                until(lambda: not cache.removals)
                assert b"<Key>" not in server.ask("GET", BUCKET)
        finally:
            between.goes_on.set()
            between.shutdown()
            thread.join()
