"""Blocks that earlier versions stored, kept as files: ``python -m tests.upgrade.stored``.

It builds the earlier versions, lets each store three blocks in a directory and in a Redis server,
and writes the bytes to ``tests/upgrade/stored``. Run it when a release has other formats.
"""

from __future__ import annotations

import base64
import json
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvladder.testing.redisserver import RedisServer
from tests.upgrade.elder import OLDER, PREVIOUS, Engine, Version

HERE = Path(__file__).parent / "stored"
NAME, BLOCKS = "stored", 3
CLEARED = "of an earlier version of kvladder"
"""The words of the notice with which this version clears a directory of older formats."""


def stack_of(level: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stack of host memory and one level."""
    below = {"name": "below", "capacity": "1 MiB", "when": "commit", **level}
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, below]}


def files_of(version: Version) -> Path:
    """Return the archive of a version's directory."""
    return HERE / f"{version.name}-files.tar.xz"


def values_of(version: Version) -> Path:
    """Return the file of a version's values in Redis."""
    return HERE / f"{version.name}-redis.json"


def write(version: Version, folder: Path) -> None:
    """Let a version store blocks, and keep the bytes."""
    directory = folder / f"{version.name}-files"
    with Engine(version, folder, stack_of({"type": "files", "path": str(directory)})) as engine:
        assert engine("save", NAME, BLOCKS) == BLOCKS
    with tarfile.open(files_of(version), "w:xz") as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() or path.is_dir():
                archive.add(path, path.relative_to(directory), recursive=False, filter=_nameless)
    place = folder / f"{version.name}-redis"
    with RedisServer(place) as redis:
        with Engine(version, folder, stack_of({"type": "redis", "url": redis.url})) as engine:
            assert engine("save", NAME, BLOCKS) == BLOCKS
        names: list[bytes] = redis.run("KEYS", "kvladder:*")
        kept = {}
        for name in sorted(names):
            if redis.run("TYPE", name) == b"string":
                packed = zlib.compress(redis.run("GET", name), 9)
                kept[name.decode()] = base64.b64encode(packed).decode()
    values_of(version).write_text(json.dumps(kept, indent=1) + "\n")


def _nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry without names and times of the machine that made it."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(version: Version, directory: Path) -> None:
    """Restore a version's directory."""
    directory.mkdir(mode=0o700)
    with tarfile.open(files_of(version)) as archive:
        archive.extractall(directory, filter="data")


def fill(version: Version, redis: RedisServer) -> dict[bytes, bytes]:
    """Store a version's values in a server, and return them."""
    kept = json.loads(values_of(version).read_text())
    values = {
        name.encode(): zlib.decompress(base64.b64decode(packed)) for name, packed in kept.items()
    }
    for name, value in values.items():
        redis.run("SET", name, value)
    return values


def main() -> int:
    """Write the bytes of each version."""
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stored-") as folder:
        for version in (PREVIOUS, OLDER):
            write(version, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
