"""A tier declares itself in its folder, and everything that lists tiers reads that."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvladder import preflight as preflight_module
from kvladder.config import registry
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.preflight import preflight
from kvladder.tiers.memory import MemoryTier
from kvladder.tiers.type import TierType
from tests.test_docs import rows

ROOT = Path(__file__).parents[2]
TYPES = list(registry.BUILT_IN_TIERS.values())
ALONE = """
import sys
from kvladder.config.registry import BUILT_IN_TIERS
makes = {one.make.partition(":")[0] for one in BUILT_IN_TIERS.values()} - {HOST}
libraries = {"obstore", "nixl", "mooncake", "zmq", "aiofiles"}
print(sorted({name for name in sys.modules if name in makes or name.split(".")[0] in libraries}))
""".replace("HOST", repr("kvladder.tiers.ladder.host"))

EXPORT = {
    "kvladder/cli/serve.py", "kvladder/config/settings.py", "kvladder/export/announcing.py",
    "kvladder/export/child.py", "kvladder/export/exporter.py", "kvladder/export/offers.py",
    "kvladder/export/process.py", "kvladder/export/server.py", "kvladder/export/session.py",
    "kvladder/preflight.py",
}  # fmt: skip
"""Export offers this cache's blocks to NIXL tiers, and speaks their protocol."""
MEASURES = "kvladder/measuring/targets.py"
"""The command ``bench`` measures a medium of each type."""
NAMED = {
    "host": {  # each stack has one
        "kvladder/cli/evaluate.py", "kvladder/config/sources.py", MEASURES,
        "kvladder/testing/handlers.py", "kvladder/testing/engines/suite.py",
        "kvladder/testing/engines/hints.py",
    },
    "files": {
        "kvladder/config/sources.py",  # the short form
        "kvladder/cli/plan.py",  # plans a disk
        "kvladder/traces/files.py",  # reaches the disk through the same port
        "kvladder/cli/purge.py",  # overwrites the bytes on disk while no cache runs
        "kvladder/cli/running/verify.py",  # reads the blocks on disk while no cache runs
        "kvladder/cli/receipts.py",  # looks at the bytes on disk while no cache runs
        "connectors/vllm/connector.py",  # vLLM's name for its medium
        "connectors/vllm/identity/fingerprint.py",  # the files of a model
        "kvladder/shadow/start.py",  # the price of a disk
        MEASURES, "kvladder/measuring/run.py",
    },
    "memory": {
        "kvladder/cli/evaluate.py",  # codecs need some tier
        "kvladder/replay/medium.py",  # its tier, with a medium's time
    },
    "redis": {
        "kvladder/testing/redisserver.py",  # the scheme of a URL
        "tiers/nixl/roster.py",  # keeps its list in a Redis
        MEASURES, "kvladder/measuring/run.py", "kvladder/measuring/limits.py",  # its raw protocol
    },
    "nixl": EXPORT | {MEASURES},
    "object": {MEASURES, "kvladder/measuring/run.py", "kvladder/measuring/limits.py"},
}  # fmt: skip
"""Files of the product that name a tier, outside its folder; no others may need a change with it.
"""
OTHERS = (".ci/shape.py", ".ci/drawings.py", ".ci/settings.py", ".ci/support.py", ".ci/top.py")
"""Tools that name rooms, results, types of JSON, columns of a table, and a stack to draw."""
WORDS = {"host", "memory"}
"""Names that are other things, too: they name a type only where they stand for one."""


def test_types_are_read_without_tiers_and_their_libraries():
    command = [sys.executable, "-W", "ignore", "-c", ALONE]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


@pytest.mark.parametrize("declared", TYPES, ids=lambda one: one.name)
def test_a_type_matches_its_tier(declared):
    make = registry.load("tiers", declared.name)
    assert f"{make.__module__}:{make.__name__}" == declared.make
    assert getattr(make, "isolates", False) == declared.isolates
    assert not declared.docs or (ROOT / "docs" / declared.docs).is_file()


@pytest.mark.parametrize("declared", TYPES, ids=lambda one: one.name)
def test_the_libraries_of_a_type_match_its_extra(declared):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"][declared.extra] if declared.extra else []
    own, always = (
        {Requirement(one).name for one in some} for some in (extra, project["dependencies"])
    )
    assert own if declared.extra else not own
    assert set(declared.libraries) == own or set(declared.libraries) <= always
    assert not own.intersection(declared.instead)


def test_every_extra_of_a_tier_is_installed_for_contributors():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (own,) = [Requirement(one).extras for one in extras["dev"] if one.startswith("kvladder[")]
    assert {one.extra for one in TYPES if one.extra} <= own


def test_the_table_of_tiers_matches_the_types():
    told = {
        name: (medium, survives) for name, medium, survives, *_ in rows("README.md", "## Tiers")
    }
    assert told.keys() == {one.name for one in TYPES}
    for one in TYPES:
        medium, survives = told[one.name]
        assert medium.startswith(one.summary)
        assert survives == one.survives
        assert f"](docs/{one.docs})" in medium or not one.docs


def test_the_table_of_extras_has_those_of_tiers():
    extras = {extra for cell, *_ in rows("README.md", "## Install") for extra in cell.split(", ")}
    assert {f"kvladder[{one.extra}]" for one in TYPES if one.extra} <= extras


