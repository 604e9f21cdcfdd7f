"""The control socket of a running cache: its answers, refusals, robustness and cleanup."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import stat
import time
from contextlib import suppress
from http.client import parse_headers
from pathlib import Path
from typing import Any, cast

import pytest

from kvladder import open_cache
from kvladder.control import http, server
from kvladder.control.http import REQUEST_BYTES_MAX
from kvladder.control.server import CLIENTS_MAX, HttpListener
from kvladder.control.sockets import (
    BoundSocket,
    NobodyThere,
    NotAnswering,
    ask,
    socket_path,
    sockets,
)
from kvladder.errors import ConfigError, Unavailable
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.runtime import Runtime
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

STRANGE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
LAYOUT = Layout(block_tokens=1, block_bytes=64, fields={"model": "controlled"})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv.sock"


def settings(path, **more):
    tiers = [{"type": "host"}, {"type": "memory", "capacity": "1 MiB", "when": "commit"}]
    return {"arena": {"size": "1 MiB"}, "control": str(path), "tiers": tiers, **more}


@pytest.fixture
def cache(path):
    with open_cache(settings(path), layout=LAYOUT) as cache:
        yield cache


def save(cache, numbers, salt=""):
    keys = [BlockKey(number.to_bytes(32, "little")) for number in numbers]
    saving = cache.save(keys, salt=salt)
    saving.commit()
    until(cache.idle)
    return keys


def get(command, *more):
    """Return a request as bytes."""
    lines = [f"GET {command} HTTP/1.1", "Host: localhost", *more]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def post(body, *more):
    head = "Content-Type: application/json", f"Content-Length: {len(body)}", *more
    return get("/purge", *head).replace(b"GET", b"POST") + body


def said(path, data, *, more=True):
    """Return status and text of the answers to these bytes, until it hangs up."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(PATIENCE_S)
        stream.connect(str(path))
        stream.sendall(data)
        if more:
            stream.shutdown(socket.SHUT_WR)
        with stream.makefile("rb") as file:
            return [*answers(file)]


def answers(file):
    while line := file.readline():
        headers = parse_headers(file)
        body = file.read(int(headers["Content-Length"]))
        yield int(line.split()[1]), body.decode()


def wait_for_a_place(path):
    def answers():
        try:
            return ask(path, {"command": "stats"})
        except ConfigError:
            return False

    until(answers, every_s=0.05)


# ---- answers


def test_the_socket_returns_statistics_and_the_configuration(cache, path):
    save(cache, range(5))
    told, own = ask(path, {"command": "stats"}), json.loads(json.dumps(cache.stats()))
    listed = told.pop("listeners").keys()  # the connection that asked may still count in one
    assert listed == own.pop("listeners").keys()
    assert told == own
    require_alike(ask(path, {"command": "describe"}), cache.describe())


def require_alike(told: str, described: str) -> None:
    """Assert that two descriptions are equal, except for the clients that are there."""
    pairs = zip(told.splitlines(), described.splitlines(), strict=True)
    assert all(one == other or "clients at the" in one for one, other in pairs)


def test_a_salt_and_then_all_are_purged(cache, path):
    red, blue = save(cache, range(5), "red"), save(cache, range(5, 8), "blue")
    done = ask(path, {"command": "purge", "salt": "red"})
    assert done == {
        "namespace": cache.namespace.hex(),
        "processes": [os.getpid()],
        "removed": {"host": 5, "memory": 5},
        "purged": {"host": 0, "memory": 0},
        "denied": {"host": 0, "memory": 0},
        "left": 0,
    }
    assert cache.lookup(red).total == 0
    assert cache.lookup(blue).total == 3
    own = {"command": "purge", "all": True, "namespace": cache.namespace.hex()}
    assert ask(path, own)["removed"] == {"host": 3, "memory": 3}
    assert cache.lookup(blue).total == 0
    assert save(cache, range(5), "red")


def test_connections_may_ask_repeatedly_and_concurrently(cache, path):
    request = get("/describe")
    with socket.socket(socket.AF_UNIX) as idle:
        idle.connect(str(path))
        answers = said(path, request * 3)
        assert [status for status, _ in answers] == [200] * 3
        for _, text in answers:
            require_alike(text, cache.describe())


def test_secrets_are_not_shown(path):
    whole = settings(path, block={"salt": "very secret"})
    with open_cache(whole, layout=LAYOUT):
        assert "very secret" not in ask(path, {"command": "describe"})
        assert "***" in ask(path, {"command": "describe"})


# ---- bad input


