"""The parts of failover trials: compared loads, injected faults, figures."""

from __future__ import annotations

import asyncio
import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import kvladder
from kvladder.layout import Layout
from tests.kit.failover import ObjectLane
from tests.kit.httpproxy import FaultyProxy
from tests.kit.lanes import BEFORE, CLOSED, Figures, Held, Service
from tests.kit.traffic import Traffic, keys, loaded, save

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=16, block_bytes=4096)
STACK = {"arena": {"size": 8 * LAYOUT.slot_bytes}, "tiers": [{"type": "host"}]}
SENT = b"0123456789"


def test_each_wrong_byte_of_a_load_is_counted():
    with kvladder.open_cache(STACK, layout=LAYOUT) as cache:
        wanted = keys(1, 2, 3)
        save(cache, wanted)
        assert loaded(cache, [*wanted, *keys(9)])[::2] == (3, 0)
        fetch = cache.fetch(wanted)
        fetch.wait()
        cache.arena.view(fetch.slots[1])[7] ^= 1
        cache.arena.view(fetch.slots[2])[0] ^= 1
        fetch.release()
        assert loaded(cache, wanted)[::2] == (3, 2)


def test_errors_of_a_thread_are_raised():
    class Failing(Traffic):
        def turn(self, number):
            raise LookupError(f"in turn {number}")

    with (
        kvladder.open_cache(STACK, layout=LAYOUT) as cache,
        pytest.raises(LookupError),
        Failing(cache) as users,
    ):
        users.more()


@pytest.mark.parametrize(
    "broken",
    [
        Held(1, 10, 5, 3),  # the slots of a cache that has none
        Held(0, 11, 5, 3),
        Held(0, 10, 5, 4),
    ],
)
def test_growing_resources_are_refused(broken):
    figures = Figures()
    figures.held["object"] = {BEFORE: Held(0, 10, 5, 3), CLOSED: Held(0, 10, 7, 3)}
    figures.check()
    figures.held["object"][CLOSED] = broken
    with pytest.raises(AssertionError):
        figures.check()


def test_wrong_bytes_are_refused():
    figures = Figures()
    (case, *_) = ObjectLane.cases()
    figures.services[case] = Service(wrong_bytes=1)
    with pytest.raises(AssertionError):
        figures.check()


class Server(ThreadingHTTPServer):
    """Keeps every object put."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Echo)
        self.heard: list[bytes] = []


class Echo(BaseHTTPRequestHandler):
    """Answers with the object put."""

    server: Server

    protocol_version = "HTTP/1.1"
    timeout = 1.0

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        self.server.heard.append(body)
        self._answer(body)

    def do_GET(self):
        self._answer(SENT)

    def do_HEAD(self):
        self._answer(SENT)

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def echoing():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(port, *requests):
    """Return the answers on one connection, each a status and a body, or the error that ends it."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    answers: list[Any] = []
    try:
        for method in requests:
            connection.request(method, "/", SENT if method == "PUT" else None)
            with connection.getresponse() as answer:
                answers.append((answer.status, answer.read()))
    except (http.client.HTTPException, OSError) as error:
        answers.append(type(error))
    finally:
        connection.close()
    return answers


@pytest.mark.real
@pytest.mark.parametrize(
    ("fault", "put", "get", "heard"),
    [
        ("", (200, SENT), (200, SENT), [SENT]),
        ("delay", (200, SENT), (200, SENT), [SENT]),
        ("truncate", (200, SENT[:5]), (200, SENT[:5]), [SENT[:5]]),
        ("500", (500, b""), (500, b""), []),
        ("cut", None, http.client.IncompleteRead, []),
    ],
)
async def test_a_proxy_applies_its_fault_to_requests(fault, put, get, heard):
    with echoing() as server:
        async with FaultyProxy(server.server_port, delay_s=0.01) as proxy:
            proxy.fault = fault
            (came, *_) = await asyncio.to_thread(asked, proxy.port, "PUT")
            assert came == put or (fault == "cut" and issubclass(came, (OSError, ConnectionError)))
            assert await asyncio.to_thread(asked, proxy.port, "GET") == [get]
            assert proxy.met == {fault: 2}
            proxy.fault = ""
            both = await asyncio.to_thread(asked, proxy.port, "HEAD", "GET")
            assert both == [(200, b""), (200, SENT)]
        assert server.heard == heard
