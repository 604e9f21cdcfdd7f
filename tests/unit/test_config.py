"""Configurations: what is read, what is filled in, what is refused and how that is said."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from kvladder import registry
from kvladder.config import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.offload import OffloadRule
from kvladder.tiers.codecs import ChecksumCodec
from kvladder.tiers.memory import MemoryTier
from kvladder.units import Duration, Share

SMALL = """
arena: {size: 1 GiB}
tiers:
  - {type: host}
  - {name: cold, type: memory, capacity: 4 GiB}
"""
LAYOUT = Layout(block_tokens=16, block_bytes=1 << 20)


@pytest.fixture
def load(tmp_path):
    """Load a YAML text as a file, in an empty environment."""

    def loading(text, *, env=None, overrides=None):
        path = tmp_path / "stack.yaml"
        path.write_text(text)
        return load_config(path, env=env or {}, overrides=overrides)

    return loading


@pytest.fixture
def refusal(load):
    """The error that a YAML text, or a mapping, gives."""

    def refusing(source, **arguments):
        read = load if isinstance(source, str) else load_config
        with pytest.raises(ConfigError) as got:
            read(source, **{"env": {}, **arguments})
        return got.value

    return refusing


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options as a plug-in declares them."""

    url: str
    retries: int = 2
    linger_s: Duration = msgspec.field(name="linger", default=Duration(1))
    password: str = ""

    def __post_init__(self):
        if self.retries > 9:
            raise ValueError("at most 9 retries")


class Remote(MemoryTier):
    """A third party's tier with settings of its own."""

    Options: ClassVar = RemoteOptions
    batch_max = 8
    overhead_bytes = 4096

    def __init__(self, options):
        super().__init__()
        self.options = options


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setitem(registry._registered, ("tiers", "remote"), Remote)


def tiers(*below):
    """A mapping with a host level and ``below``."""
    return {"arena": {"size": "1 GiB"}, "tiers": [{"type": "host"}, *below]}


def cold(**settings):
    return {"type": "memory", "capacity": "1 GiB", **settings}


# ---- what is read


def test_what_is_not_said_has_a_default(load):
    config = load(SMALL)
    assert config.model.fingerprint == "auto"
    assert (config.block.tokens, config.block.salt) == ("auto", "")
    assert config.arena.size_bytes == 1 << 30
    assert config.arena.reserve == Share(percent=5)
    assert (config.fetch.deadline_s, config.fetch.budget) == (2.0, Share(percent=50))
    assert config.events.max == 10_000
    assert (config.host.name, config.host.rule) == ("host", OffloadRule())
    (level,) = config.levels
    assert (level.name, level.capacity_bytes, level.codecs) == ("cold", 4 << 30, ("checksum",))
    assert (level.rule, level.timeout_s) == (OffloadRule(0, "evict", 0, None), 5.0)
    assert (level.breaker.failures, level.breaker.retry_s, level.breaker.retry_max_s) == (3, 5, 60)
    assert config.warnings == ()