@pytest.mark.parametrize(
    ("data", "status", "why"),
    [
        (b"hello\r\n\r\n", 400, "not an HTTP request"),
        (b"\xff\xfe\r\n\r\n", 400, "not an HTTP request"),
        (b'{"command": "stats"}\n\r\n\r\n', 400, "not an HTTP request"),
        (b"GET /status HTTP/1.1\r\n\r\n", 400, "not an HTTP request"),
        (get("/stop"), 404, "no such path: expected one of /, /livez"),
        (get("/purge"), 405, "expected method POST"),
        (post(b""), 400, "not a request"),
        (post(b"hello"), 400, "not a request"),
        (post(b"[" * 10_000), 400, "not a request"),
        (post(b"[]"), 400, "not a request"),
        (post(b"{}"), 400, "either a salt or all: true"),
        (post(b'{"salt": "a", "all": true}'), 400, "either a salt or all: true"),
        (post(b'{"salt": ""}'), 400, "length >= 1"),
        (post(b'{"salt": 7}'), 400, "Expected `str | null`"),
        (post(b'{"salt": "a", "more": 1}'), 400, "unknown field `more`"),
        (post(b'{"all": true, "wait_s": -1}'), 400, ">= 0"),
        (post(b'{"all": true, "wait_s": NaN}'), 400, "not a request"),
        (post(b'{"all": true, "namespace": "beef"}'), 409, "expected namespace "),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(cache, path, data, status, why):
    save(cache, range(3), "a")
    ((found, text),) = said(path, data)
    assert found == status
    assert why in json.loads(text)["error"]
    assert cache.lookup([BlockKey(n.to_bytes(32, "little")) for n in range(3)]).total == 3
    assert ask(path, {"command": "describe"})


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"x" * (10 * REQUEST_BYTES_MAX), 431),
        (post(b"x" * (10 * REQUEST_BYTES_MAX)).replace(b"/purge", b"/status"), 413),
    ],
    ids=["head", "body"],
)
def test_a_client_with_an_endless_request_is_told_and_disconnected(cache, path, data, status):
    ((found, text),) = said(path, data)
    assert found == status
    assert f"at most {REQUEST_BYTES_MAX} bytes" in json.loads(text)["error"]
    ((found, _),) = said(path, b"GET /status HTTP/1.1\r\nHost: localhost\r\n")
    assert found == 400, "half a request is none"


def test_random_requests_do_not_stop_the_cache(cache, path):
    dice = random.Random(5)
    for _ in range(200):
        data = bytearray(get(dice.choice(["/status", "/describe", "/metrics"])))
        for _ in range(dice.randrange(4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        said(path, bytes(data[: dice.randrange(len(data) + 1)]))
    assert ask(path, {"command": "stats"})["arena"] == cache.stats()["arena"]


def test_a_silent_client_is_disconnected(cache, path, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.1)
    assert said(path, b"", more=False) == []


def test_a_client_that_reads_no_answer_is_disconnected(cache, path, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.3)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.settimeout(0.1)
        deaf.connect(str(path))

        def is_cut_off():
            try:
                deaf.sendall(get("/describe") * 100)
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True

        until(is_cut_off, every_s=0.05)
    assert ask(path, {"command": "stats"})


def test_the_number_of_clients_that_wait_for_answers_is_limited(cache, path, monkeypatch):
    monkeypatch.setattr("kvladder.manager.CacheManager.removals", 1)
    streams = [socket.socket(socket.AF_UNIX) for _ in range(CLIENTS_MAX)]
    try:
        for stream in streams:
            stream.connect(str(path))
            stream.sendall(post(b'{"salt": "a", "wait_s": 86400}'))
            time.sleep(0.1)
        with pytest.raises(ConfigError, match=f"{CLIENTS_MAX} clients are already connected"):
            ask(path, {"command": "stats"})
    finally:
        for stream in streams:
            stream.close()
    wait_for_a_place(path)


# ---- the socket in the file system


def test_only_the_owner_may_connect_and_closing_leaves_nothing(path):
    before = set(Path("/proc/self/fd").iterdir())
    with open_cache(settings(path), layout=LAYOUT):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.with_name("kv.sock.lock").stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:  # still there when it closes
            client.connect(str(path))
            client.sendall(get("/status"))
            assert client.recv(1)
            later = socket.socket(socket.AF_UNIX)
            later.settimeout(PATIENCE_S)
            later.connect(str(path))
    assert later.recv(1) == b"", "it is cut off"
    later.close()
    assert list(path.parent.iterdir()) == []
    left = set(Path("/proc/self/fd").iterdir()) - before
    assert not left  # leftovers of other tests may have been closed in between


def test_clients_that_connect_during_a_close_are_disconnected(path):
    """A client that was accepted a moment before has no task yet that could be ended."""
    runtime, nobody = Runtime(), cast("Any", None)  # it gets no calls
    for _ in range(100):
        listener = HttpListener(lambda: BoundSocket(path), "control socket", nobody, runtime)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(6)]
        for client in clients:
            client.settimeout(PATIENCE_S)
            client.connect(str(path))
        listener.close()
        for client in clients:
            with suppress(ConnectionResetError):  # it was not accepted
                assert client.recv(1) == b""
            client.close()
    runtime.close()


def test_a_waiting_purge_does_not_keep_the_cache_from_closing(path, monkeypatch):
    monkeypatch.setattr("kvladder.manager.CacheManager.removals", 1)
    with open_cache(settings(path), layout=LAYOUT), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(path))
        client.sendall(post(b'{"salt": "a", "wait_s": 86400}'))
        time.sleep(0.1)


