"""Codecs in a configuration: short and long form, and what each tier can have."""

from __future__ import annotations

import pytest

from kvladder.codecs import finder
from kvladder.config import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.tiers.memory import MemoryTier
from kvladder.tiers.zstd import ZstdCodec, ZstdOptions

LAYOUT = Layout(block_tokens=16, block_bytes=1 << 20, element="bfloat16")


def load(codecs, kind="memory", env=None):
    entry = {"type": kind, "capacity": "1 GiB", "codecs": codecs}
    entry |= {"path": "/mnt/kv"} if kind == "files" else {}
    source = {"arena": {"size": "64 MiB"}, "tiers": [{"type": "host"}, entry]}
    return load_config(source, env=env or {})


def test_names_and_settings():
    (level,) = load(["zstd", "checksum"]).levels
    assert [codec.options for codec in level.codecs] == [ZstdOptions(level=1), None]
    (level,) = load([{"name": "zstd", "level": 5}, "checksum"]).levels
    zstd, _ = level.make_codecs()
    assert isinstance(zstd, ZstdCodec)
    assert zstd.options == ZstdOptions(level=5)


def test_from_the_environment():
    env = {"KVLADDER__TIERS__MEMORY__CODECS": "[{name: zstd, level: 7}, checksum]"}
    (level,) = load(["checksum"], env=env).levels
    assert [str(codec) for codec in level.codecs] == ["zstd (level 7, min_saving 0.05)", "checksum"]


def test_it_says_what_they_do_and_take():
    text = load([{"name": "zstd", "level": 3}, "checksum"]).describe(LAYOUT)
    (line,) = [line for line in text.splitlines() if line.startswith("  codecs")]
    expected = "codecs zstd (level 3, min_saving 0.05), checksum 32 MiB of scratch given"
    assert " ".join(line.split()) == expected


@pytest.mark.parametrize(("codecs", "warned"), [(["zstd"], True), (["zstd", "checksum"], False)])
def test_without_a_checksum_there_is_a_warning(codecs, warned):
    assert bool(load(codecs, "files").warnings) == warned


class WholeTier(MemoryTier):
    checks = True
    notes = False


class BareTier(WholeTier):
    checks = False


@pytest.mark.parametrize(
    ("tier", "codecs", "refused"),
    [
        (WholeTier, ["checksum"], False),
        (WholeTier, ["zstd", "checksum"], True),
        (BareTier, [], False),
        (BareTier, ["checksum"], True),
    ],
)
def test_a_tier_without_notes_stores_blocks_as_they_are(monkeypatch, tier, codecs, refused):
    from kvladder import registry

    monkeypatch.setitem(registry._registered, ("tiers", "whole"), tier)
    if not refused:
        assert len(load(codecs, "whole").levels[0].codecs) == len(codecs)
        return
    with pytest.raises(ConfigError, match="has no effect here"):
        load(codecs, "whole")


def test_codecs_are_found_by_their_ids():
    find = finder(LAYOUT, LAYOUT.namespace())
    assert isinstance(find(ZstdCodec.id), ZstdCodec)
    assert find(ZstdCodec.id) is find(ZstdCodec.id)
    assert find(60000) is None
