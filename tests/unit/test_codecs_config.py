"""Codecs in a configuration: short and long form, and the codecs that each tier accepts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from kvladder.compose import open_cache
from kvladder.config import registry
from kvladder.config.registry import finder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.tiers.codecs.base import Codec
from kvladder.tiers.codecs.zstd import ZstdCodec, ZstdOptions

LAYOUT = Layout(block_tokens=16, block_bytes=1 << 20, element="bfloat16")


def load(codecs, kind="memory", env=None):
    entry = {"type": kind, "capacity": "1 GiB", "codecs": codecs}
    entry |= {"path": "/mnt/kv"} if kind == "files" else {}
    source = {"arena": {"size": "64 MiB"}, "tiers": [{"type": "host"}, entry]}
    return load_config(source, env=env or {})


def test_codecs_are_configured_by_name_and_settings():
    (level,) = load(["zstd", "checksum"]).levels
    assert [codec.options for codec in level.codecs] == [ZstdOptions(level=1), None]
    (level,) = load([{"name": "zstd", "level": 5}, "checksum"]).levels
    zstd, _ = level.make_codecs()
    assert isinstance(zstd, ZstdCodec)
    assert zstd.options == ZstdOptions(level=5)


def test_codecs_are_configured_from_the_environment():
    env = {"KVLADDER__TIERS__MEMORY__CODECS": "[{name: zstd, level: 7}, checksum]"}
    (level,) = load(["checksum"], env=env).levels
    assert [str(codec) for codec in level.codecs] == ["zstd (level 7, min_saving 0.05)", "checksum"]


def test_describe_shows_the_codecs_and_their_scratch():
    text = load([{"name": "zstd", "level": 3}, "checksum"]).describe(LAYOUT)
    (line,) = [line for line in text.splitlines() if line.startswith("  codecs")]
    expected = "codecs zstd (level 3, min_saving 0.05), checksum 32 MiB of scratch given"
    assert " ".join(line.split()) == expected


@pytest.mark.parametrize(("codecs", "warned"), [(["zstd"], True), (["zstd", "checksum"], False)])
def test_without_a_checksum_there_is_a_warning(codecs, warned):
    assert bool(load(codecs, "files").warnings) == warned


def test_codecs_are_found_by_their_ids():
    find = finder(LAYOUT, LAYOUT.namespace())
    assert isinstance(find(ZstdCodec.id), ZstdCodec)
    assert find(ZstdCodec.id) is find(ZstdCodec.id)
    assert find(60000) is None


def test_a_lossy_codec_must_be_allowed():
    with pytest.raises(ConfigError, match="allow_lossy: true") as refused:
        load(["fp8", "checksum"])
    assert refused.value.path == "tiers[1].codecs[0]"
    config = load([{"name": "fp8", "allow_lossy": True}, "zstd", "checksum"])
    assert [codec.name for codec in config.levels[0].codecs] == ["fp8", "zstd", "checksum"]


@pytest.mark.parametrize(
    ("said", "told"),
    [(True, "fp8 for local, state, window"), (["full", "window"], "fp8 for full, window")],
)
def test_describe_shows_the_layers_that_a_lossy_codec_may_change(said, told):
    text = load([{"name": "fp8", "allow_lossy": said}]).describe(LAYOUT)
    (line,) = [line for line in text.splitlines() if line.startswith("  codecs")]
    assert told in line


@pytest.mark.parametrize("said", ["full", ["whole"], [], False])
def test_unknown_layers_are_refused(said):
    with pytest.raises(ConfigError, match="allow_lossy|codecs"):
        load([{"name": "fp8", "allow_lossy": said}])


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        (["zstd", {"name": "fp8", "allow_lossy": True}], "as the engine wrote them"),
        (["aes-gcm", "zstd"], "encrypted data does not shrink"),
    ],
)
def test_a_wrong_order_of_codecs_is_refused(codecs, says):
    with pytest.raises(ConfigError, match=says):
        load(codecs)


def test_stacks_with_different_lossy_codecs_share_no_namespace():
    layout = Layout(16, 8192, {}, "bfloat16", 64)
    spaces = set()
    some, more = (
        [{"name": "fp8", "allow_lossy": kinds}] for kinds in (["full"], ["full", "window"])
    )
    for codecs in (["checksum"], ["zstd"], some, more):
        entry = {"type": "memory", "capacity": "1 MiB", "codecs": codecs}
        source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, entry]}
        with open_cache(source, layout=layout) as cache:
            spaces.add(cache.namespace)
    assert len(spaces) == 3


class VaultOptions(msgspec.Struct, frozen=True, kw_only=True):
    key: str = ""
    where: dict[str, str] = msgspec.field(default_factory=dict)


class Vault(Codec):
    """A third party's codec that loses something and has secrets."""

    name = "vault"
    id = 4999
    lossy = True
    Options = VaultOptions

    def __init__(self, options):
        """Ignore the options."""

    def encode(self, data, target, subject):
        return None

    def decode(self, data, params, target, subject):
        return data