def test_a_disconnected_client_frees_its_place(cache, path, monkeypatch):
    monkeypatch.setattr("kvladder.manager.CacheManager.removals", 1)
    request = post(b'{"salt": "a", "wait_s": 86400}')
    for _ in range(CLIENTS_MAX):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(request)
            time.sleep(0.1)
    wait_for_a_place(path)


def test_a_client_that_ended_only_its_own_side_still_gets_its_answer(cache, path, monkeypatch):
    monkeypatch.setattr("kvladder.manager.CacheManager.removals", 1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(post(b'{"salt": "a", "wait_s": 60}'))
        client.shutdown(socket.SHUT_WR)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        monkeypatch.setattr("kvladder.manager.CacheManager.removals", 0)
        client.settimeout(PATIENCE_S)
        with client.makefile("rb") as file:
            ((status, text),) = answers(file)
        assert (status, json.loads(text)["left"]) == (200, 0)


def test_an_unfinished_purge_reports_the_removals_left(cache, path, monkeypatch):
    monkeypatch.setattr("kvladder.manager.CacheManager.removals", 3)
    assert ask(path, {"command": "purge", "salt": "a", "wait_s": 0.1})["left"] == 3


def test_a_cache_starts_with_its_socket_in_use_and_takes_it_once_free(path, monkeypatch, caplog):
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    with open_cache(settings(path), layout=LAYOUT):
        other = open_cache(settings(path, block={"salt": "other"}), layout=LAYOUT)
        assert f"{path} is in use by process {os.getpid()} (end that process" in caplog.text
        assert other.namespace.hex() not in ask(path, {"command": "describe"})
    until(lambda: f"this cache now listens at the control socket {path}" in caplog.text)
    assert other.namespace.hex() in ask(path, {"command": "describe"})
    other.close()
    assert list(path.parent.iterdir()) == []


def test_a_cache_that_waits_for_its_socket_can_be_closed(cache, path):
    others = [open_cache(settings(path), layout=LAYOUT) for _ in range(2)]
    for other in others:
        other.close()
    assert ask(path, {"command": "describe"}), "the first one is as it was"


@pytest.mark.parametrize("listens", [True, False])
def test_the_owner_of_a_socket_is_known_from_its_listener_or_its_lock(path, listens):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        bound = BoundSocket(path)
        if listens:
            path.with_name("kv.sock.lock").write_text("1\n")
            bound.socket.listen()
        os.write(write, b"x")
        os.close(write)
        signal.pause()
    assert os.read(read, 1)
    try:
        with pytest.raises(Unavailable, match=f"is in use by process {child} ") as held:
            BoundSocket(path)
        assert held.value.path == "control.path"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    BoundSocket(path).close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_socket_is_retried_on_a_file_system_that_refuses_it(path, monkeypatch, caplog, code):
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    locked, works = BoundSocket._locked, list[bool]()

    def fail(self):
        if works:
            return locked(self)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(BoundSocket, "_locked", fail)
    with open_cache(settings(path), layout=LAYOUT):
        assert f"{path}: {os.strerror(code)} (expected a name in a directory" in caplog.text
        assert not path.exists()
        works.append(True)
        until(path.is_socket)
        until(lambda: "this cache now listens at" in caplog.text)
        assert ask(path, {"command": "stats"})


def test_a_socket_of_a_killed_process_is_replaced(path):
    child = os.fork()
    if child == 0:
        BoundSocket(path)
        os._exit(0)
    os.waitpid(child, 0)
    assert path.is_socket()
    with pytest.raises(NobodyThere, match="no answer: Connection refused"):
        ask(path, {"command": "stats"})
    with pytest.raises(NobodyThere, match="no answer: No such file"):
        ask(path.with_name("other"), {"command": "stats"})
    with open_cache(settings(path), layout=LAYOUT):
        assert ask(path, {"command": "stats"})
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a/kv.sock", "No such file or directory"),
        ("x" * 108, "at most 107 bytes"),
        ("plain", "is not a socket"),
        ("folder", "is not a socket"),
    ],
)
def test_an_unusable_path_is_refused(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    Path("plain").write_text("mine")
    Path("folder").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=f"^control.path: .*{why}"):
        open_cache(settings(name), layout=LAYOUT)
    assert sorted(tmp_path.iterdir()) == before
    assert Path("plain").read_text() == "mine"


