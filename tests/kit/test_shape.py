"""The figures about the shape of the code are right."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.scripts import script

ROOT = Path(__file__).parents[2]
if not (ROOT / "tiers").is_dir():
    pytest.skip("the product's folders are not here", allow_module_level=True)

TEXT = '''"""A module
of two lines."""

# a comment
X = [
    1,  # one

    2,
]


def double(x):
    """Twice."""
    return (lambda y: 2 * y)(x)  # in code
'''


@pytest.fixture
def shape() -> Any:
    return script("shape")


def test_lines_with_code_on_them_count(shape: Any, tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(TEXT)
    assert shape.code_lines(tmp_path / "sample.py") == 6


@pytest.mark.slow
def test_every_file_of_the_product_is_in_a_room(shape: Any) -> None:
    names = [str(name) for name in shape.product()]
    assert {"tiers/base.py", "kvladder/keys.py", "tiers/redis/resp.py"} <= set(names)
    assert len(set(names)) == len(names)
    *each, (_, total) = shape.rooms()
    kit = sum(count for room, count in each if room.startswith(shape.TEST_KIT))
    assert total + kit == sum(count for _, count in each)
    assert {room for room, _ in each} >= set(shape.WHOLE)


def test_a_task_needs_few_files_and_lines(shape: Any) -> None:
    lists = {task: (files, lines) for task, files, lines in shape.reading_lists()}
    assert len(lists) == 7
    long = {
        task: needs
        for task, needs in lists.items()
        if needs[0] > shape.FILES_MAX or needs[1] > shape.LINES_MAX
    }
    assert not long


@pytest.mark.slow
@pytest.mark.real
def test_the_files_that_a_block_crosses_are_found(shape: Any) -> None:
    found = {what: (files, moves, running) for what, files, moves, running in shape.crossings()}
    for files, moves, running in found.values():
        assert {"kvladder/manager.py", "tiers/files/segments.py"} <= set(files)
        assert "kvladder/lock.py" not in files, "it runs for the block, and never has it"
        assert moves >= len(files) - 1
        assert running > len(files)
    assert "tiers/ladder/loading/fetch.py" in found["load"][0]
    assert "tiers/ladder/writing/writer.py" in found["save"][0]
    assert sys.getprofile() is None


def test_a_block_is_recognized_inside_containers(shape: Any) -> None:
    key = b"k" * 32
    crossing = shape.Crossing()
    crossing.end()
    crossing.key = key
    for carrier in (key, [1, key], [(key, 1)], {key: 1}, {1: [key]}, SimpleNamespace(keys=[key])):
        assert crossing._carries(carrier)
    others: list[object] = [
        b"o" * 32,
        1,
        None,
        [1, 2],
        {},
        SimpleNamespace(keys=[]),
        SimpleNamespace(),
    ]
    for other in others:
        assert not crossing._carries(other)


def test_an_author_needs_few_names(shape: Any) -> None:
    assert {"Tier", "told", "came", "expires_wall_s"} < shape.offered_to_authors()
    for name in shape.TIERS:
        met = shape.met_by_author(ROOT / "examples" / name)
        assert {"Tier", "get", "key", "label", "run_blocking"} < met
        assert len(met) <= 28
