"""Download the wheels that ``make gpu`` needs beside torch and NumPy: ``python .ci/gpu_wheels.py``.

For a machine without a network, with Python 3.12 on x86-64; ``--python 3.13`` is for another one.
``benchmarks/README.md`` says how to use them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
THERE = {"numpy", "kvladder"}
"""What the machine has, or has in the checkout."""
GLIBC = range(39, 16, -1)
"""Minor versions of the C library whose wheels are taken: pip matches each tag exactly."""

_NAME = re.compile(r"[^\w.-]")
_OURS = re.compile(r"kvladder\[([\w,-]+)\]")


def name_of(requirement: str) -> str:
    """Return a requirement's project, without extras and versions."""
    return _NAME.split(requirement)[0]


def for_machine(python: str) -> list[str]:
    """Return pip's options to choose wheels for that machine and this version of Python."""
    options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64"]
    return options + [f"--platform={one}" for one in platforms]


def wanted() -> list[str]:
    """Return the requirements of kvladder, and of its tests, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *_of(extras, "testing")]
    return [one for one in every if name_of(one) not in THERE]


def _of(extras: Mapping[str, Sequence[str]], name: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of kvladder's extras that it contains."""
    for one in extras[name]:
        yield one
        if found := _OURS.match(one):
            for other in found[1].split(","):
                yield from _of(extras, other)


def main() -> int:
    """Download; return pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".whl")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "-q", *for_machine(arguments.python)]
    command += ["-d", str(arguments.folder), *wanted()]
    found = subprocess.run(command, check=False)  # noqa: S603 - its parts are from pyproject.toml
    sizes = [path.stat().st_size for path in arguments.folder.glob("*.whl")]
    print(f"{len(sizes)} wheels of {sum(sizes) / 2**20:.1f} MiB in {arguments.folder}")
    return found.returncode


if __name__ == "__main__":
    sys.exit(main())
