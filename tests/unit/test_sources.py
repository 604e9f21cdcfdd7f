"""Sources of settings: file, environment, engine; secrets and the short form."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.tiers.redis.url import RedisOptions
from kvladder.units import Size

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


# ---- the file itself


def test_an_unreadable_file_is_refused(refusal, tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="expected a readable YAML file") as got:
            load_config(path, env={})
        assert got.value.path == str(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(str(tmp_path / "binary"), env={})


def test_yaml_errors_name_line_and_column(refusal):
    error = refusal("arena:\n  size: [1\ntiers: x\n")
    assert "line 3, column 6" in error.path


def test_yaml_errors_show_nothing_of_the_file(refusal):
    for text in ("block: {salt: *hunter22}", "block: {salt: !hunter22 x}", "salt: 'hunter22"):
        assert "hunter22" not in str(refusal(text))


def test_a_key_given_twice_is_refused(refusal):
    error = refusal("arena:\n  size: 1 GiB\n  size: 2 GiB\n")
    assert "a key is given twice" in str(error)
    assert "line 3, column 3" in error.path


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("2024-13-45", "read as a date: if text is meant, put it in quotes"),
        ("2024-01-13", "read as a date"),
        ("2024-01-13 10:00:00 +99:00", "read as a date"),
        ("0x_", "read as a number"),
        ("9" * 5000, "read as a number"),
        (f"0x{'f' * 5000}", "read as a number"),
        ("!!int ''", "read as a number"),
        ("!!float x", "read as a number"),
        ("!!bool x", "read as bool"),
        ("!!timestamp x", "read as a date"),
        ("[" * 3000, "nested deeper than 16 levels"),
    ],
)
def test_a_value_that_yaml_cannot_build_is_reported_with_its_line(refusal, value, says):
    error = refusal(f"arena: {{size: 1 GiB}}\nmodel:\n  fingerprint: {value}\n")
    assert says in str(error)
    assert "line 3, column " in error.path
    held = refusal(tiers(), env={"KVLADDER__EVENTS__MAX": value})
    assert held.path == "events.max"


def test_a_date_in_quotes_is_text(load):
    text = f"model: {{fingerprint: '2024-01-13'}}\n{SMALL}"
    assert load(text).model.fingerprint == "2024-01-13"
    held = load(SMALL, env={"KVLADDER__MODEL__FINGERPRINT": "2024-13-45"})
    assert held.model.fingerprint == "2024-13-45"


def test_aliases_do_not_multiply_without_end(refusal, load):
    """240 bytes would be a thousand million values."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    for before, name in pairwise("abcdefghi"):
        lines.append(f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]")
    error = refusal("\n".join(lines))
    assert "more than 10000 values, including those that aliases repeat" in str(error)
    assert "line 5, column 4" in error.path
    error = refusal(tiers(), env={"KVLADDER__EVENTS__MAX": "{" + ", ".join(lines) + "}"})
    assert error.path == "events.max"
    small = load(f"model: &m {{fingerprint: x}}\n{SMALL}".replace("4 GiB", "&c 4 GiB"))
    assert small.model.fingerprint == "x"


def test_an_error_names_its_file_or_the_variable(refusal, tmp_path):
    file = str(tmp_path / "stack.yaml")
    for text, path in (
        (SMALL.replace("capacity", "capasity"), "tiers[1].capasity"),
        (SMALL.replace("4 GiB", "'${NOT_SET}'"), "tiers[1].capacity"),
        (f"arenas: {{}}\n{SMALL}", "arenas"),
    ):
        error = refusal(text)
        assert (error.file, error.path) == (file, path)
        assert str(error).startswith(f"{file}: {path}: ")
    error = refusal(SMALL, env={"KVLADDER__ARENA__SIZE": "many"})
    assert str(error).startswith("arena.size: 'many' (")
    assert str(error).endswith("; set by KVLADDER__ARENA__SIZE)")
    assert refusal(tiers(cold(capacity="many"))).file == ""
    assert refusal(SMALL, overrides={"arena": {"size": "many"}}).file == ""
    assert refusal("arena:\n  size: [1\ntiers: x\n").file == "", "its path names it"


def test_an_error_is_short_for_every_mistake(refusal):
    long = "x" * 5000
    for source in (
        tiers(cold(capacity=long)),
        tiers(cold(**{long: 1})),
        tiers({"type": long}),
        tiers({"type": "memory", "name": f"{long}!"}),
        {long: 1},
        {**tiers(), "events": {"max": [long] * 100}},
        {**tiers(), "block": {"tokens": long}},
        {**tiers(), "fetch": {"deadline": f"1 {long}"}},
    ):
        error = refusal(source)
        assert len(str(error)) < 1200, error.path[:50]
        assert "..." in str(error) or "a list" in str(error)


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
def test_a_missing_variable_is_refused(refusal, salt, says):
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
    config = load(text, env=env, overrides={"block": {"tokens": 3}, "fetch": {}})
    assert (config.block.tokens, config.arena.size_bytes, config.events.max) == (3, 2 << 30, 5)
    assert config.fetch.deadline_s == 1, "an empty section replaces nothing"
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


