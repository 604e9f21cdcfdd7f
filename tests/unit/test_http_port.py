"""The HTTP port of a running cache: its paths, its refusals, and that no fault stops the cache."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from contextlib import closing
from http.client import HTTPConnection, IncompleteRead

import pytest

from kvladder import open_cache
from kvladder.cli import main
from kvladder.config.stack import load_config
from kvladder.control import answers, http, server
from kvladder.control.server import CLIENTS_MAX
from kvladder.control.sockets import ask
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=1, block_bytes=64, fields={"model": "served"})
TOKEN = "0123456789abcdef0123"  # of these tests alone
BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content-Type": "application/json"}


def settings(tmp_path, **http_settings):
    whole = {"listen": "127.0.0.1:0", "token": TOKEN, **http_settings}
    return {
        "arena": {"size": "1 MiB"},
        "control": str(tmp_path / "kv.sock"),
        "http": {name: value for name, value in whole.items() if value},
        "tiers": [{"type": "host"}, {"type": "memory", "capacity": "1 MiB", "when": "commit"}],
    }


def port_of(tmp_path):
    """Return the port that a cache says it listens at; None while it has none."""
    told = ask(tmp_path / "kv.sock", {"command": "status"})["listens"]
    return next((int(one.rstrip("/").rpartition(":")[2]) for one in told if "://" in one), None)


@pytest.fixture
def cache(tmp_path):
    with open_cache(settings(tmp_path), layout=LAYOUT) as cache:
        yield cache


@pytest.fixture
def port(cache, tmp_path):
    return port_of(tmp_path)


def sent(port, path, headers=(), *, method="GET", body=None):
    """Return status, headers and body of one answer."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as client:
        client.request(method, path, body, dict(headers))
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def purged(port, headers, body=b'{"salt": "red"}'):
    status, _, text = sent(port, "/purge", headers, method="POST", body=body)
    return status, json.loads(text)


def save(cache, numbers, salt=""):
    keys = [BlockKey(number.to_bytes(32, "little")) for number in numbers]
    cache.save(keys, salt=salt).commit()
    until(cache.idle)
    return keys


# ---- answers


def test_health_says_which_levels_are_open(port):
    assert sent(port, "/livez")[::2] == (200, "ok\n")
    assert sent(port, "/readyz")[::2] == (200, "ok\nhost: open\nmemory: open\n")
    assert sent(port, "/livez", method="HEAD")[::2] == (200, "")


def test_a_loop_that_hangs_is_not_alive(cache, port, monkeypatch):
    monkeypatch.setattr(answers, "LIVE_S", 0.05)
    hold, go = os.pipe()
    cache._portal.post(os.read, hold, 1)
    try:
        status, _, text = sent(port, "/livez")
        assert (status, "has not answered" in text) == (503, True)
        assert sent(port, "/readyz")[0] == 503
        assert sent(port, "/status")[0] == 200, "what is known without the loop is still told"
    finally:
        os.write(go, b"x")
    until(lambda: sent(port, "/livez")[0] == 200)
    os.close(hold)
    os.close(go)


