"""SECURITY.md has every actor, names tests that exist, and states the defaults of the code."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, get_args

import pytest

from kvladder.changing.differences import compare
from kvladder.config.settings import Sections
from kvladder.config.stack import load_config
from kvladder.connectors import listener
from kvladder.errors import ConfigError
from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.receipt import Signer
from kvladder.schema import Address
from kvladder.traces.files import TraceFiles
from tests.deploy.held import missing
from tests.kit.scripts import script
from tests.kit.source import ROOT
from tests.patience import until
from tests.unit.test_receipts import receipt

settings: Any = script("settings")
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ACTORS = [
    "Tenant", "Client of a cache server", "Reader of a disk", "Writer of a disk",
    "Peer on the data network", "Local user", "Client of the HTTP port",
    "Holder of a control token", "Operator",
]  # fmt: skip
MEANS = ["read", "write", "remove", "exhaust", "learn by timing"]
UNTESTED = "not tested"
HTTP = {"listen": "127.0.0.1:9480"}
EXPORT = {"listen": "127.0.0.1:7470"}
FORGET = {"path": "/var/lib/purges"}
OPENS = {"listen", "publish", "replay", "path", "roster", "enabled"}
"""Last parts of the names of settings that open a port, a file or a way out."""
HARMLESS = {"shadow.enabled"}
_TEST = re.compile(r"\bT\d+\b")


def section(text: str, title: str) -> str:
    """Return what is below a heading, up to the next one of its rank or above."""
    level, _, _ = title.partition(" ")
    _, found, rest = text.partition(f"\n{title}\n")
    assert found, title
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of a text's tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [number for number, line in enumerate(lines) if line.startswith("|---")]
    heads = {*rules, *(number - 1 for number in rules)}
    return [one for number, one in enumerate(cells) if number not in heads]


def problems(text: str) -> Iterator[str]:
    """Yield what is wrong with the page."""
    actors = section(text, "## Actors")
    titles = re.findall(r"^### (.*)$", actors, re.MULTILINE)
    if titles != ACTORS:
        yield f"actors: {titles}"
    for title in titles:
        found = rows(section(actors, f"### {title}"))
        if [one for row in found for one in row[0].split(", ")] != MEANS:
            yield f"{title}: expected a row for each of {', '.join(MEANS)}"
        for row in found:
            if not (_TEST.search(row[-1]) or row[-1] == UNTESTED):
                yield f"{title}, {row[0]}: names no test"
    listed = rows(section(text, "## Tests"))
    names = {number: test.strip("`") for number, test in listed}
    yield from missing([f"tests/{test}" for test in names.values()])
    used = {*_TEST.findall(text.partition("\n## Tests\n")[0].partition("\n## Report")[2])}
    yield from (f"{number} is not listed" for number in sorted(used - names.keys()))
    yield from (f"{number} is not used" for number in sorted(names.keys() - used))
    if len(names) != len(listed) or len({*names.values()}) != len(listed):
        yield "a number or a test is listed twice"


def defaults(owner: Any = Sections, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield name, type and default of each setting of the sections, as the pages show them."""
    for name, kind, default, _ in settings.fields(owner):
        if settings.is_struct(kind):
            yield from defaults(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind, settings.shown(default)


def test_every_actor_is_there_and_every_claim_names_a_test_that_exists() -> None:
    assert list(problems(TEXT)) == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("### Local user", "### Local users", "actors: "),
        ("| exhaust | memory", "| remove | memory", "Operator: expected a row for each of"),
        (" T1, T2 |\n| write", " |\n| write", "names no test"),
        ("::test_another_salt_finds_nothing", "::test_gone", "test_gone"),
        ("| T1 | `", "| T999 | `", "T1 is not listed"),
        ("\n## Rotate keys\n", "\nT998\n\n## Rotate keys\n", "T998 is not listed"),
        ("| T1 | `", "| T997 | `deploy/test_chart.py::test_x` |\n| T1 | `", "T997 is not used"),
        ("| T1 | `", "| T2 | `", "listed twice"),
    ],
)
def test_a_wrong_page_is_found(before: str, after: str, says: str) -> None:
    assert TEXT.count(before) >= 1
    assert says in "\n".join(problems(TEXT.replace(before, after)))


