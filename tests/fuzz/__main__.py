"""Fuzzes what reads bytes of others: ``python -m tests.fuzz TARGET --seconds N``, or ``all``.

libFuzzer makes inputs from the kept ones in ``tests/fuzz/corpus``, and follows which code they
reach; atheris joins it to Python. It keeps new inputs in ``build/fuzz/TARGET``, and what fails in
``build/fuzz/TARGET.found``. Exits with 1 if anything failed. An input also fails if it takes
more processor time than ``LIMIT_S`` of the child, more memory than ``MEMORY_MB``, or if it hangs.

``--keep`` then adds to the kept inputs those that reach other code. ``python -m tests.fuzz TARGET
FILE...`` runs single inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import RESULTS, machine
from tests.fuzz.corpus import CORPUS, KEPT_BYTES_MAX, kept
from tests.kit.source import ROOT

NAMES = (
    "yaml", "edit", "traces", "label", "log", "meta", "receipt", "resp", "http", "pipe", "events",
    "hints", "nixl", "session", "roster", "control", "ranks",
)  # fmt: skip
"""The targets; their modules are not imported here, as libFuzzer has to see that."""
WORK = ROOT / "build" / "fuzz"
HANG_S = 300
"""Time after which an input hangs: on a busy machine, those that end may take long, too."""
MEMORY_MB = 2048
LENGTH_MAX = 8192
"""Longest input that is made."""


class Figures(NamedTuple):
    """The result of fuzzing one target."""

    name: str
    executions: int
    seconds: float
    reached: int
    """Branches of code that inputs reached, as libFuzzer counts them."""
    inputs: int
    """Inputs that reached something else than those before."""
    longest_ms: int
    memory_mb: int
    found: list[Path]
    """An input of each kind of failure."""

    @property
    def said(self) -> list[str]:
        """The error of each."""
        texts = [path.with_suffix(".txt") for path in self.found]
        return [one.read_text().splitlines()[-1] if one.exists() else "a limit" for one in texts]


def fuzz(name: str, seconds: int) -> Figures:
    """Fuzz one target for some seconds."""
    folder, found = WORK / name, WORK / f"{name}.found"
    for one in (folder, found):
        one.mkdir(parents=True, exist_ok=True)
    before = {*found.iterdir()}
    begun_s = time.monotonic()
    said = _child(
        name,
        f"-max_total_time={seconds}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={LENGTH_MAX}",
        f"-artifact_prefix={found}/",
        f"-dict={_dictionary(name)}",
        "-print_final_stats=1",
        str(folder),
        str(_whole(name)),
    )

    def last(pattern: str) -> int:
        return int((re.findall(pattern, said) or ["0"])[-1])

    return Figures(
        name,
        last(r"stat::number_of_executed_units:\s*(\d+)") or last(r"(?m)^#(\d+)"),
        time.monotonic() - begun_s,
        last(r"cov: (\d+)"),
        last(r"corp: (\d+)"),
        1000 * last(r"stat::slowest_unit_time_sec:\s*(\d+)"),
        last(r"stat::peak_rss_mb:\s*(\d+)") or last(r"rss: (\d+)Mb"),
        sorted(path for path in {*found.iterdir()} - before if not path.suffix),
    )


def _child(name: str, *options: str) -> str:
    """Run libFuzzer for a target, and return what it wrote."""
    found = WORK / f"{name}.found"
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.child", name, str(found), *options]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    said = done.stdout.decode(errors="replace")
    (WORK / f"{name}.log").write_text(said, encoding="utf-8")
    return said


def _whole(name: str) -> Path:
    """Return a folder with the seeds and the kept inputs of a target."""
    folder = WORK / f"{name}.kept"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for data in kept(name):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return folder


def _dictionary(name: str) -> Path:
    from tests.fuzz.targets import TARGETS

    path = WORK / f"{name}.dict"
    tokens = ("".join(f"\\x{byte:02x}" for byte in token) for token in TARGETS[name].tokens)
    path.write_text("".join(f'"{token}"\n' for token in tokens))
    return path


def keep(name: str) -> int:
    """Add inputs that reach other code to the kept ones, the shortest first; return how many."""
    folder, target = WORK / f"{name}.merged", CORPUS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # into the kept ones: only what reaches something else than they do
    for data in kept(name):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    old = {path.name for path in folder.iterdir()}
    _child(name, "-merge=1", f"-timeout={HANG_S}", str(folder), str(WORK / name))
    room = KEPT_BYTES_MAX - sum(path.stat().st_size for path in target.glob("*"))
    new = [path.read_bytes() for path in folder.iterdir() if path.name not in old]
    added = 0
    for data in sorted(new, key=len):
        if (room := room - len(data)) < 0:
            break
        target.mkdir(parents=True, exist_ok=True)
        (target / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        added += 1
    return added


def as_page(figures: Sequence[Figures]) -> str:
    """Return the figures as a page of Markdown."""
    about = {**machine(), "command": f"python -m tests.fuzz {' '.join(sys.argv[1:])}"}
    total = sum(one.executions for one in figures)
    lines = [f"# {total:,} inputs of {len(figures)} fuzz targets", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        "| target | inputs tried | seconds | a second | branches | kept | peak memory | found |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in figures:
        each_s = one.executions / max(one.seconds, 1)
        what = "; ".join(one.said) or "nothing"
        cells = (
            f"{one.name} | {one.executions:,} | {one.seconds:.0f} | {each_s:,.0f} | {one.reached}"
        )
        lines.append(f"| {cells} | {one.inputs} | {one.memory_mb} MB | {what} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the targets of the command line; 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*NAMES, "all"])
    parser.add_argument("files", nargs="*", type=Path, help="only run these inputs")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="add to the kept inputs")
    parser.add_argument("--out", metavar="FILE", help="write to benchmarks/results/FILE as well")
    given = parser.parse_args(arguments)
    if given.files:
        from tests.fuzz.targets import TARGETS

        for path in given.files:
            TARGETS[given.target].run(path.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: install kvladder[dev]", file=sys.stderr)
        return 2
    figures: list[Figures] = []
    for name in NAMES if given.target == "all" else [given.target]:
        figures.append(one := fuzz(name, given.seconds))
        print(
            f"{name}: {one.executions:,} inputs, {one.inputs} kept, {len(one.found)} failed",
            flush=True,
        )
        for path, said in zip(one.found, one.said, strict=True):
            print(f"    {said}\n    python -m tests.fuzz {name} {path}", flush=True)
        if given.keep:
            print(f"    {keep(name)} added to {CORPUS / name}", flush=True)
    if given.out:
        (RESULTS / given.out).write_text(as_page(figures), encoding="utf-8")
    return int(any(one.found for one in figures))


if __name__ == "__main__":
    sys.exit(main())
