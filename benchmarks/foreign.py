"""Installs programs of others, each into its own place, so that they cannot disturb each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Absent(Exception):
    """Raised if a foreign program cannot be used here, with the reason."""


def into_folder(folder: Path, wanted: Sequence[str]) -> None:
    """Install packages without their dependencies into a folder.

    Raises
    ------
    Absent
        A package cannot be installed.
    """
    _pip(Path(sys.executable), "--no-deps", "--target", str(folder), *wanted)


def into_environment(folder: Path, wanted: Sequence[str]) -> Path:
    """Return the folder of programs of an environment that has these packages; make it if needed.

    The file ``installed`` is written last, so a failed attempt is repeated.

    Raises
    ------
    Absent
        A package cannot be installed.
    """
    programs = folder / "bin"
    done = folder / "installed"
    listed = "\n".join(wanted)
    if not done.is_file() or done.read_text() != listed:
        command = [sys.executable, "-m", "venv", "--clear", str(folder)]
        _run(command)
        _pip(programs / "python", "--no-compile", "--prefer-binary", *wanted)
        done.write_text(listed)
    return programs


def size_mib(folder: Path) -> float:
    """Return the MiB that the files of a folder occupy."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Absent(said[-1] if said else f"{command[0]} exited with {done.returncode}")