@pytest.mark.parametrize("text", ["true", "yes", "1"])
def test_text_counts_as_a_boolean_only_in_variables(refusal, tmp_path, text):
    files = {"name": "f", "type": "files", "path": str(tmp_path), "capacity": "1 GiB"}
    config = load_config(tiers(files), env={"KVLADDER__TIERS__F__DIRECT": text})
    assert config.levels[0].options.direct is True
    config = load_config(tiers({**files, "direct": "${D}"}), env={"D": text})
    assert config.levels[0].options.direct is True
    error = refusal(tiers({**files, "direct": text}))
    assert (error.path, error.message) == ("tiers[1].direct", repr(text))


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
        ("KVLADDER__ARENA", "1", "arena", "1 (expected keys with values; set by KVLADDER__ARENA)"),
        ("KVLADDER__ARENA__SIZE__X", "1", "arena.size", "a mapping (expected a size"),
        ("KVLADDER__EVENTS__MAX", "[1", "events.max", "'[1' (expected a whole number, 0 or more"),
        ("KVLADDER__TIERS__COLD__QUEUE", "0", "tiers[1].queue", "expected more than 0; set by"),
    ],
)
def test_a_wrong_variable_is_named(refusal, name, value, path, says):
    error = refusal(SMALL, env={name: value})
    assert (error.path, says in str(error)) == (path, True), str(error)


def test_a_missing_tier_named_by_the_engine_is_refused(refusal):
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


def test_no_secret_is_in_the_repr_of_settings(remote):
    entry = {
        "type": "remote",
        "capacity": "1 GiB",
        "url": "redis://me:hunter22@cache",
        "password": "hunter22",
    }
    config = load_config({**tiers(entry), "block": {"salt": "hunter22"}}, env={})
    options = RedisOptions(url="redis://me:hunter22@cache", sentinel_password="", ttls={})
    named = RedisOptions(url="redis://cache", username="me", password="hunter22")
    for thing in (config, config.levels[0], config.block, config.source, options, named):
        assert "hunter22" not in repr(thing)
    assert "hunter22" not in repr([options.parsed, named.parsed])
    assert "hunter22" not in str([*named.__rich_repr__()])
    assert "redis://***@cache" in repr(options)
    assert repr(config.block) == "BlockConfig(tokens='auto', size_bytes=None, salt='***')"


def test_errors_do_not_show_the_user_in_a_url(refusal):
    error = refusal(tiers(cold(when="redis://me:hunter22@cache")))
    assert "hunter22" not in str(error)
    assert "redis://***@cache" in str(error)


def test_a_secret_in_a_url_may_have_spaces(remote):
    for url in ("redis://me:hunter22 @cache", "x://cache?password=a hunter22&db=0"):
        entry = {"type": "remote", "capacity": "1 GiB", "url": url}
        shown = load_config(tiers(entry), env={}).describe(LAYOUT)
        assert "hunter22" not in shown
        assert "cache" in shown


class Login(msgspec.Struct, frozen=True):
    user: str = "me"
    phrase: str = "hunter22"


class Nest(msgspec.Struct, frozen=True):
    token: str = "hunter22"
    size: Size = Size(1 << 20)


class NestedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a plug-in with secrets at all depths."""

    headers: dict[str, Any] = {}
    nests: tuple[Nest, ...] = (Nest(),)
    credentials: Login = Login()
    servers: tuple[str, ...] = ("x://me:hunter22@first", "x://me:hunter22@second")


def test_secrets_within_options_are_not_shown(remote, monkeypatch):
    monkeypatch.setattr(remote, "Options", NestedOptions)
    headers = {"x-auth-token": "hunter22", "deep": [{"secret": "hunter22", "plain": "kept"}]}
    entry = {"type": "remote", "capacity": "1 GiB", "headers": headers}
    config = load_config(tiers(entry), env={})
    assert "hunter22" not in config.describe(LAYOUT)
    values = {row.path.removeprefix("tiers[1]."): row.value for row in config.rows()}
    assert values["headers"] == (
        "{'x-auth-token': '***', 'deep': [{'secret': '***', 'plain': 'kept'}]}"
    )
    assert values["credentials"] == "***"
    assert values["servers"] == "x://***@first, x://***@second"
    assert "1048576" in values["nests"]


# ---- the control socket's short form


@pytest.mark.parametrize("env", [{}, {"KVLADDER__CONTROL": "/run/whole.sock"}])
def test_a_control_path_given_alone_can_be_overridden(env):
    short = {"host": "1 GiB", "control": "/run/file.sock"}
    env = {**env, "KVLADDER__CONTROL__PATH": "/run/env.sock"}
    found = load_config(short, env=env)
    assert found.control.path == "/run/env.sock"
    origins = {row.path: row.origin for row in found.rows()}
    assert origins["control.path"] == "environment: KVLADDER__CONTROL__PATH"
    for engine in ("/run/engine.sock", {"path": "/run/engine.sock"}):
        last = load_config(short, env=env, overrides={"control": engine})
        assert last.control.path == "/run/engine.sock"
        assert {row.path: row.origin for row in last.rows()}["control.path"] == "engine"


# ---- the short form


@pytest.fixture
def statvfs(monkeypatch):
    """A file system with 1000 free blocks of 4 KiB."""

    class Info:
        f_bavail = 1000
        f_frsize = 4096

    monkeypatch.setattr("kvladder.tiers.files.disk.os.statvfs", lambda path: Info)


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


def test_the_default_capacity_counts_stored_bytes_as_room(statvfs, tmp_path):
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
        ({"host": "1 GiB", "capacity": "1 GiB"}, "capacity", "it needs files:, too"),
        ({"host": "1 GiB", "arena": {}}, "arena", "the short form and the long form are mixed"),
        ({"host": "1 GiB", "filse": "/x"}, "filse", "did you mean 'files'?"),
    ],
)
def test_a_wrong_short_form_is_refused(refusal, source, path, says):
    error = refusal(source)
    assert (error.path, says in str(error)) == (path, True), str(error)


def test_a_failing_file_system_is_reported(refusal, monkeypatch):
    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvladder.tiers.files.disk.os.statvfs", fails)
    error = refusal({"host": "1 GiB", "files": "/mnt"})
    assert (error.path, error.message) == ("files", "/mnt: Input/output error")
