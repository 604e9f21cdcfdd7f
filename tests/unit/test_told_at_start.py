"""At its start a cache logs its namespace, the blocks found under it, and why none were found."""

from __future__ import annotations

import json
import logging

import pytest

import kvladder


def opened(path, caplog, *, save=True, salt="", **fields):
    """The records of one start; the cache stores five blocks before it ends."""
    layout = kvladder.Layout(block_tokens=4, block_bytes=4096, fields=fields)
    nvme = {"name": "nvme", "type": "files", "path": str(path), "capacity": "32 MiB"}
    nvme["when"] = "commit"
    memory = {"type": "memory", "capacity": "4 MiB"}
    tiers = [{"type": "host"}, memory, nvme]
    source = {"block": {"salt": salt}, "arena": {"size": "1 MiB"}, "tiers": tiers}
    caplog.clear()
    with caplog.at_level(logging.INFO), kvladder.open_cache(source, layout=layout) as cache:
        if save:
            keys = [kvladder.BlockKey(bytes([number]) * 32) for number in range(5)]
            cache.save(keys).commit()
        (record,) = [one for one in caplog.records if "namespace" in one.getMessage()]
        return record, cache.namespace.hex()[:16], cache.describe()


def test_the_start_logs_found_blocks_and_changed_settings(tmp_path, caplog):
    config: dict[str, object] = {"rope_scaling": None, "layers": 2}
    record, first, _ = opened(tmp_path / "kv", caplog, config=json.dumps(config))
    assert record.name == "kvladder"
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"namespace {first}; nvme: no blocks in {tmp_path}/kv/{first}"
    record, again, _ = opened(tmp_path / "kv", caplog, config=json.dumps(config))
    assert again == first
    assert "nvme: 5 blocks (20 KiB) found in" in record.getMessage()
    config["rope_scaling"] = {"factor": 4.0}
    record, other, told = opened(tmp_path / "kv", caplog, config=json.dumps(config))
    says = f"config.rope_scaling changed from null to {{factor: 4.0}} since {first}"
    assert other != first
    assert f"no blocks in {tmp_path}/kv/{other}, beside 1 other namespace, " in record.getMessage()
    assert record.getMessage().endswith(f"; cold: {says}")
    assert record.levelno == logging.WARNING
    assert says in told
    record, _, _ = opened(tmp_path / "kv", caplog, config=json.dumps(config))
    assert record.levelno == logging.INFO
    assert "cold" not in record.getMessage()


def test_a_changed_salt_is_reported_without_its_value(tmp_path, caplog):
    opened(tmp_path, caplog, salt="hunter-one")
    record, _, _ = opened(tmp_path, caplog, salt="hunter-two")
    assert "cold: block.salt changed since " in record.getMessage()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter" not in path.read_bytes(), path


@pytest.mark.slow
def test_an_isolated_tier_logs_changed_settings_too(tmp_path, caplog):
    opened(tmp_path, caplog, model="a")
    layout = kvladder.Layout(block_tokens=4, block_bytes=4096, fields={"model": "b"})
    files = {"type": "files", "path": str(tmp_path), "capacity": "32 MiB", "isolate": True}
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, files]}
    with kvladder.open_cache(source, layout=layout):
        assert "cold: model changed from a to b since " in caplog.text


@pytest.mark.parametrize("tier", [{"type": "memory", "capacity": "2 MiB"}, None])
def test_without_a_durable_level_only_the_namespace_is_logged(tier, caplog):
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, *([tier] if tier else [])]}
    layout = kvladder.Layout(block_tokens=4, block_bytes=4096)
    with caplog.at_level(logging.INFO), kvladder.open_cache(source, layout=layout) as cache:
        assert f"namespace {cache.namespace.hex()[:16]}" in caplog.messages
