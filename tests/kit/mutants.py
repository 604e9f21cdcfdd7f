"""Plants faults in copies of the tree, and checks that tests find them.

``python -m tests.kit.mutants [WORD...]`` tries the faults of ``tests/mutants`` and those of
``docs/contributing/seeds.yaml``, or only the ones with a word in their room, file or reason. It
prints an outcome for each, and exits with 1 if any fault was not found. ``--changed BASE`` tries
only faults in files that changed since a commit, the last changed first; ``--within S`` begins none
after so many seconds.

A fault is found if its test fails, is stuck, or computes for ``--limit`` seconds without an end.
The limit is in seconds of the test's own processor time, so a busy machine changes no outcome.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from benchmarks.machine import RESULTS, machine
from tests.kit.scripts import script
from tests.kit.source import ROOT

FOLDER = ROOT / "tests" / "mutants"
SUITES = ROOT / "kvladder" / "testing"
KEYS = {"why", "file", "text", "becomes", "test"}
SEEDS = "seeds"
LEFT_OUT = shutil.ignore_patterns(".*cache*", ".git", ".venv*", ".hypothesis", "build", "shared")
"""What a copy of the tree does without. It has compiled modules, or each test compiled them all."""
LIMIT_S = 60
PATIENCE_S, IDLE_S = 30, 10
"""How long a test waits for an event that a fault may prevent, and without doing anything."""
WALL = 5
"""A test is given up after this multiple of its limit in wall time: then nothing is known."""

Outcome = Literal["found", "survived", "text is gone", "does not start", "undecided", "left out"]


class Fault(NamedTuple):
    """A planted fault, and the test that must find it."""

    room: str
    why: str
    file: str
    text: str
    """Text that occurs once in the file, and is replaced."""
    becomes: str
    test: str
    """``file::name``, or ``file::Class::name``."""


class Verdict(NamedTuple):
    """The result of planting a fault."""

    fault: Fault
    outcome: Outcome
    said: str
    """The last line of the test run."""
    seconds: float


# ---- what is planted


def of_rooms() -> list[Fault]:
    """Return the faults of ``tests/mutants``, by room."""
    found: list[Fault] = []
    for path in sorted(FOLDER.glob("*.yaml")):
        rows: list[dict[str, str]] = yaml.safe_load(path.read_text(encoding="utf-8"))
        for row in rows:
            assert set(row) == KEYS, f"{path.name}: expected {sorted(KEYS)}, found {sorted(row)}"
            found.append(Fault(path.stem, **row))
    return found


def of_seeds() -> list[Fault]:
    """Return the faults of the rows that other systems' texts name."""
    seeds: Any = script("seeds")
    rows = [row for section in seeds.load() for row in section["rows"]]
    return [
        Fault(
            SEEDS,
            f"{row['seed']} {row['names']}",
            fault["file"],
            fault["text"],
            fault["becomes"],
            fault.get("test", row["tests"][0]),
        )
        for row in rows
        for fault in row.get("faults", ())
    ]


def problems(fault: Fault) -> Iterator[str]:
    """Yield what is wrong with a fault; its syntax shows when it is planted."""
    path, becomes = ROOT / fault.file, fault.becomes
    count = path.read_text(encoding="utf-8").count(fault.text) if path.is_file() else 0
    if count != 1 or fault.text == becomes:
        found = f"{count} times: expected once, and a change: {fault.text!r}"
        yield f"{fault.file} has the text of a fault {found}"
    file, *names = fault.test.split("::")
    if not names or not (ROOT / file).is_file():
        yield f"{fault.test}: expected a file that exists, and a name in it"
        return
    known = (ROOT / file).read_text(encoding="utf-8")
    if len(names) > 1:  # a class may inherit its tests from the suites that are shipped
        known += "".join(path.read_text(encoding="utf-8") for path in SUITES.glob("*.py"))
    for depth, name in enumerate(names):
        kinds = rf"(?:async )?(?:def|class) {name}\b|{name}\b.* = "
        if not re.search(rf"^{' +' if depth else ''}(?:{kinds})", known, re.MULTILINE):
            yield f"{file} has no {name}"