def test_everything_that_may_be_said(load):
    config = load("""
model: {fingerprint: my-model-v2}
block: {tokens: 32, salt: "a b"}
arena: {size: 2 GiB, reserve: 64}
fetch: {deadline: 500 ms, budget: 10 %}
events: {max: 0}
tiers:
  - {name: ram, type: host, min_priority: 1, min_hits: 2, ttl: 1 h, policy: prioritized-lru}
  - name: cold
    type: memory
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
    assert level.rule == OffloadRule(100, "commit", 3, 86400.0)
    assert (level.timeout_s, level.queue) == (0.05, Share(blocks=12))
    assert (level.breaker.failures, level.breaker.retry_max_s) == (1, 2)


def test_the_parts_of_a_level_are_made_from_it(load):
    (level,) = load(SMALL).levels
    assert type(level.make_tier()) is MemoryTier
    assert type(level.make_policy()) is PrioritizedLRU
    assert [type(codec) for codec in level.make_codecs()] == [ChecksumCodec]


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
    source = tiers(cold(codecs=["checksum"]))
    before = msgspec.json.encode(source)
    overrides = {"arena": {"size": 5 << 20}, "tiers": {"memory": {"min_priority": 3}}}
    config = load_config(source, env={}, overrides=overrides)
    assert (config.arena.size_bytes, config.levels[0].min_priority) == (5 << 20, 3)
    assert msgspec.json.encode(source) == before


# ---- a plug-in's own settings


def test_a_plug_in_gets_its_options(remote):
    entry = {"type": "remote", "capacity": "1 GiB", "url": "tcp://a:1", "linger": "50 ms"}
    (level,) = load_config(tiers(entry), env={}).levels
    assert level.options == RemoteOptions(url="tcp://a:1", linger_s=Duration(0.05))
    tier = level.make_tier()
    assert isinstance(tier, Remote)
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
        ({"url": "u", "password": 1234}, "tiers[1].password", "*** (expected text"),
    ],
)
def test_a_plug_ins_options_are_checked_alike(refusal, remote, settings, path, says):
    error = refusal(tiers({"type": "remote", "capacity": "1 GiB", **settings}))
    assert error.path == path
    assert says in str(error)
    assert "1234" not in str(error)


def test_a_tier_without_options_takes_no_more_keys(refusal):
    error = refusal(tiers(cold(path="/mnt")))
    assert str(error).startswith("tiers[1].path: unknown key (expected one of: name, type")


@pytest.mark.parametrize("kind", ["odd", "plain"])
def test_what_is_registered_must_be_of_its_kind(refusal, monkeypatch, kind):
    monkeypatch.setitem(registry._registered, ("tiers", "odd"), dict)
    monkeypatch.setitem(registry._registered, ("policies", "plain"), dict)
    entry = {"odd": {"type": "odd"}, "plain": cold(policy="plain")}[kind]
    assert "is not a" in str(refusal(tiers(entry)))


# ---- what is refused, where that is said to be, and what is said


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("", "", "the configuration is empty"),
        ("- a", "", "the configuration is not a mapping"),
        ("arena: {size: 1 GiB}", "tiers", "missing (expected a list of tiers"),
        ("tiers: [{type: host}]", "arena.size", "missing (expected a size such as '8 GiB'"),
        ("arena:\ntiers: [{type: host}]", "arena.size", "missing"),
        ("arena: 5\ntiers: [{type: host}]", "arena", "a single value (int)"),
        ("arena: []\ntiers: [{type: host}]", "arena", "a list (expected keys with values)"),
        ("arena: {size: 1 GiB}\ntiers: []", "tiers", "an empty list"),
        ("arena: {size: 1 GiB}\ntiers: {a: 1}", "tiers", "a mapping (expected a list"),
        ("arena: {size: 1 GiB}\ntiers: [x]", "tiers[0]", "a single value (str)"),
        ("arena: {size: 1 GiB}\ntiers: [{name: a}]", "tiers[0].type", "missing (expected one of:"),
        ("arena: {size: 1 GiB}\ntiers: [{type: 5}]", "tiers[0].type", "5 (expected one of:"),
        ("arenas: {size: 1 GiB}\ntiers: []", "arenas", "unknown key (did you mean 'arena'?)"),
        ("gpu: {policy: x}\narena: {size: 1 GiB}", "gpu", "unknown key (expected one of: model"),
        ("1: 2", "", "key 1 is not text"),
    ],
)
def test_a_file_of_the_wrong_shape(refusal, text, path, says):
    error = refusal(text)
    assert (error.path, says in str(error)) == (path, True), str(error)


@pytest.mark.parametrize(
    ("changed", "path", "says"),
    [
        ({"arena": {"size": "8 GiBs"}}, "arena.size", "'8 GiBs' (unknown unit 'GiBs': one of KiB"),
        ({"arena": {"size": "-1 GiB"}}, "arena.size", "'-1 GiB' (expected a size such as"),
        ({"arena": {"size": 0}}, "arena.size", "0 (expected a size such as"),
        ({"arena": {"size": -5}}, "arena.size", "-5 (expected a size"),
        ({"arena": {"size": None}}, "arena.size", "None (expected a size"),
        ({"arena": {"size": ["1 GiB"]}}, "arena.size", "a list (expected a size"),
        ({"arena": {"reserve": "101 %"}}, "arena.reserve", "'101 %' (expected a number of blocks"),
        ({"arena": {"sise": 1}}, "arena.sise", "unknown key (did you mean 'size'?)"),
        ({"block": {"tokens": 0}}, "block.tokens", "0 (expected a whole number, 1 or more or"),
        ({"block": {"tokens": "many"}}, "block.tokens", "'many' (expected a whole number"),
        ({"block": {"tokens": True}}, "block.tokens", "True (expected"),
        ({"block": {"salt": 12345678}}, "block.salt", "*** (expected text: put it in quotes)"),
        ({"block": {"salt": True}}, "block.salt", "*** (expected text: put it in quotes)"),
        ({"block": {"salt": None}}, "block.salt", "*** (expected text)"),
        ({"block": {"salt": ["x"]}}, "block.salt", "a list (expected text)"),
        ({"model": {"fingerprint": 1.5}}, "model.fingerprint", "1.5 (expected text: put it in"),
        ({"fetch": {"deadline": 2}}, "fetch.deadline", "2 (expected a duration with a unit"),
        ({"fetch": {"deadline": "2 w"}}, "fetch.deadline", "(unknown unit 'w': one of us, ms"),
        ({"fetch": {"budget": 0}}, "fetch.budget", "0 blocks (expected more than 0)"),
        ({"events": {"max": -1}}, "events.max", "-1 (expected a whole number, 0 or more)"),
    ],
)
def test_a_wrong_setting(refusal, changed, path, says):
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
        ({"when": "comit"}, ".when", "'evict' or 'commit', did you mean 'commit'?"),
        ({"min_hits": -1}, ".min_hits", "-1 (expected a whole number, 0 or more)"),
        ({"ttl": "0 s"}, ".ttl", "'0 s' (expected a duration"),
        ({"capacity": "1 XB"}, ".capacity", "unknown unit 'XB'"),
        ({"capacity": 0}, ".capacity", "0 (expected a size"),
        ({"capasity": "1 GiB"}, ".capasity", "unknown key (did you mean 'capacity'?)"),
        ({"policy": "prioritised-lru"}, ".policy", "did you mean 'prioritized-lru'?"),
        ({"codecs": ["checksums"]}, ".codecs[0]", "did you mean 'checksum'?"),
        ({"codecs": ["checksum", "checksum"]}, ".codecs[1]", "'checksum' twice"),
        ({"codecs": "checksum"}, ".codecs", "'checksum' (expected array)"),
        ({"codecs": ["checksum", 5]}, ".codecs[1]", "a list (expected str)"),
        ({"timeout": "fast"}, ".timeout", "'fast' (expected a duration"),
        ({"queue": "0 %"}, ".queue", "0 % (expected more than 0)"),
        ({"breaker": {"failures": 0}}, ".breaker.failures", "0 (expected a whole number, 1"),
        ({"breaker": {"retry": "2 m"}}, ".breaker.retry_max", "expected at least breaker.retry"),
        ({"breaker": {"retri": 1}}, ".breaker.retri", "did you mean 'retry'?"),
        ({"breaker": [1]}, ".breaker", "a list (expected keys with values)"),
        ({"name": "host"}, ".name", "'host' is the name of tiers[0]"),
        ({"name": "arena"}, ".name", "'arena' is taken"),
        ({"name": "a b"}, ".name", "'a b' (expected letters, digits, - and _"),
        ({"name": 5}, ".name", "5 (expected letters"),
        ({"type": "memroy"}, ".type", "unknown tier type 'memroy' (did you mean 'memory'?)"),
        ({"type": "host"}, ".type", "a second host level"),
    ],
)
def test_a_wrong_level(refusal, settings, path, says):
    error = refusal(tiers(cold(**settings)))
    assert (error.path, says in str(error)) == (f"tiers[1]{path}", True), str(error)


def test_a_level_needs_a_capacity(refusal):
    error = refusal(tiers({"type": "memory"}))
    assert str(error).startswith("tiers[1].capacity: missing (expected a size")


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({"capacity": "1 GiB"}, "capacity", "set arena.size"),
        ({"codecs": ["checksum"]}, "codecs", "the host level has none"),
        ({"when": "commit"}, "when", "the host level has none"),
        ({"breaker": {}}, "breaker", "the host level has none"),
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
    assert (error.path, error.message) == ("tiers[0].type", "'memory', not host")
    source = {"arena": {"size": "1 GiB"}, "tiers": [{"type": "hots"}]}
    assert "did you mean 'host'?" in str(refusal(source))


def test_two_tiers_of_one_type_need_names(refusal):
    error = refusal(tiers(cold(), cold()))
    assert error.path == "tiers[2].name"
    assert "'memory' is the name of tiers[1] (give each tier a name of its own)" in str(error)


# ---- the file itself


def test_a_file_that_cannot_be_read(refusal, tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="expected a readable YAML file") as got:
            load_config(path, env={})
        assert got.value.path == str(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(str(tmp_path / "binary"), env={})


def test_wrong_yaml_is_said_with_line_and_column(refusal):
    error = refusal("arena:\n  size: [1\ntiers: x\n")
    assert "line 3, column 6" in error.path


def test_yaml_errors_show_nothing_of_the_file(refusal):
    for text in ("block: {salt: *hunter22}", "block: {salt: !hunter22 x}", "salt: 'hunter22"):
        assert "hunter22" not in str(refusal(text))


def test_a_key_given_twice_is_refused(refusal):
    error = refusal("arena:\n  size: 1 GiB\n  size: 2 GiB\n")
    assert "a key is given twice" in str(error)
    assert "line 3, column 3" in error.path


def test_a_file_without_end_is_refused(refusal):
    assert "recursive" in str(refusal("arena: &a [*a]"))
    assert "nested deeper than 16 levels" in str(refusal("[" * 20 + "]" * 20))


# ---- the environment


def test_variables_are_filled_in(load):
    text = SMALL + 'block: {tokens: "${TOKENS}", salt: "${SALT:-none}-${TAIL:-x}"}'
    config = load(text, env={"TOKENS": "32", "TAIL": "y"})
    assert (config.block.tokens, config.block.salt) == (32, "none-y")
    config = load(text, env={"TOKENS": "auto", "SALT": "", "TAIL": "${TOKENS}"})
    assert (config.block.tokens, config.block.salt) == ("auto", "none-${TOKENS}")


def test_a_plain_dollar_stays(load):
    assert load(SMALL + 'block: {salt: "$5 $${x}"}').block.salt == "$5 ${x}"


@pytest.mark.parametrize(
    ("salt", "says"),
    [
        ("${NAME}", "environment variable NAME is not set (set it, or give a default: ${NAME:-..."),
        ("${NAME", "'${' without a name and '}'"),
        ("${}", "'${' without a name and '}'"),
        ("${1A}", "'${' without a name and '}'"),
    ],
)
def test_a_variable_that_is_not_there(refusal, salt, says):
    error = refusal(SMALL + f'block: {{salt: "{salt}"}}')
    assert (error.path, says in str(error)) == ("block.salt", True), str(error)


def test_the_environment_is_above_the_file_and_the_engine_above_both(load):
    text = SMALL + "block: {tokens: 1}\nfetch: {deadline: 1 s}\n"
    env = {
        "KVLADDER__ARENA__SIZE": "2GiB",
        "KVLADDER__BLOCK__TOKENS": "2",
        "KVLADDER__TIERS__COLD__CAPACITY": "6 GiB",
        "KVLADDER__TIERS__COLD__BREAKER__RETRY": "3 s",
        "KVLADDER__TIERS__COLD__CODECS": "[]",
        "KVLADDER__EVENTS__MAX": "5",
        "KVLADDER_SALT": "not a setting",
    }
    config = load(text, env=env, overrides={"block": {"tokens": 3}})
    assert (config.block.tokens, config.arena.size_bytes, config.events.max) == (3, 2 << 30, 5)
    (level,) = config.levels
    assert (level.capacity_bytes, level.breaker.retry_s, level.codecs) == (6 << 30, 3, ())
    origins = {row.path: row.origin for row in config.rows()}
    assert origins["block.tokens"] == "engine"
    assert origins["arena.size"] == "environment: KVLADDER__ARENA__SIZE"
    assert origins["fetch.deadline"] == "file"
    assert origins["tiers[1].breaker.retry"] == (
        "environment: KVLADDER__TIERS__COLD__BREAKER__RETRY"
    )
    assert origins["tiers[1].timeout"] == "default"


def test_a_tier_is_named_in_the_environment_without_regard_to_case_and_dashes():
    env = {"KVLADDER__TIERS__FAR_COLD__MIN_PRIORITY": "9"}
    config = load_config(tiers(cold(name="Far-Cold")), env=env)
    assert config.levels[0].min_priority == 9


@pytest.mark.parametrize(
    ("name", "value", "path", "says"),
    [
        ("KVLADDER__ARENA__SIZE", "x", "arena.size", "set by KVLADDER__ARENA__SIZE)"),
        ("KVLADDER__ARENA__SZE", "1", "arena.sze", "did you mean 'size'?; set by KVLADDER__ARENA"),
        ("KVLADDER__TIERS__COLT__TTL", "1 d", "KVLADDER__TIERS__COLT__TTL", "did you mean 'cold'"),
        ("KVLADDER__ARENA__", "1", "KVLADDER__ARENA__", "names no setting"),
        ("KVLADDER__ARENA", "1", "arena", "a single value (str)"),
        ("KVLADDER__ARENA__SIZE__X", "1", "KVLADDER__ARENA__SIZE__X", "is a single value"),
        ("KVLADDER__TIERS__COLD__QUEUE", "0", "tiers[1].queue", "expected more than 0; set by"),
    ],
)
def test_a_wrong_variable_is_named(refusal, name, value, path, says):
    error = refusal(SMALL, env={name: value})
    assert (error.path, says in str(error)) == (path, True), str(error)


def test_the_engine_may_name_a_tier_that_is_not_there(refusal):
    error = refusal(SMALL, overrides={"tiers": {"colt": {"ttl": "1 d"}}})
    assert (error.path, error.hint) == ("tiers.colt", "did you mean 'cold'?")


# ---- secrets


def test_secrets_are_not_shown(remote):
    entry = {
        "type": "remote",
        "capacity": "1 GiB",
        "url": "redis://me:hunter22@cache:6379/0?token=hunter22",
        "password": "hunter22",
    }
    config = load_config({**tiers(entry), "block": {"salt": "hunter22"}}, env={})
    shown = config.describe(LAYOUT)
    assert "hunter22" not in shown
    assert "redis://***@cache:6379/0?token=***" in shown
    values = {row.path: row.value for row in config.rows()}
    assert (values["block.salt"], values["tiers[1].password"]) == ("***", "***")
    assert values["block.tokens"] == "auto"


def test_errors_do_not_show_the_user_in_a_url(refusal):
    error = refusal(tiers(cold(when="redis://me:hunter22@cache")))
    assert "hunter22" not in str(error)
    assert "redis://***@cache" in str(error)


# ---- the short form


@pytest.fixture
def statvfs(monkeypatch):
    """A file system with 1000 free blocks of 4 KiB."""

    class Info:
        f_bavail = 1000
        f_frsize = 4096

    monkeypatch.setattr("kvladder.sources.os.statvfs", lambda path: Info)


def test_the_short_form_is_a_default_stack(statvfs, tmp_path):
    directory = tmp_path / "kv"
    config = load_config({"host": "4 GiB", "files": str(directory)}, env={})
    assert config.arena.size_bytes == 4 << 30
    (level,) = config.levels
    assert (level.name, level.type, level.when) == ("files", "files", "commit")
    assert level.capacity_bytes == 1000 * 4096 * 8 // 10
    origins = {row.path: row.origin for row in config.rows()}
    assert origins["tiers[1].capacity"] == (
        f"default: 80% of the space on the file system of {directory}"
    )
    assert origins["arena.size"] == origins["tiers[1].path"] == "given"


def test_what_the_directory_holds_counts_as_room(statvfs, tmp_path):
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "one").write_bytes(bytes(1 << 20))
    config = load_config({"host": "4 GiB", "files": str(tmp_path)}, env={})
    held = (tmp_path / "segments" / "one").stat().st_blocks * 512
    assert config.levels[0].capacity_bytes == (1000 * 4096 + held) * 8 // 10


def test_the_short_form_takes_more_settings(tmp_path):
    source = {
        "host": "4 GiB",
        "files": str(tmp_path),
        "capacity": "1 GiB",
        "block": {"salt": "x"},
    }
    env = {"KVLADDER__TIERS__FILES__MIN_PRIORITY": "35"}
    config = load_config(source, env=env)
    assert (config.levels[0].capacity_bytes, config.levels[0].min_priority) == (1 << 30, 35)
    assert config.block.salt == "x"


def test_the_short_form_may_be_host_alone():
    assert load_config({"host": "4 GiB"}, env={}).levels == ()


@pytest.mark.parametrize(
    ("source", "path", "says"),
    [
        ({"host": "4 GiBs"}, "host", "unknown unit 'GiBs'"),
        ({"host": 0}, "host", "0 (expected a size"),
        ({"files": "/x"}, "host", "missing (expected a size"),
        ({"host": "1 GiB", "files": 5}, "files", "5 (expected a directory)"),
        ({"host": "1 GiB", "files": ""}, "files", "'' (expected a directory)"),
        ({"host": "1 GiB", "files": "/x", "capacity": "x"}, "capacity", "'x' (expected a size"),
        ({"host": "1 GiB", "capacity": "1 GiB"}, "capacity", "it goes with files:"),
        ({"host": "1 GiB", "arena": {}}, "arena", "the short form and the long form are mixed"),
        ({"host": "1 GiB", "filse": "/x"}, "filse", "did you mean 'files'?"),
    ],
)
def test_a_wrong_short_form(refusal, source, path, says):
    error = refusal(source)
    assert (error.path, says in str(error)) == (path, True), str(error)


# ---- what it comes to


def test_sizes_are_told_in_blocks_and_tokens(load):
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
    assert text.startswith("stack of 2 levels, hottest first\n1 block = 16 tokens = 1048576 bytes")
    assert "level 1: cold (memory)" in text
    (capacity,) = [line for line in text.splitlines() if "4 GiB" in line]
    expected = "capacity 4 GiB (4294967296 bytes) 4096 blocks, 65536 tokens file"
    assert " ".join(capacity.split()) == expected
    assert "warning" not in text


def test_leaving_out_the_checksum_is_warned_of(load):
    config = load(SMALL.replace("4 GiB}", "4 GiB, codecs: []}"))
    assert len(config.warnings) == 1
    assert "warning: tiers[1].codecs: without checksum" in config.describe()


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (SMALL.replace("1 GiB", "1 MB"), "arena.size", "room for at least one block, 1048576"),
        (SMALL.replace("4 GiB", "63 MiB"), "tiers[1].capacity", "at least 64 MiB, 64 blocks"),
        (SMALL + "block: {tokens: 32}", "block.tokens", "the engine's blocks have 16 tokens"),
    ],
)
def test_blocks_must_fit(load, text, path, says):
    config = load(text)
    with pytest.raises(ConfigError) as got:
        config.check(LAYOUT)
    assert (got.value.path, says in str(got.value)) == (path, True), str(got.value)


def test_what_fits_passes(load):
    load(SMALL.replace("4 GiB", "64 MiB") + "block: {tokens: 16}").check(LAYOUT)
