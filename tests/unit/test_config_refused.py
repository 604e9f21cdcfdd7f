"""Configurations that are refused: the path and the text of each error."""

from __future__ import annotations

import pytest

from kvladder.config import registry
from kvladder.config.stack import load_config


def tiers(*below):
    """A mapping with a host level and ``below``."""
    return {"arena": {"size": "1 GiB"}, "tiers": [{"type": "host"}, *below]}


def cold(**settings):
    return {"type": "memory", "capacity": "1 GiB", **settings}


# ---- refused settings, with the path and the text of each error


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("", "", "the configuration is empty"),
        ("- a", "", "the configuration is not a mapping"),
        ("arena: {size: 1 GiB}", "tiers", "missing (expected a list of tiers"),
        ("tiers: [{type: host}]", "arena.size", "missing (expected a size such as '8 GiB'"),
        ("arena:\ntiers: [{type: host}]", "arena.size", "missing"),
        ("arena: 5\ntiers: [{type: host}]", "arena", "5 (expected keys with values)"),
        ("arena: []\ntiers: [{type: host}]", "arena", "a list (expected keys with values)"),
        ("arena: {size: 1 GiB}\ntiers: []", "tiers", "an empty list"),
        ("arena: {size: 1 GiB}\ntiers: {a: 1}", "tiers", "a mapping (expected a list"),
        ("arena: {size: 1 GiB}\ntiers: [x]", "tiers[0]", "'x' (expected keys with values)"),
        ("arena: {size: 1 GiB}\ntiers: [{name: a}]", "tiers[0].type", "missing (expected one of:"),
        ("arena: {size: 1 GiB}\ntiers: [{type: null}]", "tiers[0].type", "YAML also reads null"),
        ("arena: {size: 1 GiB}\ntiers: [{type: 5}]", "tiers[0].type", "5 (expected one of:"),
        ("arenas: {size: 1 GiB}\ntiers: []", "arenas", "unknown key (did you mean 'arena'?)"),
        (
            "gpu: {partial: x}\narena: {size: 1 GiB}\ntiers: [{type: host}]",
            "gpu.partial",
            "'x' (expected",
        ),
        ("pool: {}\narena: {size: 1 GiB}", "pool", "unknown key (expected one of: model"),
        ("1: 2", "", "key 1 is not text"),
    ],
)
def test_a_file_of_the_wrong_shape_is_refused(refusal, text, path, says):
    error = refusal(text)
    assert (error.path, says in str(error)) == (path, True), str(error)


@pytest.mark.parametrize("path", ["", "/", ".", "/tmp/a\0b"])
def test_a_control_socket_without_a_name_is_refused(refusal, path):
    for control in (path, {"path": path}):
        error = refusal({**tiers(), "control": control})
        assert error.path == "control.path"
        assert "expected the name of a socket, or leave it out" in str(error)
    if not path:
        error = refusal({**tiers(), "control": "${NOWHERE:-}"})
        assert error.path == "control.path"


@pytest.mark.parametrize("text", ["", " ", "${NOWHERE:-}"])
def test_an_empty_fingerprint_is_refused(refusal, text):
    error = refusal({**tiers(), "model": {"fingerprint": text}})
    assert error.path == "model.fingerprint"
    assert "expected auto, or text that changes whenever the weights change" in str(error)


@pytest.mark.parametrize("text", ["\ud800", "a\udcff"])
def test_settings_that_are_not_utf_8_text_are_refused(refusal, text):
    for path, changed in (
        ("block.salt", {"block": {"salt": text}}),
        ("model.fingerprint", {"model": {"fingerprint": text}}),
        ("tiers[1].path", tiers({"type": "files", "path": text, "capacity": "1 GiB"})),
    ):
        error = refusal({**tiers(), **changed})
        assert (error.path, error.hint) == (path, "expected UTF-8 text")
        assert str(error).isascii(), "it can be printed"
    for env in ({"KVLADDER__MODEL__FINGERPRINT": text}, {"NAME": text}):
        error = refusal({**tiers(), "model": {"fingerprint": "${NAME:-x}"}}, env=env)
        assert error.path in {"KVLADDER__MODEL__FINGERPRINT", "model.fingerprint"}
    assert "expected UTF-8 text" in str(refusal({"host": "1 GiB", "files": text}))


@pytest.mark.parametrize("path", ["~", "~/kv"])
def test_a_tilde_in_a_path_is_refused(refusal, path):
    error = refusal(tiers({"type": "files", "path": path, "capacity": "1 GiB"}))
    assert "write ${HOME}, or the whole path" in str(error)
    assert "write ${HOME}" in str(refusal({"host": "1 GiB", "files": path}))


