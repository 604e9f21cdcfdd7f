"""Planted faults are where they say, and each is judged by what its test does."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.kit import mutants
from tests.kit.mutants import Copy, Fault
from tests.kit.source import ROOT

ROOMS = {
    "changing", "children", "codecs", "config", "connectors", "control", "export", "files",
    "forgetting", "gpu", "hints", "isolated", "ladder", "mooncake", "nixl", "object", "policy",
    "publishing", "redis", "routing", "shadow", "threads", "traces", mutants.SEEDS,
}  # fmt: skip
KEYS = "tests/unit/test_keys.py::test_a_block_without_tokens_is_refused"
LEAST = Fault("keys", "", "kvladder/keys.py", "if block_tokens < 1:", "if block_tokens < 0:", KEYS)


@cache
def faults() -> list[Fault]:
    """Return all planted faults."""
    return [*mutants.of_rooms(), *mutants.of_seeds()]


def test_each_fault_has_its_text_once_and_a_test_that_exists() -> None:
    found = [f"{one.room}: {said}" for one in faults() for said in mutants.problems(one)]
    assert not found, "\n".join(found)


def test_each_room_has_faults_and_each_fault_a_reason() -> None:
    assert {one.room for one in faults()} == ROOMS
    assert len(mutants.of_rooms()) >= 100
    assert all(one.why for one in faults())
    twice = Counter((one.file, one.text, one.becomes) for one in mutants.of_rooms())
    assert max(twice.values()) == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"text": "e"}, "has the text of a fault"),
        ({"text": "not there"}, "has the text of a fault 0 times"),
        ({"becomes": LEAST.text}, "expected once, and a change"),
        ({"file": "gone.py"}, "gone.py has the text of a fault 0 times"),
        ({"test": "gone.py::test_gone"}, "expected a file that exists"),
        ({"test": "tests/unit/test_keys.py"}, "and a name in it"),
        ({"test": "tests/unit/test_keys.py::test_gone"}, "has no test_gone"),
        ({"test": "tests/tiers/test_memory.py::TestMemory::test_gone"}, "has no test_gone"),
    ],
)
def test_wrong_faults_are_found(changed: dict[str, str], says: str) -> None:
    assert list(mutants.problems(LEAST)) == []
    inherited = "tests/tiers/test_memory.py::TestMemory::test_fills_all_its_places"
    assert list(mutants.problems(LEAST._replace(test=inherited))) == []
    assert any(says in problem for problem in mutants.problems(LEAST._replace(**changed)))


def test_faults_are_chosen_by_words_and_by_changed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [LEAST, LEAST._replace(room="redis", why="a lost reply"), LEAST._replace(file="b.py")]
    assert mutants.chosen(some, [], None) == some
    assert (
        mutants.chosen(some, ["redis"], None) == mutants.chosen(some, ["lost"], None) == some[1:2]
    )
    assert mutants.chosen(some, [], ["b.py", "c.py"]) == some[2:]
    assert mutants.chosen(some, [], ["c.py", "b.py", LEAST.file]) == [some[2], *some[:2]]
    monkeypatch.setattr(mutants, "changed_since", lambda _: ["README.md"])
    assert mutants.main(["--changed", "HEAD"]) == 0
    assert mutants.main(["no such word"]) == 2


def test_files_that_changed_last_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True)

    git("init", "-q")
    for name in ("old", "first", "second", "later"):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-q", "-m", name)
    (tmp_path / "first").write_text("changed, and not committed")
    (tmp_path / "unknown").write_text("new")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    assert mutants.changed_since("HEAD~3") == ["unknown", "first", "later", "second"]


@pytest.mark.slow
def test_a_fault_is_planted_in_a_copy_and_judged_by_its_test(tmp_path: Path) -> None:
    path = ROOT / LEAST.file
    before = path.read_text()
    copy = Copy(tmp_path)
    found = copy.judge(LEAST)
    assert (found.outcome, found.said[:8]) == ("found", "1 failed"), found
    # without what was planted before, though it was compiled
    elsewhere = LEAST._replace(file="README.md", text="# kvladder", becomes="# another")
    survived = copy.judge(elsewhere)
    assert (survived.outcome, survived.said[:8]) == ("survived", "1 passed"), survived
    assert copy.judge(LEAST._replace(text="not there")).outcome == "text is gone"
    assert path.read_text() == before == (copy.tree / LEAST.file).read_text()
    page = mutants.as_page([found, survived], 3.0)
    assert "| keys | 1 | 1 |" in page


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (0, "1 passed in 0.01s", "survived"),
        (0, "1 skipped in 0.01s", "undecided"),
        (1, "1 failed in 0.01s", "found"),
        (2, "1 error in 0.01s", "does not start"),
        (4, "no tests ran in 0.01s", "does not start"),
        (-signal.SIGABRT, "Fatal Python error: Aborted", "found"),
        (-signal.SIGXCPU, "", "found"),
        (None, "", "undecided"),
    ],
)
def test_the_end_of_a_run_says_what_was_found(
    status: int | None, said: str, outcome: mutants.Outcome
) -> None:
    assert mutants.outcome_of(status, said) == outcome


@pytest.mark.slow
def test_a_test_without_an_end_is_ended_after_its_processor_time(tmp_path: Path) -> None:
    (tree := tmp_path / "tree").mkdir()
    (tree / "test_one.py").write_text("def test_one():\n    while True: pass\n")
    status, _ = mutants.run_tests(tree, ["test_one.py"], 1)
    assert status == -signal.SIGXCPU
