"""Names to classes: built-in, from other packages, registered; nearest names and conflicts."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvladder.config import registry
from kvladder.errors import ConfigError
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.tiers.memory import MemoryTier

MEMORY = "kvladder.tiers.memory:MemoryTier"


class _Package:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages are installed: ``installed(owner, group, name, target)``."""
    points = []

    def add(owner, group, name, target):
        point = EntryPoint(name, target, f"kvladder.{group}")
        vars(point)["dist"] = _Package(owner)
        points.append(point)

    def found(*, group):
        return [point for point in points if point.group == group]

    monkeypatch.setattr(registry, "entry_points", found)
    registry._found.cache_clear()
    yield add
    registry._found.cache_clear()


def test_built_in_names_need_no_metadata(installed):
    assert registry.load("tiers", "memory") is MemoryTier
    assert registry.load("policies", "prioritized-lru") is PrioritizedLRU


def test_another_package_adds_a_name(installed):
    installed("some-tiers", "tiers", "bucket", "kvladder.tiers.memory:MemoryTier")
    assert registry.load("tiers", "bucket") is MemoryTier
    known = ["bucket", "files", "host", "memory", "mooncake", "nixl", "object", "redis"]
    assert registry.names("tiers") == known


def test_names_are_known_before_their_modules_are_imported(installed):
    installed("some-tiers", "tiers", "broken", "no_such_module:Tier")
    assert "broken" in registry.names("tiers")
    with pytest.raises(ConfigError, match=r"'broken' cannot be loaded.*some-tiers declares it"):
        registry.load("tiers", "broken")


def test_a_missing_attribute_is_reported(installed):
    installed("some-tiers", "tiers", "broken", "kvladder.tiers.memory:Nothing")
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*Nothing"):
        registry.load("tiers", "broken")


def test_an_unknown_name_is_reported_with_its_path_and_the_nearest_name(installed):
    with pytest.raises(
        ConfigError, match=r"unknown tier type 'flies'.*did you mean 'files'"
    ) as got:
        registry.load("tiers", "flies", path="tiers[1].type")
    assert got.value.path == "tiers[1].type"


def test_an_unknown_name_without_a_near_one_lists_all(installed):
    with pytest.raises(ConfigError, match="expected one of: files, host, memory"):
        registry.load("tiers", "zzzz")


def test_a_built_in_name_cannot_be_taken_by_another_package(installed):
    installed("rogue", "tiers", "memory", "rogue:Tier")
    with pytest.raises(ConfigError, match="'memory' comes from several packages: kvladder, rogue"):
        registry.load("tiers", "memory")


def test_two_packages_cannot_share_a_name(installed):
    installed("one", "tiers", "bucket", "one:Tier")
    installed("two", "tiers", "bucket", "two:Tier")
    with pytest.raises(ConfigError, match=r"several packages: one, two \(uninstall all but one\)"):
        registry.load("tiers", "bucket")


def test_a_repeated_claim_counts_once(installed):
    installed("one", "tiers", "bucket", MEMORY)
    installed("one", "tiers", "bucket", MEMORY)
    assert registry.load("tiers", "bucket") is MemoryTier


def test_metadata_of_an_older_kvladder_does_not_count(installed):
    installed("kvladder", "tiers", "memory", "kvladder.moved:MemoryTier")
    assert registry.load("tiers", "memory") is MemoryTier


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_a_process_may_register_classes_of_its_own(installed, registered):
    class Mine(MemoryTier):
        pass

    registry.register("tiers", "mine", Mine)
    registry.register("tiers", "mine", Mine)
    assert registry.load("tiers", "mine") is Mine
    assert "mine" in registry.names("tiers")
    with pytest.raises(ConfigError, match="unknown codec"):
        registry.load("codecs", "mine")


def test_a_taken_name_cannot_be_registered(installed, registered):
    installed("some-tiers", "tiers", "bucket", MEMORY)
    for name in ("memory", "bucket"):
        with pytest.raises(ConfigError, match="exists already"):
            registry.register("tiers", name, MemoryTier)
    registry.register("tiers", "mine", MemoryTier)
    with pytest.raises(ConfigError, match="is registered already"):
        registry.register("tiers", "mine", object())


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, known in registry.BUILT_IN.items() for name in known],
)
def test_every_built_in_name_can_be_loaded(group, name):
    assert isinstance(registry.load(group, name), type)