def test_a_null_character_in_a_directory_is_refused(refusal):
    error = refusal(tiers({"type": "files", "path": "/tmp/a\0b", "capacity": "1 GiB"}))
    assert "null character" in str(error)
    assert refusal({"host": "1 GiB", "files": "/tmp/a\0b"}).path == "files"


@pytest.mark.parametrize(
    ("changed", "path", "says"),
    [
        ({"arena": {"size": "8 GiBs"}}, "arena.size", "(unknown unit 'GiBs': expected one of KiB"),
        ({"arena": {"size": "-1 GiB"}}, "arena.size", "'-1 GiB' (expected a size such as"),
        ({"arena": {"size": 0}}, "arena.size", "0 (expected a size such as"),
        ({"arena": {"size": 8}}, "arena.size", "8 (8 bytes without a unit are too few, did you"),
        ({"arena": {"size": -5}}, "arena.size", "-5 (expected a size"),
        ({"arena": {"size": None}}, "arena.size", "missing (expected a size"),
        ({"arena": {"size": ["1 GiB"]}}, "arena.size", "a list (expected a size"),
        ({"arena": {"reserve": "101 %"}}, "arena.reserve", "'101 %' (expected a number of blocks"),
        ({"arena": {"sise": 1}}, "arena.sise", "unknown key (did you mean 'size'?)"),
        ({"block": {"tokens": 0}}, "block.tokens", "0 (expected a whole number, 1 or more or"),
        ({"block": {"tokens": "many"}}, "block.tokens", "'many' (expected a whole number"),
        ({"block": {"tokens": True}}, "block.tokens", "true (expected"),
        ({"block": {"salt": 12345678}}, "block.salt", "*** (expected text: put it in quotes)"),
        ({"block": {"salt": True}}, "block.salt", "*** (expected text: put it in quotes)"),
        ({"block": {"salt": None}}, "block.salt", "*** (expected text)"),
        ({"block": {"salt": ["x"]}}, "block.salt", "a list (expected text)"),
        ({"model": {"fingerprint": 1.5}}, "model.fingerprint", "1.5 (expected text: put it in"),
        ({"fetch": {"deadline": 2}}, "fetch.deadline", "2 (expected a duration with a unit"),
        ({"fetch": {"deadline": "2 w"}}, "fetch.deadline", "(unknown unit 'w': expected one of us"),
        ({"fetch": {"budget": 0}}, "fetch.budget", "0 blocks (expected more than 0)"),
        ({"events": {"max": -1}}, "events.max", "-1 (expected a whole number, 0 or more)"),
    ],
)
def test_a_wrong_setting_is_refused(refusal, changed, path, says):
    error = refusal(tiers(), overrides=changed)
    assert (error.path, says in str(error)) == (path, True), str(error)
    assert "12345678" not in str(error)


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({"min_priority": 101}, ".min_priority", "101 (expected a priority, 0 to 100)"),
        ({"min_priority": -1}, ".min_priority", "-1 (expected a priority, 0 to 100)"),
        ({"min_priority": "high"}, ".min_priority", "'high' (expected a priority, 0 to 100)"),
        ({"min_priority": "35"}, ".min_priority", "'35' (expected a priority, 0 to 100)"),
        ({"when": "comit"}, ".when", "'evict' or 'commit' or 'never', did you mean 'commit'?"),
        ({"when": "never"}, ".when", "evict or commit: only this cache writes to this tier"),
        ({"admit": "some"}, ".admit", "'all' or 'adaptive'"),
        ({"admit": "adaptive", "when": "commit"}, ".admit", "expected all, or when: evict: commit"),
        ({"endurance": "600"}, ".endurance", "600 bytes without a unit are too few"),
        ({"min_hits": -1}, ".min_hits", "-1 (expected a whole number, 0 or more)"),
        ({"ttl": "0 s"}, ".ttl", "'0 s' (expected a duration"),
        ({"capacity": "1 XB"}, ".capacity", "unknown unit 'XB'"),
        ({"capacity": 0}, ".capacity", "0 (expected a size"),
        ({"capasity": "1 GiB"}, ".capasity", "unknown key (did you mean 'capacity'?)"),
        ({"policy": "prioritised-lru"}, ".policy", "did you mean 'prioritized-lru'?"),
        ({"codecs": ["checksums"]}, ".codecs[0].name", "did you mean 'checksum'?"),
        ({"codecs": "checksum"}, ".codecs", "'checksum' (expected a list, each"),
        ({"codecs": "[checksum]"}, ".codecs", "'[checksum]' (expected a list, each"),
        ({"codecs": ["checksum", 5]}, ".codecs[1]", "5 (expected keys with values)"),
        ({"codecs": [{"level": 3}]}, ".codecs[0].name", "missing (expected one of: "),
        ({"codecs": [{"name": "zstd", "leval": 3}]}, ".codecs[0].leval", "did you mean 'level'?"),
        ({"codecs": [{"name": "zstd", "level": 20}]}, ".codecs[0].level", "a level from -7 to 19"),
        ({"codecs": [{"name": "zstd", "allow_lossy": True}]}, ".codecs[0].allow_lossy", "unknown"),
        ({"codecs": ["checksum", "zstd"]}, ".codecs[1]", "put the checksum last"),
        ({"codecs": ["zstd"] * 7}, ".codecs", "7 codecs (expected at most 6)"),
        ({"timeout": "fast"}, ".timeout", "'fast' (expected a duration"),
        ({"queue": "0 %"}, ".queue", "0 % (expected more than 0)"),
        ({"breaker": {"failures": 0}}, ".breaker.failures", "0 (expected a whole number, 1"),
        ({"breaker": {"retry": "2 m"}}, ".breaker.retry_max", "expected at least breaker.retry"),
        ({"breaker": {"retri": 1}}, ".breaker.retri", "did you mean 'retry'?"),
        ({"breaker": [1]}, ".breaker", "a list (expected keys with values)"),
        ({"name": "host"}, ".name", "'host' is already the name of tiers[0]"),
        ({"name": "arena"}, ".name", "'arena' is reserved"),
        ({"name": "a b"}, ".name", "'a b' (expected letters, digits, - and _"),
        ({"name": 5}, ".name", "5 (expected letters"),
        ({"type": "memroy"}, ".type", "unknown tier type 'memroy' (did you mean 'memory'?)"),
        ({"type": "host"}, ".type", "a second host level"),
    ],
)
def test_a_wrong_level_is_refused(refusal, settings, path, says):
    error = refusal(tiers(cold(**settings)))
    assert (error.path, says in str(error)) == (f"tiers[1]{path}", True), str(error)


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        (["checksum", "checksum"], "'checksum' is listed twice (list it once)"),
        (["checksum", "rot13"], "'rot13': expected a class derived from Codec"),
    ],
)
def test_unknown_and_repeated_codecs_are_refused(refusal, monkeypatch, codecs, says):
    monkeypatch.setitem(registry._registered, ("codecs", "rot13"), object)
    entry = {"type": "files", "path": "/mnt/kv", "capacity": "1 GiB", "codecs": codecs}
    error = refusal(tiers(entry))
    assert str(error).startswith("tiers[1].codecs[1]")
    assert str(error).endswith(f": {says}")


