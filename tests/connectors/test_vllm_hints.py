"""Hints of requests in a scripted engine: from an envelope to the levels, and to the answer."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from tests.connectors.scripted import Engine, Request
from tests.patience import until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds
PROMPT = range(32)


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


def opened(**limits: Any) -> Any:
    tiers = [
        {"type": "host"},
        {"name": "nvme", "type": "memory", "capacity": "1 MiB"},
    ]
    source = {"arena": {"size": "256 KiB"}, "tiers": tiers, "fetch": {"deadline": "10 m"}}
    return Engine(source | ({"limits": limits} if limits else {}))


def envelope(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"action_id": f"a{n}", "action_type": verb, "action_version": "1", "payload": payload}
        for n, (verb, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": repr(actions), "actions": made}


def served(
    engine: Any, *actions: tuple[str, dict[str, Any]], tokens: Sequence[int] = PROMPT
) -> list[tuple[str, str]]:
    """Serve a request with these actions; return their outcomes and reasons."""
    given = {"kv_hints": envelope(*actions)}
    request = engine.add(tokens, kv_transfer_params=given)
    engine.run()
    found = engine.reports[request.request_id]["hints"]
    return [(one["outcome"], one["why"]) for one in found]


def priorities(engine: Any) -> set[int]:
    index = engine.half.connector.manager._stack.host.index
    return {index.priority(place) for place in index.victims()}


def test_a_pinned_request_is_saved_with_the_priority_of_a_pin() -> None:
    engine = opened()
    assert served(engine, ("pin", {"ttl_s": 600})) == [("accepted", "")]
    assert priorities(engine) == {100}
    engine.close()


def test_a_pin_is_clipped_to_the_operators_limits() -> None:
    engine = opened(priority=80, pin="60 s")
    assert served(engine, ("pin", {"ttl_s": 600})) == [("clipped", "priority 80 for 60 s")]
    assert priorities(engine) == {80}
    engine.close()


def test_a_retained_request_is_saved_with_its_priority() -> None:
    engine = opened()
    assert served(engine, ("retain", {"priority": 42})) == [("accepted", "")]
    assert priorities(engine) == {42}
    engine.close()


def test_a_request_that_demotes_itself_leaves_host_when_it_has_finished() -> None:
    engine = opened()
    manager = engine.half.connector.manager
    (found,) = served(engine, ("demote", {"to": "nvme"}))
    assert found == ("deferred", "until the request has finished")

    def is_below() -> bool:
        engine.half.connector.take()
        stats = manager.stats()
        return (stats["host"]["blocks"], stats["nvme"]["blocks"] > 0) == (0, True)

    until(is_below)
    again = engine.add([*PROMPT, 99])
    engine.run()
    assert engine.reports[again.request_id] is None, "without hints there is nothing to answer"
    assert engine.loaded > 0
    engine.close()


def test_a_session_is_prefetched_and_demoted_by_later_requests() -> None:
    engine = opened()
    manager = engine.half.connector.manager
    engine.add(PROMPT, kv_transfer_params={"kvladder": {"session": "a"}})
    engine.run()
    until(manager.idle)
    keys = [key for run in manager.sessions.last("a")[0] for key in run]
    (found,) = served(engine, ("demote", {"session": "a"}), tokens=range(100, 108))
    assert found == ("accepted", "")
    assert manager.lookup(keys).host == 0
    until(manager.idle)
    ((outcome, _),) = served(engine, ("prefetch", {"session": "a"}), tokens=range(200, 208))
    assert outcome == "accepted"

    def is_up() -> bool:
        engine.half.connector.take()
        return bool(manager.lookup(keys).host == len(keys))

    until(is_up)
    engine.close()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("not an envelope", "not an envelope of hints"),
        ({"message_id": 3}, "not an envelope of hints"),
        (envelope(("fly", {})), "unknown action 'fly'"),
        (envelope(("pin", {})), "missing required field `ttl_s`"),
        (envelope(("share", {})), "no level is shared"),
        (envelope(("demote", {"to": "attic"})), "'attic'"),
        (envelope(("pin", {"ttl_s": 1, "salt": "another's"})), "the salt is not that of"),
    ],
)
def test_wrong_hints_have_an_outcome_and_change_no_request(sent: object, expected: str) -> None:
    engine = opened()
    request = engine.add(PROMPT, kv_transfer_params={"kv_hints": sent})
    engine.run()
    (found,) = engine.reports[request.request_id]["hints"]
    assert found["outcome"] == "rejected"
    assert expected in found["why"]
    assert priorities(engine) == {35}
    engine.close()


def test_hints_in_vllms_own_field_are_obeyed() -> None:
    kv_hints = pytest.importorskip("vllm.v1.kv_hints")
    engine = opened()
    action = kv_hints.KvHintAction("a", "pin", "1", {"ttl_s": 60})
    request = Request("r", PROMPT)
    request.kv_hints = kv_hints.KvHintsEnvelope("0.1", "m", [action])
    engine.arrive(request)
    engine.run()
    answer = engine.reports[request.request_id]["hints"]
    assert answer == [{"action_id": "a", "outcome": "accepted", "why": "", "blocks": 0}]
    engine.close()