def test_secrets_of_a_codec_are_not_shown_and_separate_its_namespace(monkeypatch):
    monkeypatch.setitem(registry._registered, ("codecs", "vault"), Vault)
    spaces = set()
    for key in ("hunter22", "hunter23"):
        where = {"url": "x://me:hunter22@here", "token": "hunter22"}
        codec = {"name": "vault", "allow_lossy": ["full"], "key": key, "where": where}
        entry = {"type": "memory", "capacity": "1 MiB", "codecs": [codec]}
        source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, entry]}
        with open_cache(source, layout=Layout(16, 8192)) as cache:
            spaces.add(cache.namespace)
            assert "hunter" not in cache.describe()
            assert "vault (key ***, where {'url': 'x://***@here', 'token': '***'})" in (
                cache.describe()
            )
    assert len(spaces) == 2


@pytest.mark.parametrize("key", ["ключ" * 20, "x", "é" * 64])
def test_a_key_with_invalid_characters_is_refused(monkeypatch, key):
    monkeypatch.setenv("KVLADDER_KEY", key)
    assert finder(LAYOUT, LAYOUT.namespace())(4) is None
    with pytest.raises(ConfigError, match="KVLADDER_KEY does not hold a key") as refused:
        open_cache(
            {
                "arena": {"size": "1 MiB"},
                "tiers": [
                    {"type": "host"},
                    {"type": "memory", "capacity": "1 MiB", "codecs": ["aes-gcm"]},
                ],
            },
            layout=Layout(16, 8192),
        )
    assert f" {key} " not in str(refused.value)


class Needy(Vault):
    """One that cannot be made without settings."""

    lossy = False

    class Options(msgspec.Struct):
        must: str


def test_a_codec_that_needs_settings_is_not_found_by_its_id(monkeypatch):
    monkeypatch.setitem(registry._registered, ("codecs", "vault"), Needy)
    assert finder(LAYOUT, LAYOUT.namespace())(Vault.id) is None


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        (["aes-gcm"], "tiers[1].codecs.aes-gcm.variable: KVLADDER_KEY is not set"),
        (
            [{"name": "fp8", "allow_lossy": ["full"]}],
            "tiers[1].codecs: fp8 cannot encode elements of unknown type",
        ),
        (
            [{"name": "fp8", "allow_lossy": True}],
            "tiers[1].codecs.allow_lossy: fp8 is allowed for no kind of layer in this model: full",
        ),
    ],
)
def test_codecs_that_cannot_work_are_refused_at_start(monkeypatch, codecs, says):
    monkeypatch.delenv("KVLADDER_KEY", raising=False)
    entry = {"type": "memory", "capacity": "1 MiB", "codecs": codecs}
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, entry]}
    with pytest.raises(ConfigError) as refused:
        open_cache(source, layout=Layout(16, 8192))
    assert str(refused.value).startswith(says)


def test_a_codec_without_its_key_is_not_found(monkeypatch):
    monkeypatch.delenv("KVLADDER_KEY", raising=False)
    assert finder(LAYOUT, LAYOUT.namespace())(4) is None
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    found = finder(LAYOUT, LAYOUT.namespace())(4)
    assert found is not None
    assert found.name == "aes-gcm"


def test_a_lossy_codec_is_not_found_by_its_id():
    layout = Layout(16, 8192, {}, "bfloat16", 64)
    assert finder(layout, layout.namespace())(3) is None


def test_many_threads_find_the_same_codec():
    for _ in range(20):
        find = finder(LAYOUT, LAYOUT.namespace())
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(find, [ZstdCodec.id] * 8))) == 1