def test_a_level_needs_a_capacity(refusal):
    error = refusal(tiers({"type": "memory"}))
    assert str(error).startswith("tiers[1].capacity: missing (expected a size")


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({"capacity": "1 GiB"}, "capacity", "set arena.size"),
        ({"codecs": ["checksum"]}, "codecs", "the host level has no such key"),
        ({"when": "commit"}, "when", "the host level has no such key"),
        ({"breaker": {}}, "breaker", "the host level has no such key"),
        ({"mini_priority": 3}, "mini_priority", "did you mean 'min_priority'?"),
        ({"min_priority": 300}, "min_priority", "0 to 100"),
    ],
)
def test_the_host_level_has_no_setting_without_effect(refusal, settings, path, says):
    source = {"arena": {"size": "1 GiB"}, "tiers": [{"type": "host", **settings}]}
    error = refusal(source)
    assert (error.path, says in str(error)) == (f"tiers[0].{path}", True), str(error)


def test_the_host_level_comes_first(refusal):
    source = {"arena": {"size": "1 GiB"}, "tiers": [cold(), {"type": "host"}]}
    error = refusal(source)
    assert (error.path, error.message) == ("tiers[0].type", "'memory' instead of host")
    source = {"arena": {"size": "1 GiB"}, "tiers": [{"type": "hots"}]}
    assert "did you mean 'host'?" in str(refusal(source))


def test_two_tiers_do_not_share_a_directory(refusal, tmp_path):
    """Each would take the space of the other's blocks for its own."""
    kv, link = tmp_path / "kv", tmp_path / "link"
    link.symlink_to(tmp_path)
    first = {"type": "files", "capacity": "1 GiB", "path": str(kv)}
    for path in (kv, f"{kv}/", link / "kv", tmp_path / "other" / ".." / "kv"):
        error = refusal(tiers(first, {**first, "name": "second", "path": str(path)}))
        assert error.path == "tiers[2].path"
        assert f"'{kv}' is already the path of tiers[1] (give each tier a path of its own)" in str(
            error
        )
    apart = {**first, "name": "second", "path": str(tmp_path / "kv2")}
    assert len(load_config(tiers(first, apart), env={}).levels) == 2


def test_two_tiers_of_one_type_need_names(refusal):
    error = refusal(tiers(cold(), cold()))
    assert error.path == "tiers[2].name"
    assert "'memory' is already the name of tiers[1] (give each tier a name of its own)" in str(
        error
    )