@pytest.mark.parametrize(
    ("accept", "kind", "last"),
    [
        ("", "text/plain; version=", "\n"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text", "# EOF\n"),
    ],
)
def test_metrics_come_in_both_formats(cache, port, accept, kind, last):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
    from prometheus_client.parser import text_string_to_metric_families as plain

    save(cache, range(5))
    status, headers, text = sent(port, "/metrics", {"Accept": accept} if accept else {})
    assert status == 200
    assert headers["Content-Type"].startswith(kind)
    assert text.endswith(last)
    found = {one.name: one for one in (open_metrics if accept else plain)(text)}
    blocks = {s.labels["tier"]: s.value for s in found["kvladder_tier_blocks"].samples}
    assert blocks == {"host": 5, "memory": 5}
    calls = found["kvladder_tier_call_seconds"]
    assert calls.type == "histogram"
    assert any(s.name.endswith("_count") and s.value for s in calls.samples)


def test_status_has_the_statistics_and_the_last_notices(cache, port):
    cache._stack.shared.notices.say("trial", "something happened")
    status, headers, text = sent(port, "/status")
    told = json.loads(text)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert told["stats"].keys() == cache.stats().keys()
    assert told["levels"] == [
        {"name": "host", "type": "host"},
        {"name": "memory", "type": "memory"},
    ]
    assert told["notices"][0]["text"] == "something happened"
    assert TOKEN not in text + sent(port, "/describe")[2]


def test_events_come_again_and_again(port):
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as client:
        client.request("GET", "/events")
        answer = client.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream"
        for _ in range(2):
            told = answer.readline()
            assert told.startswith(b"data: ")
            assert json.loads(told[6:])["stats"]["host"]["blocks"] == 0
            assert answer.readline() == b"\n"


def test_a_salt_is_purged_with_the_token(cache, port):
    red, blue = save(cache, range(3), "red"), save(cache, range(3, 5), "blue")
    status, told = purged(port, {**BEARER, **JSON})
    assert (status, told["removed"]) == (200, {"host": 3, "memory": 3})
    assert (cache.lookup(red).total, cache.lookup(blue).total) == (0, 2)


# ---- refusals


@pytest.mark.parametrize(
    ("headers", "status", "why"),
    [
        ({}, 415, "expected Content-Type: application/json"),
        (JSON, 401, "expected Authorization: Bearer TOKEN"),
        ({**JSON, "Authorization": f"Basic {TOKEN}"}, 401, "wrong or missing token"),
        ({**JSON, "Authorization": "Bearer wrong"}, 401, "wrong or missing token"),
        ({**JSON, "Authorization": f"Bearer {TOKEN}\xe4"}, 401, "wrong or missing token"),
        ({**JSON, **BEARER, "Origin": "http://evil.example"}, 403, "another site"),
        ({**JSON, **BEARER, "Origin": "null"}, 403, "another site"),
        ({**JSON, **BEARER, "Sec-Fetch-Site": "cross-site"}, 403, "another site"),
        ({**JSON, **BEARER, "Host": "rebound.example"}, 421, "a name in http.hosts"),
    ],
)
def test_a_purge_without_its_right_is_refused(cache, port, headers, status, why):
    keys = save(cache, range(3), "red")
    found, told = purged(port, headers)
    assert found == status
    assert why in told["error"]
    assert cache.lookup(keys).total == 3


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example:80"}, 421),
        ({"Host": "127.0.0.1.rebound.example"}, 421),
        ({"Host": "[::1"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:9"}, 200),
        ({"Host": "[::1]:9480"}, 200),
        ({"Host": "kv.internal"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://kv.internal", "Host": "kv.internal"}, 200),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, 403),
    ],
)
def test_pages_of_other_sites_get_nothing(tmp_path, headers, status):
    with open_cache(settings(tmp_path, hosts=["kv.internal"]), layout=LAYOUT):
        found, _, text = sent(port_of(tmp_path), "/status", headers)
    assert found == status
    assert ("namespace" in text) == (status == 200)


def test_without_a_token_nothing_can_be_changed(tmp_path):
    with open_cache(settings(tmp_path, token=""), layout=LAYOUT) as cache:
        keys, port = save(cache, range(3), "red"), port_of(tmp_path)
        for headers in (JSON, {**JSON, "Authorization": "Bearer "}):
            status, told = purged(port, headers)
            assert status == 403
            assert "set http.token or http.token_file" in told["error"]
        assert cache.lookup(keys).total == 3
        assert sent(port, "/status")[0] == 200


def test_the_token_changes_while_the_cache_runs(tmp_path, caplog):
    file, new = tmp_path / "token", "fedcba98765432100000"

    def status(token):
        return purged(port, {**JSON, "Authorization": f"Bearer {token}"})[0]

    file.write_text(f"{TOKEN}\n")
    with open_cache(settings(tmp_path, token="", token_file=str(file)), layout=LAYOUT):
        port = port_of(tmp_path)
        assert (status(TOKEN), status(new)) == (200, 401)
        file.write_text(f"{new}\n{TOKEN}\n")
        assert (status(TOKEN), status(new)) == (200, 200), "both count until the old line is gone"
        url = f"http://127.0.0.1:{port}/"
        evict = ["evict", url, "--level", "host", "--amount", "1"]
        assert main([*evict, "--token-file", str(file)]) == 0, "a command sends the first line"
        file.write_text(f"{new}\n")
        assert (status(TOKEN), status(new)) == (401, 200)
        for wrong in ("", "short", f"{new}\nshort\n", f"{new}\n" * 9):
            file.write_text(wrong)
            assert (status(TOKEN), status(new), status("short")) == (401, 200, 401), wrong
        file.unlink()
        assert (status(TOKEN), status(new)) == (401, 200), "the last good ones stay in effect"
        file.write_text(f"{TOKEN}\n")
        assert (status(TOKEN), status(new)) == (200, 401)
        told = ask(tmp_path / "kv.sock", {"command": "status"})["notices"]
        assert any("No such file" in one["text"] for one in told)
        assert not any(secret in str(told) + caplog.text for secret in (TOKEN, new))


def test_slow_clients_are_disconnected_and_their_places_free(port, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.5)
    streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS_MAX)]
    try:
        for stream in streams:
            stream.settimeout(PATIENCE_S)
            stream.sendall(b"GET /status HTTP/1.1\r\nHost: local")  # and never the rest
        for stream in streams:
            assert stream.recv(1) == b""
    finally:
        for stream in streams:
            stream.close()
    until(lambda: sent(port, "/livez")[0] == 200)


def is_live(stream):
    """Return whether the answer to /livez arrives whole."""
    found = b""
    while not found.endswith(b"\r\n\r\nok\n") and (piece := stream.recv(1 << 16)):
        found += piece
    return found.startswith(b"HTTP/1.1 200") and found.endswith(b"ok\n")


def test_clients_that_wait_give_way_to_new_ones_the_longest_first(port):
    """Half of them have asked before, and half have sent only a part of a request."""
    whole, streams = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", []
    try:
        for number in range(2 * CLIENTS_MAX):
            stream = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            streams.append(stream)
            stream.sendall(whole[:-1] if number % 2 else whole)
            if not number % 2:
                assert is_live(stream)
            assert sent(port, "/livez")[0] == 200, "each new client is answered at once"
        newest = streams[-2]
        newest.sendall(whole)
        assert is_live(newest), "it still has its place"
        for stream in streams[:CLIENTS_MAX]:
            with contextlib.suppress(ConnectionResetError):
                while stream.recv(1 << 16):  # ends as it has given its place away
                    pass
    finally:
        for stream in streams:
            stream.close()


# ---- the port


def test_a_client_whose_request_has_come_is_not_displaced_by_a_flood(cache, port, monkeypatch):
    blocked, ending = threading.Event(), threading.Event()
    whole = answers.CacheAnswers.status

    def status(self):
        if not ending.is_set():
            blocked.set()
            ending.wait(PATIENCE_S)
        return whole(self)

    monkeypatch.setattr(answers.CacheAnswers, "status", status)
    request = b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    def connected():
        return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)

    with contextlib.ExitStack() as undo:
        for _ in range(CLIENTS_MAX):
            undo.enter_context(connected())
        busy = undo.enter_context(connected())
        busy.sendall(request)
        assert blocked.wait(PATIENCE_S)
        honest = undo.enter_context(connected())
        honest.sendall(request)
        for _ in range(3 * CLIENTS_MAX):
            undo.enter_context(connected())
        ending.set()
        for one in (busy, honest):
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_the_places_of_clients_are_told(tmp_path):
    with open_cache(settings(tmp_path), layout=LAYOUT) as cache:
        port = port_of(tmp_path)
        streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS_MAX)]
        try:
            until(
                lambda: (
                    cache.stats()["listeners"]["places"]["HTTP port"] == {"127.0.0.1": CLIENTS_MAX}
                )
            )
            told = f"clients at the HTTP port: 16, most: 16, of 127.0.0.1; at most {CLIENTS_MAX};"
            assert told in cache.describe()
            status, _, text = sent(port, "/metrics")
            assert status == 200
            assert 'displaced_clients_total{listener="HTTP port"} 1' in text
            assert 'http_clients{listener="HTTP port",client="127.0.0.1"} 16' in text
            assert 'refused_clients_total{listener="HTTP port"} 0' in text
        finally:
            for stream in streams:
                stream.close()
        until(lambda: cache.stats()["listeners"]["places"]["HTTP port"] == {})
        own = ask(tmp_path / "kv.sock", {"command": "stats"})["listeners"]["places"]
        assert own["control socket"] == {f"user {os.getuid()}": 1}


