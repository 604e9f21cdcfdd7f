"""Earlier versions of kvladder, built from their commits into environments of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.puppet import Puppet
from tests.kit.served import Server

ROOT = Path(__file__).parents[2]
LAYOUT: Mapping[str, Any] = {
    "block_tokens": 16,
    "block_bytes": 4096,
    "fields": {"model": "of two versions"},
}


class Version(NamedTuple):
    """A version of kvladder: this one if it has no commit."""

    name: str
    commit: str = ""
    same_formats: bool = True
    """Whether its blocks have the formats of this version."""


THIS = Version("this version")
PREVIOUS = Version("2026-11-24", "34642428de")
"""The last commit of that day: the formats of today."""
OLDER = Version("2026-11-22", "8258a8fa5b", same_formats=False)
"""The last commit before blocks had labels; it has files and Redis only."""


def python_of(version: Version, folder: Path) -> Path:
    """Return the interpreter of a version, after it was built below ``folder``.

    The environment has the version's wheel, and finds other packages in this one's.
    """
    if not version.commit:
        return Path(sys.executable)
    home = folder / version.commit
    python = home / "venv/bin/python"
    if python.exists():
        return python
    tree, wheels = home / "tree", home / "wheels"
    tree.mkdir(parents=True)
    packed = _run(["git", "-C", str(ROOT), "archive", version.commit])
    _run(["tar", "-x", "-C", str(tree)], given=packed)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(tree)])
    (wheel,) = wheels.glob("*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")])
    site = Path(
        _run([str(python), "-c", "import site; print(site.getsitepackages()[0])"]).decode().strip()
    )
    _run([*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)])
    (site / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    shutil.rmtree(tree)
    return python


def _run(command: list[str], *, given: bytes = b"") -> bytes:
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.decode()[-3000:]}"
    return done.stdout


def path_of(version: Version, folder: Path) -> Path:
    """Return the folder on the import path of an engine: without this version, if another runs."""
    if not version.commit:
        return ROOT
    place = folder / version.commit / "path"
    for name in ("tests/upgrade/engine.py", "tests/kit/puppet.py"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    return place


class Engine(Puppet):
    """An engine of a version; ``error`` is why it did not start. A context manager that ends it."""

    def __init__(
        self, version: Version, folder: Path, stack: Mapping[str, Any], *, block_bytes: int = 4096
    ) -> None:
        self.version = version
        super().__init__(
            "tests.upgrade.engine",
            [json.dumps(stack), json.dumps({**LAYOUT, "block_bytes": block_bytes})],
            folder / "engine.log",
            python=python_of(version, folder),
            path=path_of(version, folder),
        )
        self.error: str = self.ready
        if self.error:
            self.process.communicate()

    def __enter__(self) -> Engine:
        assert not self.error, self.error
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self("close")
            self.process.communicate()


class ServerOf(Server):
    """``kvladder serve`` of a version."""

    def __init__(self, version: Version, folder: Path, place: Path) -> None:
        self.python = str(python_of(version, folder))
        self.environment = {**os.environ, "PYTHONPATH": str(path_of(version, folder))}
        super().__init__(place)

    def become(self, version: Version, folder: Path) -> None:
        """Start another version at the same address, over the same files."""
        self.python = str(python_of(version, folder))
        self.environment = {**os.environ, "PYTHONPATH": str(path_of(version, folder))}
        self.again()

    def _start(self) -> None:
        self.stack.pop("http", None)  # earlier versions have none
        super()._start()
