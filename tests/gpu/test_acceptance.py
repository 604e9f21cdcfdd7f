"""Every case that the block pool was specified by is a test that bears its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CASES = {
    "e": [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14],
    "r": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 18],
    "u": [1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 14, 15, 16, 17, 19],
    "o": [1, 3, 4, 5, 7, 8, 9],
    "v": [1, 2, 4, 5, 9],
    "s": [1, 2, 3, 6, 7, 8],
    "q": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "g": [1, 2],
    "p": [1, 2, 3, 4],
}
NAMED = re.compile(r"^def test_([a-z])(\d+)(?:_to_\1(\d+))?_", re.MULTILINE)


def cases() -> set[str]:
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for letter, first, last in NAMED.findall(path.read_text(encoding="utf-8")):
            found.update(f"{letter}-{n}" for n in range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("letter", CASES)
def test_every_case_has_a_test_of_its_name(letter: str) -> None:
    wanted = {f"{letter}-{number}" for number in CASES[letter]}
    mine = {case for case in cases() if case.startswith(letter)}
    assert wanted == mine
