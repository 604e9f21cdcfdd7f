"""Single settings are changed in the text of a file, and its comments stay."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvladder.changing.text import edited, replace_text
from kvladder.errors import ConfigError
from kvladder.schema import parse_yaml

STACK = """# my stack
arena: {size: 8 GiB}  # half of the machine
tiers:
  - type: host
  # the fast disk
  - name: nvme  # Samsung
    type: files
    path: /mnt/nvme
    capacity: 500 GiB   # leave some
    breaker:
      failures: 3
  - {name: far, type: redis, url: "redis://x"}
fetch:
"""

EDITS = {
    "a value": ("tiers.nvme.capacity", "1 TiB", "    capacity: 1 TiB   # leave some\n"),
    "in braces": ("arena.reserve", "10%", "arena: {reserve: 10%, size: 8 GiB}  # half of"),
    "a new key of a tier": (
        "tiers.nvme.when",
        "commit",
        "  - when: commit\n    name: nvme  # Sams",
    ),
    "a tier in braces": ("tiers.far.timeout", "2s", "  - {timeout: 2s, name: far,"),
    "a tier by its type": ("tiers.host.min_priority", "20", "  - min_priority: 20\n    type: host"),
    "a deeper key": ("tiers.nvme.breaker.failures", "5", "      failures: 5\n"),
    "a deeper new key": ("tiers.nvme.breaker.retry", "9s", "      retry: 9s\n      failures: 3"),
    "an empty section": ("fetch.deadline", "3s", "fetch: {deadline: 3s}\n"),
    "a new section": ("limits.priority", "80", "# my stack\nlimits: {priority: 80}\narena:"),
    "a list": ("tiers.nvme.codecs", "[zstd, checksum]", "  - codecs: [zstd, checksum]\n    name"),
}


@pytest.mark.parametrize("which", EDITS)
def test_one_setting_changes_and_all_comments_stay(which: str) -> None:
    path, value, wanted = EDITS[which]
    found = edited(STACK, path, value)
    assert wanted in found
    assert [line.partition("#")[2] for line in found.splitlines() if "#" in line] == [
        line.partition("#")[2] for line in STACK.splitlines() if "#" in line
    ]
    assert edited(found, path, value) == found, "the same again changes nothing"
    assert parse_yaml(found) != parse_yaml(STACK)


WRONG = {
    "no such tier": (
        "tiers.nvne.when",
        "commit",
        "no tier is named 'nvne' (expected one of host, ",
    ),
    "the tier itself": ("tiers.nvme", "{}", "no tier is named"),
    "below a value": ("arena.size.more", "1", "'more' stands below a single value"),
    "a whole section": ("tiers.nvme.breaker", "{}", "it has settings of its own (name one"),
    "no YAML": ("fetch.deadline", "{", "'{' is not YAML (put text in quotes)"),
    "two lines": ("fetch.deadline", "1\n", "expected a value on one line"),
    "nothing": ("fetch.deadline", "", "expected a value on one line"),
    "no key of YAML": ("fetch.a: [", "1", "'1' cannot stand there (edit the file"),
    "a hole": ("fetch..deadline", "1", "not a setting (expected a path such as"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_setting_is_refused(which: str) -> None:
    path, value, says = WRONG[which]
    with pytest.raises(ConfigError) as refused:
        edited(STACK, path, value)
    assert str(refused.value).startswith(f"set {path}: ")
    assert says in str(refused.value)


def test_a_value_that_an_alias_shares_is_not_changed() -> None:
    text = "fetch: &it {deadline: 2s}\nother: *it\n"
    with pytest.raises(ConfigError, match="an alias or a merge gives it its value"):
        edited(text, "other.deadline", "3s")


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    replace_text(link, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.yaml", "stack.yaml"]


def test_a_file_that_cannot_be_replaced_is_as_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        replace_text(tmp_path / "stack.yaml", "new")
    assert not list(tmp_path.iterdir())
