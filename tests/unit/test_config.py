"""Configurations: settings read, defaults, and the resulting sizes."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvladder.config import registry
from kvladder.config.settings import GpuConfig
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.policy.eviction import PRIORITY_DEFAULT, PrioritizedLRU
from kvladder.policy.offload import OffloadRule
from kvladder.tiers.label import LABEL_BYTES
from kvladder.tiers.memory import MemoryTier
from kvladder.units import Duration, Share

SMALL = """
arena: {size: 1 GiB}
tiers:
  - {type: host}
  - {name: cold, type: memory, capacity: 4 GiB}
"""
LAYOUT = Layout(block_tokens=16, block_bytes=1 << 20)


def tiers(*below):
    """A mapping with a host level and ``below``."""
    return {"arena": {"size": "1 GiB"}, "tiers": [{"type": "host"}, *below]}


def cold(**settings):
    return {"type": "memory", "capacity": "1 GiB", **settings}


# ---- settings read


def test_missing_settings_have_defaults(load):
    config = load(SMALL)
    assert config.model.fingerprint == "auto"
    assert (config.block.tokens, config.block.salt) == ("auto", "")
    assert config.arena.size_bytes == 1 << 30
    assert config.arena.reserve == Share(percent=5)
    assert (config.fetch.deadline_s, config.fetch.budget) == (2.0, Share(percent=50))
    assert config.events.max == 10_000
    assert (config.host.name, config.host.rule) == ("host", OffloadRule())
    (level,) = config.levels
    assert (level.name, level.capacity_bytes) == ("cold", 4 << 30)
    assert [str(codec) for codec in level.codecs] == ["checksum"]
    assert (level.rule, level.timeout_s) == (OffloadRule(35, "evict", 0, None), 5.0)
    assert (level.breaker.failures, level.breaker.retry_s, level.breaker.retry_max_s) == (3, 5, 60)
    assert config.warnings == ()


def test_a_level_admits_the_default_priority_by_default():
    rule = load_config(tiers(cold()), env={}).host.rule
    assert rule == load_config(tiers(cold()), env={}).levels[0].rule
    assert [rule.admits(floor, hits=0) for floor in (34, PRIORITY_DEFAULT, 36)] == [
        False,
        True,
        True,
    ]


def test_every_setting_is_read(load):
    config = load("""
model: {fingerprint: my-model-v2}
block: {tokens: 32, salt: "a b"}
arena: {size: 2 GiB, reserve: 64}
fetch: {deadline: 500 ms, budget: 10 %}
events: {max: 0}
tiers:
  - {name: ram, type: host, min_priority: 1, min_hits: 2, ttl: 1 h, policy: prioritized-lru}
  - name: cold
    type: files
    path: /mnt/kv
    capacity: 1 GiB
    min_priority: 100
    when: commit
    min_hits: 3
    ttl: 1 d
    policy: prioritized-lru
    codecs: [checksum]
    timeout: 50 ms
    queue: 12
    breaker: {failures: 1, retry: 1 s, retry_max: 2 s}
""")
    assert config.model.fingerprint == "my-model-v2"
    assert (config.block.tokens, config.block.salt) == (32, "a b")
    assert (config.arena.reserve, config.fetch.deadline_s) == (Share(blocks=64), 0.5)
    assert (config.host.name, config.host.rule) == ("ram", OffloadRule(1, "evict", 2, 3600.0))
    (level,) = config.levels
    assert [str(codec) for codec in level.codecs] == ["checksum"]
    assert level.rule == OffloadRule(100, "commit", 3, 86400.0)
    assert (level.timeout_s, level.queue) == (0.05, Share(blocks=12))
    assert (level.breaker.failures, level.breaker.retry_max_s) == (1, 2)


def test_a_level_creates_its_parts(load):
    (level,) = load(SMALL).levels
    assert (level.rule.admit, level.endurance_bytes) == ("all", None)
    assert type(level.make_tier()) is MemoryTier
    assert type(level.make_policy()) is PrioritizedLRU


def test_a_level_that_wears_has_an_admission_and_an_endurance(load):
    text = SMALL.replace("capacity:", "admit: adaptive, endurance: 600 TB, capacity:")
    (level,) = load(text).levels
    assert level.rule == OffloadRule(admit="adaptive")
    assert level.endurance_bytes == 600 * 10**12


def test_a_file_may_hold_anchors_and_merges(load):
    config = load("""
