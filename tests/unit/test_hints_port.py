"""Hints over the HTTP port of a running cache: their answers, their refusals, and their limits."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from kvladder import open_cache
from kvladder.control.hints import HINTS_BYTES_MAX, Allowance
from kvladder.control.http import REQUEST_BYTES_MAX
from kvladder.hints import HintExecutor
from kvladder.keys import KeyScheme
from tests.patience import PATIENCE_S, until
from tests.unit.test_http_port import BEARER, JSON, LAYOUT, TOKEN, port_of, save, sent, settings

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(tmp_path):
    with open_cache(settings(tmp_path), layout=LAYOUT) as cache:
        yield cache


@pytest.fixture
def port(cache, tmp_path):
    return port_of(tmp_path)


def envelope(verb: str, message: str = "m", **payload: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": verb, "action_version": "1", "payload": payload}
    return {"protocol_version": "0.1", "message_id": message, "actions": [action]}


def hinted(port: int, body: object, headers: Any = None) -> tuple[int, Any]:
    """Post a body, an envelope unless it is bytes; return the status and the answer."""
    given = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {**BEARER, **JSON} if headers is None else headers
    status, _, text = sent(port, "/hints", told, method="POST", body=given)
    return status, json.loads(text)


def one(port: int, verb: str, message: str = "m", **payload: Any) -> dict[str, Any]:
    """Return the outcome of one action."""
    status, told = hinted(port, envelope(verb, message, **payload))
    assert status == 200, told
    (found,) = told["hints"]
    return dict(found)


def hexed(keys):
    return [key.hex() for key in keys]


def test_each_verb_is_obeyed_without_a_request(cache, port):
    keys = save(cache, range(6), salt="red")
    named = {"keys": hexed(keys), "salt": "red"}
    done = {"action_id": "a", "outcome": "accepted", "why": "", "blocks": 6}
    assert one(port, "pin", "1", ttl_s=60, **named) == done
    with cache._stack.lock:
        assert {cache._stack.meta(key).priority for key in keys} == {100}
    assert one(port, "retain", "2", priority=50, **named) == done
    assert one(port, "demote", "3", to="memory", **named) == done
    assert cache.lookup(keys).host == 0
    until(cache.idle)
    assert one(port, "prefetch", "4", **named) == done
    until(lambda: cache.lookup(keys).host == 6)  # no engine takes a step
    assert "no level is shared" in one(port, "share", "5", **named)["why"]
    assert one(port, "demote", "6", to="out", **named) == done
    assert cache.lookup(keys).total == 0
    assert cache.stats()["hints"]["demote"] == {"accepted": 2}


def test_outcomes_are_in_the_stream_of_events(cache, port):
    keys = save(cache, range(3), salt="red")
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as client:
        client.request("GET", "/events")
        events = client.getresponse()

        def told() -> dict[str, Any]:
            (line, _) = events.readline(), events.readline()
            return dict(json.loads(line.removeprefix(b"data: "))["stats"].get("hints", {}))

        assert told() == {}, "none came yet"
        one(port, "pin", "1", ttl_s=60, keys=hexed(keys), salt="red")
        one(port, "pin", "2", ttl_s=60, keys=hexed(keys), salt="blue")
        one(port, "fly", "3")
        expected = {"pin": {"accepted": 1, "missing": 1}, "unknown": {"rejected": 1}}
        until(lambda: told() == expected | {"in_flight": 0})


def test_more_fetches_than_may_be_in_flight_begin_without_an_engine(cache, port):
    keys = save(cache, range(40), salt="red")
    one(port, "demote", "0", to="memory", keys=hexed(keys), salt="red")
    until(cache.idle)
    for number, key in enumerate(keys):
        one(port, "prefetch", f"p{number}", keys=[key.hex()], salt="red")
    until(lambda: sum(cache.lookup([key]).host for key in keys) == len(keys))
    until(lambda: cache.stats()["hints"]["in_flight"] == 0)


def test_tokens_are_named_if_the_engine_has_said_how(cache, port):
    tokens = [5, 6, 7]
    assert "names blocks itself" in one(port, "prefetch", "1", tokens=tokens)["why"]
    scheme = KeyScheme(cache.namespace, block_tokens=1)
    HintExecutor.of(cache).name_blocks = lambda given, salt: [
        scheme.chain(given, parent=scheme.root(salt=salt))
    ]
    keys = scheme.chain(tokens, parent=scheme.root(salt="red"))
    cache.save(keys, salt="red").commit()
    assert one(port, "pin", "2", tokens=tokens, salt="red", ttl_s=9)["blocks"] == 3
    assert one(port, "pin", "3", tokens=[5, 6, 7, 8], salt="red", ttl_s=9)["outcome"] == "clipped"
    for number, other in enumerate([{"salt": "blue"}, {"salt": ""}, {}]):
        missed = one(port, "pin", f"other {number}", tokens=tokens, ttl_s=9, **other)
        assert missed["outcome"] == "missing"
    assert one(port, "pin", "4", tokens=[99], salt="red", ttl_s=9)["outcome"] == "missing"


def test_a_message_sent_again_is_answered_and_not_done_again(cache, port):
    keys = save(cache, range(3))
    first = hinted(port, envelope("demote", keys=hexed(keys), to="out"))
    save(cache, range(3))
    assert hinted(port, envelope("demote", keys=hexed(keys), to="out")) == first
    assert cache.lookup(keys).total == 3
    other = one(port, "demote", keys=hexed(keys[:1]), to="out")
    assert (other["outcome"], "other actions" in other["why"]) == ("rejected", True)


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (b"", 400, "not an envelope"),
        (b"\xff\xff", 400, "not an envelope"),
        (b"[" * 10_000, 400, "not an envelope"),
        (b"[]", 400, "not an envelope"),
        ({"protocol_version": "0.1", "actions": []}, 400, "message_id"),
        (envelope("pin", "x" * 1000, ttl_s=1), 400, "expected 1 to 256"),
        (b" " * (HINTS_BYTES_MAX + 1), 413, f"at most {HINTS_BYTES_MAX} bytes"),
    ],
)
def test_what_is_no_envelope_is_an_error_that_says_why(port, body, status, expected):
    found, told = hinted(port, body)
    assert (found, expected in told["error"]) == (status, True), told


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 401),
        ({**JSON, "Authorization": "Bearer wrong"}, 401),
        ({**JSON, "Authorization": f"Bearer {TOKEN}x"}, 401),
        (BEARER, 415),
        ({**BEARER, **JSON, "Host": "evil.example"}, 421),
    ],
)
def test_hints_need_the_token(cache, port, headers, status):
    keys = save(cache, range(2))
    assert hinted(port, envelope("demote", keys=hexed(keys), to="out"), headers)[0] == status
    assert cache.lookup(keys).total == 2


def test_a_client_without_the_token_cannot_send_much(port):
    status, told = hinted(port, b" " * (REQUEST_BYTES_MAX + 1), JSON)
    assert (status, f"at most {REQUEST_BYTES_MAX} bytes" in told["error"]) == (413, True)


def test_a_long_prompt_fits_into_one_envelope(cache, port):
    told = one(port, "prefetch", tokens=list(range(100_000)))
    assert "names blocks itself" in told["why"]


def test_without_a_token_only_the_socket_takes_hints(tmp_path):
    with open_cache(settings(tmp_path, token=""), layout=LAYOUT):
        port = port_of(tmp_path)
        assert port is not None
        status, told = hinted(port, envelope("pin", ttl_s=1), JSON)
    assert (status, "no token is configured" in told["error"]) == (403, True)


def test_hints_take_a_tenth_of_a_core_at_most():
    now = busy = 0.0
    allowance = Allowance(lambda: now, lambda: busy)
    served = refused = 0
    for _ in range(100_000):  # ten seconds
        if allowance.wait_s() > 0:
            refused += 1
        else:
            with allowance.spending():
                busy += 0.000_05
            served += 1
        now += 0.000_1
    assert 30_000 <= served <= 41_000  # the burst of one second, and a tenth of ten
    assert refused == 100_000 - served
    now += 60.0
    assert allowance.wait_s() == 0.0


def test_a_flood_is_told_to_wait(cache, port, monkeypatch):
    keys = hexed(save(cache, range(2)))
    monkeypatch.setattr("kvladder.control.hints.BURST_S", 0.0)
    monkeypatch.setattr("kvladder.control.hints.SHARE", 1e-9)
    told = hinted(port, envelope("retain", "1", keys=keys, priority=20))
    assert told[0] == 200
    status, headers, text = sent(
        port,
        "/hints",
        {**BEARER, **JSON},
        method="POST",
        body=json.dumps(envelope("retain", "2", keys=keys, priority=20)),
    )
    assert (status, int(headers["Retry-After"]) >= 1) == (429, True)
    assert "send it again in" in json.loads(text)["error"]