def changed_since(base: str) -> list[str]:
    """Return the files that changed since a commit, the last changed first.

    Those that are not committed, or that git does not know, come before all others.
    """
    listed: dict[str, None] = {}
    for command in (
        ("ls-files", "-o", "--exclude-standard"),
        ("diff", "--name-only", "HEAD", "--"),
        ("log", "--format=", "--name-only", f"{base}..HEAD"),
    ):
        listed |= dict.fromkeys(
            subprocess.run(
                ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
            ).stdout.splitlines()
        )
    return [*listed]


def chosen(
    faults: Sequence[Fault], words: Sequence[str], changed: Sequence[str] | None
) -> list[Fault]:
    """Return the faults with one of the words, in files that changed; None stands for all.

    They are in the order of these files.
    """
    found = [
        fault
        for fault in faults
        if not words or any(w in (fault.room, fault.file) or w in fault.why for w in words)
    ]
    if changed is None:
        return found
    rank = {file: at for at, file in enumerate(changed)}
    return sorted((one for one in found if one.file in rank), key=lambda one: rank[one.file])


# ---- planting


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run tests in a tree; return pytest's exit status, and the last line that it wrote.

    The status is minus the number of the signal that ended pytest, or None if the run was
    given up.
    """
    options = ("-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tree.parent / 'base'}")
    more = {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "ci"}
    more |= {"KVLADDER_PATIENCE_S": str(PATIENCE_S), "KVLADDER_IDLE_S": str(IDLE_S)}
    with (tree.parent / "said").open("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=os.environ | more,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        most_s = int(limit_s)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (most_s, most_s + 5))
        try:
            status: int | None = process.wait(WALL * limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None or process.returncode < 0:
                with suppress(ProcessLookupError):  # its children, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        lines = said.read().strip().splitlines()
    return status, lines[-1] if lines else "no output"


def outcome_of(status: int | None, said: str) -> Outcome:
    """Return what the end of a test run with a fault says of the test."""
    if status is None:
        return "undecided"
    if status == 0:
        return "survived" if " passed" in said else "undecided"  # all were skipped
    if status == 1 or status in {-signal.SIGABRT, -signal.SIGXCPU, -signal.SIGKILL}:
        return "found"  # it failed, was stuck, or had no end
    return "does not start"


class Copy:
    """A copy of the tree, in which one fault at a time is planted.

    Parameters
    ----------
    folder:
        Its parent, an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._planted = 0
        shutil.copytree(ROOT, self.tree, symlinks=True, ignore=LEFT_OUT)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[bool]:
        """Plant a fault; yield False if its text does not occur once."""
        path = self.tree / fault.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        if source.count(fault.text) != 1:
            yield False
            return
        before = path.stat()
        path.write_text(source.replace(fault.text, fault.becomes), encoding="utf-8")
        self._planted += 1
        # compiled modules are told apart by their source's second and size
        told_s = before.st_mtime + 1000 * self._planted
        os.utime(path, (told_s, told_s))
        try:
            yield True
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def judge(self, fault: Fault, limit_s: float = LIMIT_S) -> Verdict:
        """Plant a fault, run its test, and say what became of it."""
        begun_s = time.monotonic()
        with self.planted(fault) as is_there:
            status, said = run_tests(self.tree, [fault.test], limit_s) if is_there else (0, "")
        outcome = outcome_of(status, said) if is_there else "text is gone"
        return Verdict(fault, outcome, said, time.monotonic() - begun_s)


