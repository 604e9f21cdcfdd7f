"""Differences of two stacks are named, and those that need a restart are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvladder.changing.differences import compare, identity
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError

HOST: dict[str, Any] = {"type": "host"}
NVME: dict[str, Any] = {"name": "nvme", "type": "files", "path": "/mnt/a", "capacity": "1 GiB"}
COLD: dict[str, Any] = {"name": "cold", "type": "files", "path": "/mnt/b", "capacity": "1 GiB"}
FAR: dict[str, Any] = {
    "name": "far", "type": "redis", "url": "redis://:secret@x", "capacity": "1 GiB",
}  # fmt: skip


def stack(*tiers: dict[str, Any], **sections: Any) -> StackConfig:
    whole = {"arena": {"size": "1 GiB"}, "tiers": [HOST, *tiers], **sections}
    return load_config(whole, env={})


def test_equal_stacks_have_no_differences() -> None:
    assert compare(stack(NVME, FAR), stack(NVME, FAR)) == ([], [], [])


def test_every_difference_is_named() -> None:
    wanted = {**NVME, "capacity": "2 GiB", "when": "commit", "breaker": {"failures": 9}}
    found = compare(
        stack(NVME, COLD, fetch={"deadline": "2s"}),
        stack(
            wanted, FAR, fetch={"deadline": "3s"}, limits={"priority": 80}, quota={"tenant": "5%"}
        ),
    )
    assert [*map(str, found.changes)] == [
        "fetch.deadline: 2 s -> 3 s",
        "limits.priority: 100 -> 80",
        "quota.tenant: none -> 5 %",
        "tiers.nvme.capacity: 1 GiB -> 2 GiB",
        "tiers.nvme.when: evict -> commit",
        "tiers.nvme.breaker.failures: 3 -> 9",
        "tiers.cold: detached",
        "tiers.far: redis, attached below nvme",
    ]
    assert (found.attached, found.detached) == (["far"], ["cold"])


REFUSED: dict[str, tuple[StackConfig, dict[str, Any], str]] = {
    "arena": (stack(NVME), {"arena": {"size": "2 GiB"}}, "arena.size: 1 GiB -> 2 GiB: the"),
    "salt": (stack(NVME), {"block": {"salt": "new"}}, "block.salt: another secret: it is part of"),
    "port": (stack(NVME), {"http": "127.0.0.1:1"}, "http.listen: none -> 127.0.0.1:1: the"),
    "receipts": (
        stack(NVME), {"forget": {"path": "/p", "key": "k" * 16}}, "forget.path: none -> /p: rec"
    ),
    "spans": (stack(NVME), {"otel": True}, "otel.enabled: False -> True: spans"),
    "path": (stack({**NVME, "path": "/x"}), {}, "tiers.nvme.path: /x -> /mnt/a: the tier"),
    "type": (
        stack({**FAR, "name": "nvme"}), {}, "tiers.nvme.type: redis -> files: the tier was opened"
    ),
    "codecs": (
        stack({**NVME, "codecs": ["zstd", "checksum"]}), {}, "tiers.nvme.codecs: other settings"
    ),
    "required": (stack({**NVME, "required": True}), {}, "tiers.nvme.required: True -> False: only"),
    "order": (stack(COLD, NVME), {"cold": COLD}, "tiers: cold, nvme -> nvme, cold: levels"),
    "medium": (stack({**NVME, "name": "old"}), {}, "tiers.nvme.path: old has it: detach"),
    "isolated": (
        stack({**NVME, "isolate": True, "capacity": "2 GiB"}),
        {"isolated": True},
        "tiers.nvme.capacity: 2 GiB -> 1 GiB: a tier of this type cannot be resized",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_what_needs_a_restart_is_refused_with_the_reason(which: str) -> None:
    running, given, says = REFUSED[which]
    more = {**given}
    tiers = [{**NVME, "isolate": True}] if more.pop("isolated", False) else [NVME]
    tiers += [more.pop("cold")] if "cold" in more else []
    with pytest.raises(ConfigError) as refused:
        compare(running, stack(*tiers, **more))
    assert str(refused.value).startswith(f"cannot change while serving: {says}")
    assert "restart the engine with this stack" in str(refused.value)


def test_an_option_of_a_tier_needs_a_restart_though_levels_have_a_setting_of_its_name() -> None:
    with pytest.raises(ConfigError) as refused:
        compare(stack(FAR), stack({**FAR, "quota": {"tenant": "1 GiB"}}))
    assert "tiers.far.quota.tenant: none -> 1 GiB: the tier was opened" in str(refused.value)


def test_all_reasons_are_told_at_once_and_no_secret() -> None:
    other = {**FAR, "url": "redis://:hidden@y"}
    with pytest.raises(ConfigError) as refused:
        compare(stack(FAR), stack(other, block={"salt": "pepper"}, record="/tmp/x"))
    text = str(refused.value)
    assert "block.salt" in text
    assert "record.path" in text
    assert "tiers.far.url" in text
    assert not any(secret in text for secret in ("hidden", "secret@", "pepper"))


def test_a_medium_has_the_same_name_under_another_level() -> None:
    one, other = stack(NVME).levels[0], stack({**NVME, "name": "again"}).levels[0]
    assert identity(one) == identity(other) != identity(stack(COLD).levels[0])
