"""Compare a wheel with the folders it was built from: ``wheel_files.py TREE WHEEL``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}

COMPILED = ("kvladder/gpu/tree/_columns.", "kvladder/policy/_panel.")


def expected(tree: Path) -> set[str]:
    """The files of the packages, by their path in the wheel."""
    settings = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]
    directories = settings["package-dir"]
    data = settings["package-data"]
    files = {f"{package.replace('.', '/')}/{name}" for package in data for name in data[package]}
    for package in settings["packages"]:
        inside = package.replace(".", "/")
        folder = tree / directories.get(package, inside)
        files |= {f"{inside}/{path.name}" for path in folder.glob("*.py")}
    return files


def main(tree: Path, wheel: Path) -> int:
    """Print what differs; 1 if anything does."""
    names = {name for name in ZipFile(wheel).namelist() if not name.endswith("/")}
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    compiled = {name for name in names if name.startswith(COMPILED)}
    wanted, found = expected(tree), names - info - compiled
    told = {name.partition("/")[2] for name in info}
    wrong = [f"not in the wheel: {name}" for name in sorted(wanted - found)]
    wrong += [f"not in the folders: {name}" for name in sorted(found - wanted)]
    wrong += [f"metadata differs: {name}" for name in sorted(told ^ METADATA)]
    print("\n".join(wrong) or f"the wheel holds the {len(found)} files of the folders")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