def try_all(
    faults: Sequence[Fault], *, jobs: int, limit_s: float, within_s: float
) -> Iterator[Verdict]:
    """Try faults in ``jobs`` copies at once; yield their verdicts in the order of ``faults``."""
    end_s = time.monotonic() + within_s
    with tempfile.TemporaryDirectory(prefix="kvladder-mutants-") as folder:
        copies = queue.SimpleQueue[Copy]()
        for number in range(min(jobs, len(faults))):
            (own := Path(folder) / str(number)).mkdir()
            copies.put(Copy(own))

        def one(fault: Fault) -> Verdict:
            if time.monotonic() >= end_s:
                return Verdict(fault, "left out", f"no time left of {within_s:g} s", 0.0)
            copy = copies.get()
            try:
                return copy.judge(fault, limit_s)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, faults)


def pass_without(tests: Sequence[str], limit_s: float) -> str:
    """Return why tests do not pass in a copy without a fault; empty if they do."""
    with tempfile.TemporaryDirectory(prefix="kvladder-mutants-") as folder:
        tree = Copy(Path(folder)).tree
        status, said = run_tests(tree, [*dict.fromkeys(tests)], limit_s * len(tests))
    return "" if status == 0 else f"without a fault: exit status {status}: {said}"


# ---- what is told


def as_page(verdicts: Sequence[Verdict], took_s: float) -> str:
    """Return the verdicts as a page of Markdown: by room, then one by one."""
    about = {**machine(), "command": f"python -m tests.kit.mutants {' '.join(sys.argv[1:])}"}
    about["took"] = f"{took_s:.0f} s"
    rooms: dict[str, Counter[str]] = {}
    for one in verdicts:
        rooms.setdefault(one.fault.room, Counter())[one.outcome] += 1
    kinds = [kind for kind in get_args(Outcome) if any(kind in room for room in rooms.values())]
    lines = [f"# {len(verdicts)} planted faults", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| room | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    for room, counts in rooms.items():
        lines.append(f"| {room} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    total = Counter(one.outcome for one in verdicts)
    lines.append("| all | " + " | ".join(str(total[kind]) for kind in kinds) + " |")
    lines += ["", "| room | fault | file | test | outcome | s |", "|---|---|---|---|---|---:|"]
    for fault, outcome, _, seconds in verdicts:
        why = fault.why.replace("|", "\\|")
        cells = f"{fault.room} | {why} | `{fault.file}` | `{fault.test}` | {outcome}"
        lines.append(f"| {cells} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the faults of the command line; 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a room, a file, words of a fault")
    parser.add_argument("--changed", metavar="BASE", help="only in files changed since a commit")
    parser.add_argument("--within", type=float, default=1e9, metavar="S", help="begin none later")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="of each test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--out", metavar="FILE", help="write to benchmarks/results/FILE as well")
    given = parser.parse_args(arguments)
    changed = None if given.changed is None else changed_since(given.changed)
    faults = chosen([*of_rooms(), *of_seeds()], given.words, changed)
    if not faults:
        print("no fault is planted in what changed" if changed else "no fault has such a word")
        return 0 if given.changed else 2
    begun_s = time.monotonic()
    if changed is None and (said := pass_without([fault.test for fault in faults], given.limit)):
        print(said)
        return 1
    verdicts: list[Verdict] = []
    for one in try_all(faults, jobs=given.jobs, limit_s=given.limit, within_s=given.within):
        verdicts.append(one)
        fault, outcome, said, seconds = one
        print(f"{outcome:9} {seconds:4.0f} s  {fault.room}: {fault.why}", flush=True)
        if outcome not in {"found", "left out"}:
            print(f"    {fault.becomes!r} in {fault.file}\n    {fault.test}: {said}", flush=True)
    if given.out:
        page = as_page(verdicts, time.monotonic() - begun_s)
        (RESULTS / given.out).write_text(page, encoding="utf-8")
    total = Counter(one.outcome for one in verdicts)
    print(", ".join(f"{count} {outcome}" for outcome, count in total.items()))
    return int(any(one.outcome not in {"found", "left out"} for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