def test_the_settings_page_lists_all_types_and_the_isolated_ones():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    told = {name: (default, what) for name, default, what in rows_of_settings(page)}
    assert {*re.findall(r"`([a-z]+)`", told["type"][1])} == {one.name for one in TYPES}
    apart = {*re.findall(r"`([a-z]+)`", told["isolate"][0])} - {"true", "false"}
    assert apart == {one.name for one in TYPES if one.isolates}
    assert not [one.name for one in TYPES if one.docs and f"](../{one.docs})" not in page]


def rows_of_settings(page):
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and re.fullmatch(r"`(type|isolate)`", cells[0]):
            yield cells[0].strip("`"), cells[1], cells[2]


@pytest.mark.skipif(not (ROOT / "kvladder").is_dir(), reason="beside a wheel there are no sources")
@pytest.mark.parametrize("declared", TYPES, ids=lambda one: one.name)
def test_only_files_that_must_name_a_tier(declared):
    name, (module, _, made) = declared.name, declared.make.partition(":")
    package, folder = module.rpartition(".")[0], Path(*module.split(".")[1:-1]).as_posix()
    quoted = rf"[\"']type[\"']: [\"']{name}[\"']" if name in WORDS else rf"[\"']{name}[\"']"
    parts = [rf"(?<!cast\(){quoted}"]
    if declared.extra:
        parts.append(rf"kvladder\[{declared.extra}\]")
    if name != "host":  # its folder is the ladder's, which is not its alone
        parts += [rf"\b{re.escape(package)}\b", rf"\b{made}\b"]
    naming = re.compile("|".join(parts))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    product = re.compile(r"(kvladder|connectors|gpu|policy|tiers)/.*\.py|\.ci/.*\.py|\.ci/[a-z]+")
    found = {
        path
        for path in listed.splitlines()
        if product.fullmatch(path)
        and not path.startswith((f"{folder}/", *OTHERS))
        and naming.search((ROOT / path).read_text(encoding="utf-8"))
    }
    assert found == NAMED.get(name, set())


TYPE = TierType(
    name="shelf",
    make="kvladder.tiers.memory.tier:MemoryTier",
    summary="a shelf",
    survives="no",
    extra="shelves",
    package="some-tiers",
)
ABSENT = TYPE._replace(make="no_such_library:Tier")


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a package gives ``shelf`` as a type, and ``absent`` as one without library."""
    points = [
        EntryPoint("shelf", f"{__name__}:TYPE", "kvladder.tiers"),
        EntryPoint("absent", f"{__name__}:ABSENT", "kvladder.tiers"),
    ]
    for point in points:
        vars(point)["dist"] = TYPE._replace(name="some-tiers")
    monkeypatch.setattr(
        registry, "entry_points", lambda *, group: points if group == "kvladder.tiers" else []
    )
    registry._found.cache_clear()
    yield
    registry._found.cache_clear()


def test_another_package_may_give_a_type(installed):
    assert registry.load("tiers", "shelf") is MemoryTier
    assert registry.tier_type("shelf") is TYPE
    with pytest.raises(ConfigError, match=r"'absent' cannot be loaded") as told:
        registry.load("tiers", "absent")
    assert told.value.hint == "install some-tiers[shelves]"
    assert registry.tier_type("nothing") is None


def test_a_process_may_register_a_type(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("tiers", "mine", TYPE)
    assert registry.load("tiers", "mine") is MemoryTier
    assert registry.tier_type("mine") is TYPE


def below(**level):
    tiers = [{"type": "host"}, {"capacity": "1 MiB", **level}]
    return load_config({"arena": {"size": "1 MiB"}, "tiers": tiers}, env={})


def test_the_libraries_of_another_packages_tier_are_checked(installed, monkeypatch):
    wanted = {"some-tiers": ["absent-library>=1; extra == 'shelves'"]}
    monkeypatch.setattr(preflight_module, "requires", lambda name: wanted.get(name, []))
    there = {"kvladder": "1", "some-tiers": "2"}

    def version(name):
        if name in there:
            return there[name]
        raise PackageNotFoundError(name)

    monkeypatch.setattr(preflight_module, "version", version)
    found = preflight(below(type="shelf"))
    (error,) = found.errors
    assert (error.path, error.hint) == ("absent-library", "install some-tiers[shelves]")
    assert found.facts["libraries"] == there


def test_a_library_may_be_replaced_by_hand(monkeypatch):
    mooncake = below(type="mooncake", master="127.0.0.1:1")
    (library,), (twin,) = (
        registry.BUILT_IN_TIERS["mooncake"].libraries,
        registry.BUILT_IN_TIERS["mooncake"].instead,
    )
    monkeypatch.setattr(preflight_module, "_examined", lambda *_: {})
    monkeypatch.setattr(
        preflight_module, "requires", lambda _: [f"{library}>=1; extra == 'mooncake'"]
    )
    for name, missing in (("kvladder", [library]), (twin, [])):

        def version(asked, there=name):
            if asked in {"kvladder", there}:
                return "1"
            raise PackageNotFoundError(asked)

        monkeypatch.setattr(preflight_module, "version", version)
        assert [error.path for error in preflight(mooncake).errors] == missing