def test_engines_with_one_setting_have_a_socket_each(tmp_path):
    setting = str(tmp_path / "kv.sock")
    assert sockets(setting) == []
    first, second = (socket_path(setting, instance) for instance in (0, 1))
    assert (first.name, second.name) == ("kv.sock", "kv.dp1.sock")
    bound = [BoundSocket(first), BoundSocket(second)]
    assert sockets(setting) == [first, second]
    for one in bound:
        one.close()


@pytest.mark.parametrize("name", ["kv[1].sock", "kv", "a*.s?ck", "k v.x.sock"])
def test_sockets_of_other_settings_are_not_taken(tmp_path, name):
    setting = tmp_path / name
    own = [socket_path(str(setting), instance) for instance in (0, 2, 10)]
    others = [f"{setting.stem}.dp{what}{setting.suffix}" for what in ("x", "1.old", "")]
    for one in (*own, *map(setting.with_name, others), tmp_path / "kv1.sock"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(one))
    setting.with_name(f"{setting.stem}.dp3{setting.suffix}").write_text("no socket")
    assert sockets(str(setting)) == own
    assert sockets(str(tmp_path / "nowhere" / name)) == []


def test_an_unreadable_directory_does_not_count_as_empty(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="control.path: .*Too many levels"):
        sockets(str(loop / "kv.sock"))
    with pytest.raises(ConfigError, match="control.path: .*Too many levels"):
        BoundSocket(loop / "kv.sock")


def test_answers_of_a_foreign_server_are_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as strange:
        strange.bind(str(tmp_path / "strange"))
        strange.listen()
        strangers = (b"hello\n", "not HTTP"), (b"", "closed connection"), (STRANGE, "not JSON")
        for answer, why in strangers:
            client = os.fork()
            if client == 0:
                stream, _ = strange.accept()
                stream.recv(1000)
                stream.sendall(answer)
                os._exit(0)
            with pytest.raises(NotAnswering, match=why):
                ask(tmp_path / "strange", {"command": "stats"})
            os.waitpid(client, 0)
        with pytest.raises(NotAnswering, match="timed out"):
            ask(tmp_path / "strange", {"command": "stats"}, timeout_s=0.1)


# ---- its setting


def test_the_setting_is_a_path_or_a_section(path, monkeypatch):
    from kvladder.config.stack import load_config

    short = {"host": "1 MiB", "control": "/run/kv.sock"}
    assert load_config(short, env={}).control.path == "/run/kv.sock"
    assert "/run/kv.sock" in load_config(short, env={}).describe()
    longer = {"host": "1 MiB", "control": {"path": "/run/kv.sock"}}
    assert load_config(longer, env={}).control.path == "/run/kv.sock"
    assert load_config({"host": "1 MiB"}, env={}).control.path is None
    env = {"KVLADDER__CONTROL": "/run/other.sock"}
    assert load_config(short, env=env).control.path == "/run/other.sock"
    for wrong, why in (
        ({"paht": "x"}, "control.paht: unknown key .*'path'"),
        ({"path": 7}, "control.path: 7 .*expected text"),
        ([], "control: "),
    ):
        with pytest.raises(ConfigError, match=why):
            load_config({"host": "1 MiB", "control": wrong}, env={})


def test_the_command_prints_the_removals_left(tmp_path, path, monkeypatch, capsys):
    from kvladder.cli import main

    config = tmp_path / "stack.yaml"
    config.write_text(json.dumps(settings(path)))  # which is YAML, too
    with open_cache(config, layout=LAYOUT) as cache:
        save(cache, range(4), "red")
        monkeypatch.setattr("kvladder.manager.CacheManager.removals", 3)
        assert main(["purge", str(config), "--salt", "red", "--wait", "0"]) == 2
        said = capsys.readouterr().err
    assert "host: 4 blocks removed" in said
    assert "3 removals or purges still in progress" in said