def test_the_defaults_of_the_page_are_those_of_the_code() -> None:
    found = {name: default for name, _, default in defaults()}
    said = {
        name.strip("`"): default for name, default, *_ in rows(section(TEXT, "## Secure defaults"))
    }
    assert said == {name: found.get(name) for name in said}
    opening = {name for name in found if name.rpartition(".")[2] in OPENS} - HARMLESS
    assert opening <= said.keys(), "the page lacks a setting that opens something"


def test_nothing_listens_by_default() -> None:
    """No setting that holds an address, or opens a file, has a default that does so."""
    by_type = {name for name, kind, _ in defaults() if Address in (kind, *get_args(kind))}
    assert {"http.listen", "export.listen"} <= by_type
    for name, _, default in defaults():
        if name in by_type or name.rpartition(".")[2] in OPENS:
            assert default in {"none", "`false`"}, name
    config = load_config({"host": "1 MiB"}, env={})
    assert (config.http.listen, config.http.secret, config.control.path) == (None, "", None)
    assert (config.export.listen, config.events.publish, config.events.replay) == (None,) * 3


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"export": {"listen": "0.0.0.0:7470"}}, r"export\.keys: missing"),
        ({"http": "0.0.0.0:9480"}, r"http\.token: missing"),
        ({"http": "[::]:9480"}, r"http\.token: missing"),
        ({"forget": {"path": "/var/lib/purges"}}, r"forget\.key: missing"),
    ],
)
def test_open_ports_need_keys(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config({"host": "1 MiB", **section}, env={})


# ---- claims without a test elsewhere


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"http": {**HTTP, "token": "a" * 16}}, {"http": {**HTTP, "token": "b" * 16}}),
        ({"export": {**EXPORT, "keys": "a"}}, {"export": {**EXPORT, "keys": "b"}}),
        ({"forget": {**FORGET, "key": "a" * 16}}, {"forget": {**FORGET, "key": "b" * 16}}),
        ({"block": {"salt": "a"}}, {"block": {"salt": "b"}}),
        ({}, {"forget": {**FORGET, "key": "a" * 16}}),
        ({}, {"otel": True}),
    ],
)
def test_no_key_changes_in_a_running_cache(before: dict[str, Any], after: dict[str, Any]) -> None:
    running, wanted = (load_config({"host": "1 MiB", **one}, env={}) for one in (before, after))
    with pytest.raises(ConfigError, match="restart the engine with this stack") as refused:
        compare(running, wanted)
    assert "a" * 16 not in str(refused.value)
    assert "b" * 16 not in str(refused.value)


def test_a_socket_between_ranks_is_for_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells both ends the other's user; here this user is taken for another one."""
    served: list[object] = []
    address = listener.abstract(f"user-{os.urandom(8).hex()}")
    lines = listener.LocalListener(address, lambda _, text: pytest.fail(text))
    lines.begin(served.append)
    try:
        with monkeypatch.context() as patch:
            own = os.getuid()
            patch.setattr(os, "getuid", lambda: own + 1)
            with pytest.raises(PermissionError, match="belongs to another user"):
                listener.connect(address)
            with Client(address, "AF_UNIX") as stranger, pytest.raises((EOFError, OSError)):
                stranger.recv_bytes()  # it is disconnected
            assert served == []
        with listener.connect(address):
            until(lambda: len(served) == 1)
    finally:
        lines.close()


def test_receipts_and_recordings_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ledger = PurgeLedger(tmp_path / "purges", Signer("a key of the tests"))
        with closing(ledger):
            ledger.write(receipt())
        trace = TraceFiles(tmp_path / "trace.jsonl", size_bytes=1 << 20, files=2)
        assert trace.write(b"{}\n")
        trace.close()
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in made} >= {"20260102T030405-00c0ffee.json", "trace.jsonl"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE((tmp_path / "purges").stat().st_mode) == 0o700