def test_a_taken_port_does_not_stop_the_cache_and_is_used_once_free(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        cache = open_cache(settings(tmp_path, listen=listen), layout=LAYOUT)
        assert f"{listen}: Address already in use (end the process that has the port" in caplog.text
        assert len(save(cache, range(3))) == 3
        assert port_of(tmp_path) is None
    until(lambda: port_of(tmp_path) is not None)
    assert sent(port_of(tmp_path), "/livez")[0] == 200
    said = [one for one in caplog.messages if "Address already in use" in one]
    assert len(said) == 1
    cache.close()


def test_closing_ends_streams_threads_and_the_port(tmp_path):
    with open_cache(settings(tmp_path), layout=LAYOUT):
        port = port_of(tmp_path)
        client = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        client.request("GET", "/events")
        answer = client.getresponse()
        assert answer.readline()
    with closing(client), pytest.raises(IncompleteRead):
        answer.read()
    with pytest.raises(ConnectionRefusedError):
        sent(port, "/livez")


# ---- the setting


def test_the_setting_is_an_address_or_a_section(tmp_path):
    short = {"host": "1 MiB", "http": "127.0.0.1:9480"}
    found = load_config(short, env={})
    assert (found.http.listen, found.http.of(2)) == ("127.0.0.1:9480", "127.0.0.1:9482")
    assert load_config({"host": "1 MiB"}, env={}).http.listen is None
    env = {"KVLADDER__HTTP__TOKEN": TOKEN, "KVLADDER__HTTP__LISTEN": "0.0.0.0:9480"}
    found = load_config(short, env=env)
    assert (found.http.listen, found.http.secret) == ("0.0.0.0:9480", TOKEN)
    assert TOKEN not in found.describe()
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    section = {"listen": "[::]:9480", "token_file": str(tmp_path / "token")}
    assert load_config({"host": "1 MiB", "http": section}, env={}).http.secret == TOKEN


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("9480", "http.listen: '9480' .*host:port"),
        ("0.0.0.0:9480", "http.token: missing, for clients at 0.0.0.0 .*listen at 127.0.0.1"),
        ("kv.internal:9480", "http.token: missing, for clients at kv.internal"),
        ({"token": TOKEN}, "http.listen: missing"),
        ({"listen": "127.0.0.1:1", "token": "short"}, "http.token: .*at least 16"),
        ({"listen": "127.0.0.1:1", "token": f"{TOKEN} b"}, "http.token: .*at least 16"),
        ({"listen": "127.0.0.1:1", "token": TOKEN, "token_file": "x"}, "http.token: both are set"),
        ({"listen": "127.0.0.1:1", "tokenn": TOKEN}, "http.tokenn: unknown key .*'token'"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_write_instead(section, why):
    with pytest.raises(ConfigError, match=why):
        load_config({"host": "1 MiB", "http": section}, env={})


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("", "at least 16"), ("short", "at least 16")]
)
def test_an_unusable_token_file_is_refused(tmp_path, text, why):
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    whole = settings(tmp_path, token="", token_file=str(file))
    with pytest.raises(ConfigError, match=f"http.token_file: .*{why}"):
        open_cache(whole, layout=LAYOUT)
    assert not (tmp_path / "kv.sock").exists()