arena: {size: 1 GiB}
tiers:
  - {type: host}
  - &cold {name: a, type: memory, capacity: 1 GiB, min_priority: 7}
  - {<<: *cold, name: b}
""")
    assert [(level.name, level.min_priority) for level in config.levels] == [("a", 7), ("b", 7)]


def test_a_mapping_is_read_and_left_as_it_is():
    source = tiers(cold(breaker={"failures": 2}))
    before = msgspec.json.encode(source)
    overrides = {"arena": {"size": 5 << 20}, "tiers": {"memory": {"min_priority": 3}}}
    config = load_config(source, env={}, overrides=overrides)
    assert (config.arena.size_bytes, config.levels[0].min_priority) == (5 << 20, 3)
    assert msgspec.json.encode(source) == before


@pytest.mark.parametrize(
    "level",
    [
        {"type": "redis", "url": "redis://127.0.0.1:1"},
        {"type": "object", "url": "s3://blocks"},
        {"type": "mooncake", "master": "127.0.0.1:1"},
    ],
)
def test_a_capacity_pays_for_the_labels_of_blocks(level):
    (found,) = load_config(tiers({**level, "capacity": "1 GiB"}), env={}).levels
    assert found.capacity_blocks(LAYOUT) == (1 << 30) // ((1 << 20) + LABEL_BYTES)


# ---- a plug-in's own settings


def test_a_plug_in_gets_its_options(remote):
    entry = {"type": "remote", "capacity": "1 GiB", "url": "tcp://a:1", "linger": "50 ms"}
    (level,) = load_config(tiers(entry), env={}).levels
    assert level.options == remote.Options(url="tcp://a:1", linger_s=Duration(0.05))
    tier = level.make_tier()
    assert isinstance(tier, remote)
    assert tier.options is level.options
    assert level.capacity_blocks(LAYOUT) == (1 << 30) // ((1 << 20) + 4096)


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({}, "tiers[1].url", "missing (expected text)"),
        ({"url": "u", "retires": 3}, "tiers[1].retires", "did you mean 'retries'?"),
        ({"url": "u", "capcity": 3}, "tiers[1].capcity", "did you mean 'capacity'?"),
        ({"url": "u", "linger": "50"}, "tiers[1].linger", "duration with a unit"),
        ({"url": 5}, "tiers[1].url", "5 (expected text: put it in quotes)"),
        ({"url": "u", "retries": 10}, "tiers[1]", "at most 9 retries"),
        ({"url": "nowhere"}, "tiers[1].url", "leads nowhere (somewhere)"),
        ({"url": "u", "password": 1234}, "tiers[1].password", "*** (expected text"),
    ],
)
def test_options_of_a_plug_in_are_checked_too(refusal, remote, settings, path, says):
    error = refusal(tiers({"type": "remote", "capacity": "1 GiB", **settings}))
    assert error.path == path
    assert says in str(error)
    assert "1234" not in str(error)


def test_a_tier_without_options_takes_no_more_keys(refusal):
    error = refusal(tiers(cold(path="/mnt")))
    assert str(error).startswith("tiers[1].path: unknown key (expected one of: name, type")


def test_a_plug_in_may_not_redefine_a_setting_of_all_tiers(refusal, monkeypatch):
    class Late(MemoryTier):
        class Options(msgspec.Struct, frozen=True):
            timeout: int = 3

    monkeypatch.setitem(registry._registered, ("tiers", "late"), Late)
    error = refusal(tiers({"type": "late", "capacity": "1 GiB"}))
    assert error.path == "tiers[1].type"
    assert "Late defines a setting 'timeout', which kvladder already defines" in str(error)


@pytest.mark.parametrize("kind", ["odd", "plain"])
def test_a_registered_class_must_be_of_its_kind(refusal, monkeypatch, kind):
    monkeypatch.setitem(registry._registered, ("tiers", "odd"), dict)
    monkeypatch.setitem(registry._registered, ("policies", "plain"), dict)
    entry = {"odd": {"type": "odd"}, "plain": cold(policy="plain")}[kind]
    assert ": expected a class derived from " in str(refusal(tiers(entry)))


# ---- results


def test_sizes_are_shown_in_blocks_and_tokens(load):
    config = load(SMALL)
    means = {row.path: row.means for row in config.rows(LAYOUT)}
    assert means["arena.size"] == "1024 blocks, 16384 tokens"
    assert means["tiers[0].capacity"] == "1024 blocks, 16384 tokens"
    assert means["tiers[1].capacity"] == "4096 blocks, 65536 tokens"
    assert means["arena.reserve"] == "51 blocks"
    assert means["fetch.budget"] == "512 blocks"
    assert means["tiers[1].queue"] == "256 blocks"
    assert means["tiers[1].timeout"] == ""
    assert {row.means for row in config.rows()} == {""}


def test_the_stack_is_described(load):
    text = load(SMALL).describe(LAYOUT)
    assert text.startswith("stack of 2 levels, hottest first\n1 block = 16 tokens = 1 MiB\n")
    assert "level 1: cold (memory)" in text
    (capacity,) = [line for line in text.splitlines() if "4 GiB" in line]
    expected = "capacity 4 GiB 4096 blocks, 65536 tokens file"
    assert " ".join(capacity.split()) == expected
    assert "warning" not in text


GPU = {
    "memory": ("64 KiB", "64 KiB"),
    "fraction": (0.5, "0.5"),
    "max_tokens": (64, "64"),
    "shares": ([3, 1], "3.0, 1.0"),
    "dtype": ("float16", "float16"),
    "windows": ([4, 0], "4, 0"),
    "reuse": (False, "False"),
    "partial": ("copy", "copy"),
    "rebalance": (True, "True"),
    "events": (10, "10"),
}


def test_every_setting_of_the_pools_is_shown():
    """Other tests cover the effect of each; a new setting must be added here."""
    assert GPU.keys() == {field.encode_name for field in msgspec.structs.fields(GpuConfig)}
    for name, (value, shown) in GPU.items():
        text = load_config({"gpu": {name: value}}, env={}).describe()
        assert re.search(rf"gpu\.{name} +{re.escape(shown)} +given\n", text), name
        assert text.count(" gpu.") == len(GPU)


def test_settings_that_depend_on_others_are_shown_in_words():
    pytest.importorskip("zmq", reason="the extra nixl is not installed")
    entry = {"type": "nixl", "servers": ["10.0.0.7:7470"], "keys": "k", "capacity": "1 GiB"}
    found = {row.path: row.value for row in load_config(tiers(entry), env={}).rows()}
    assert found["tiers[1].required"] == "False"
    assert found["tiers[1].interfaces"] == "all"
    assert found["tiers[1].roster"] == "none"


def test_blocks_on_a_medium_are_checked_unless_checksums_are_disabled():
    entry = {"type": "files", "path": "/mnt/kv", "capacity": "1 GiB"}
    config = load_config(tiers(entry), env={})
    assert [str(codec) for codec in config.levels[0].codecs] == ["checksum"]
    assert config.warnings == ()
    config = load_config(tiers({**entry, "codecs": []}), env={})
    assert len(config.warnings) == 1
    assert "warning: tiers[1].codecs: without checksum" in config.describe()


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (SMALL.replace("1 GiB", "1 MB"), "arena.size", "room for at least one block, 1 MiB"),
        (SMALL.replace("4 GiB", "63 MiB"), "tiers[1].capacity", "at least 64 MiB, 64 blocks"),
        (SMALL + "block: {tokens: 32}", "block.tokens", "expected 16, the engine's number"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(load, text, path, says):
    config = load(text)
    with pytest.raises(ConfigError) as got:
        config.check(LAYOUT)
    assert (got.value.path, says in str(got.value)) == (path, True), str(got.value)


def test_blocks_that_fit_are_accepted(load):
    load(SMALL.replace("4 GiB", "64 MiB") + "block: {tokens: 16}").check(LAYOUT)
