"""The parameters that a vLLM request may set for its blocks, and the handling of wrong ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.config.stack import load_config
from kvladder.connectors.vllm.options import NO_POLICY, Policies, RequestPolicy, Tiers
from kvladder.notices import Notices

SOURCE = {
    "arena": {"size": "1 MiB"},
    "tiers": [{"type": "host"}, {"name": "nvme", "type": "memory", "capacity": "1 MiB"}],
}


def policies(*, map_priority: int = 0) -> Policies:
    config = load_config(SOURCE, env={})
    return Policies(config, map_priority=map_priority, notices=Notices(lambda: 0.0))


def request(params: object, *, priority: int = 0) -> Any:
    given = {"kvladder": params, "do_remote_decode": False}
    return SimpleNamespace(request_id="r-1", kv_transfer_params=given, priority=priority)


def policy_of(params: object) -> RequestPolicy:
    return policies().of(request(params))


def of_blocks(policy: RequestPolicy, *blocks: int) -> list[tuple[int, float | None]] | None:
    return policy.priorities(blocks[0], len(blocks), block_tokens=4, prompt_tokens=16)


def test_all_parameters_apply_together() -> None:
    policy = policy_of(
        {
            "priority": 80,
            "ttl_s": 600,
            "retention": [[0, 4, 90, None], [8, None, 60, 5]],
            "decode_priority": 20,
            "decode_duration_s": 2.5,
            "tiers": {"load": ["host", "nvme"], "store": ["host"]},
            "save": False,
            "save_decode": True,
        }
    )
    assert of_blocks(policy, 0, 1, 2, 3, 4) == [
        (90, None), (80, None), (60, 5.0), (60, 5.0), (20, 2.5),
    ]  # fmt: skip
    assert of_blocks(policy, 4, 5) == [(20, 2.5)] * 2
    assert (policy.ttl_s, policy.save, policy.save_decode) == (600.0, False, True)
    assert policy.tiers == Tiers(load=("host", "nvme"), store=("host",))


def test_a_request_without_parameters_has_the_default_policy() -> None:
    givens: list[object] = [None, {}, "text", {"kvladder": None}, {"kvladder": {}}, {"others": 1}]
    for given in givens:
        quiet = SimpleNamespace(request_id="r-1", kv_transfer_params=given)
        assert policies().of(quiet) == NO_POLICY
    assert of_blocks(NO_POLICY, 0, 1) is None
    assert of_blocks(policy_of({"ttl_s": 5}), 0) is None


def test_a_pin_is_the_highest_priority_for_a_while() -> None:
    assert of_blocks(policy_of({"pin_s": 60}), 0, 3, 4) == [(100, 60.0)] * 3


def test_a_single_priority_applies_to_generated_blocks_too() -> None:
    assert of_blocks(policy_of({"priority": 70}), 3, 4) == [(70, None)] * 2
    assert of_blocks(policy_of({"decode_priority": 10}), 3, 4) == [(35, None), (10, None)]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ([], "a list (expected keys with values)"),
        ({"priorty": 80}, "priorty: unknown key (did you mean 'priority'?)"),
        ({"priority": 101}, "priority: 101 (expected a priority, 0 to 100"),
        ({"priority": True}, "priority: true (expected a priority, 0 to 100"),
        ({"priority": "80"}, "priority: '80' (expected a priority, 0 to 100"),
        ({"ttl_s": 0}, "ttl_s: 0 (expected seconds, more than 0"),
        ({"ttl_s": float("inf")}, "ttl_s: inf (expected a number)"),
        ({"ttl_s": float("nan")}, "ttl_s: nan (expected a number)"),
        ({"retention": [[0, 4]]}, "retention[0]: 2 values (expected [start, end or null"),
        ({"retention": [[0, 4, 101, None]]}, "retention[0].priority: 101 (expected a priority"),
        ({"retention": [[4, 2, 50, None]]}, "retention[0]: range [4, 2) is empty"),
        ({"retention": [[0, 8, 50, None], [4, 9, 50, None]]}, "retention: ranges [0, 8) and"),
        ({"tiers": {"store": ["nmve"]}}, "tiers.store[0]: 'nmve' (did you mean 'nvme'?)"),
        ({"tiers": {"sotre": []}}, "tiers.sotre: unknown key (did you mean 'store'?)"),
        ({"save": 1}, "save: 1 (expected true or false)"),
        ({"session": ""}, "session: '' (expected a name, 1 to 200 characters"),
        ({"session": 5}, "session: 5 (expected"),
        ({"end_session": True}, "session: missing (end_session needs the session's name)"),
        ({"pin_s": 0}, "pin_s: 0 (expected seconds, more than 0"),
        (
            {"pin_s": 5, "priority": 80},
            "priority: cannot be combined with pin_s (leave one of the two out",
        ),
        ({"prefetch": "a"}, "prefetch: 'a' (expected a list"),
        ({"prefetch": ["a"] * 17}, "prefetch: 17 sessions (expected at most 16)"),
        ({1: 2}, "kvladder: 1 (expected keys that are text)"),
        ({"tiers": {"load": [None]}}, "tiers.load"),
        ({"a\nb": 1}, "a?b: unknown key"),
        ({"x" * 9999: 1}, "unknown"),
    ],
)
def test_wrong_parameters_are_ignored_with_one_warning(
    params: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert policy_of(params) == NO_POLICY
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("request r-1: kv_transfer_params.kvladder")
    assert said in text or len(text) == 400
    assert text.isprintable()


@pytest.mark.parametrize(
    ("step", "priority", "ours"),
    [(10, 0, 35), (10, -3, 65), (10, 2, 15), (10, 99, 0), (1, -99, 100)],
)
def test_vllms_priority_is_mapped_if_enabled(step: int, priority: int, ours: int) -> None:
    mapping = policies(map_priority=step)
    assert of_blocks(mapping.of(request(None, priority=priority)), 0) == [(ours, None)]
    assert of_blocks(mapping.of(request({"priority": 7}, priority=priority)), 0) == [(7, None)]
    assert of_blocks(mapping.of(request({"priority": 0}, priority=priority)), 0) == [(0, None)]
    assert of_blocks(mapping.of(request({"priority": None}, priority=priority)), 0) == [
        (ours, None)
    ]
    assert of_blocks(mapping.of(request({"priority": -7}, priority=priority)), 0) == [(ours, None)]
    assert policies().of(request(None, priority=priority)) == NO_POLICY
