"""Digests of a model's weight files."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Final

from xxhash import xxh3_128

from kvladder.errors import ConfigError
from kvladder.runtime import SystemClock

FORMAT = "2"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of weight files. The first suffix found in a directory is the one that counts."""
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files that trainers leave beside weights with the same suffixes; no engine loads them."""
SETTINGS = "adapter_config.json"
"""The file with an adapter's scale. A model's own settings are fields that its engine names."""
THREADS = 4
CACHE_ENTRIES_MAX = 1000
_START_FIELD: Final = 19
"""Index of the start time among the fields after the command's name; see proc(5)."""


def weights_digest(path: Path, *, cache: Path | None = None) -> str:
    """Return the digest of the weights in a directory, or of one file.

    Every byte counts. Two models may differ in a few rows of one tensor only. A sample of the
    bytes could miss these, and one model would get the other's KV. Digests are cached by path,
    size, inode and times, so only the first start reads the files. It reads a few GB/s if the
    engine has just read them; see docs/decisions/0013-digests-of-whole-weights.md.

    Parameters
    ----------
    path:
        A model's directory, or a file.
    cache:
        A JSON file that keeps digests of files; None uses one in the user's cache directory.

    Raises
    ------
    ConfigError
        There are no weights, or the files cannot be read.
    """
    try:
        files = weight_files(path)
        if not files:
            raise ConfigError(
                f"no weights in {path}",
                path="model.fingerprint",
                hint=f"expected {', '.join(SUFFIXES)}; or set it to text of your own that"
                " changes whenever the weights do",
            )
        known = _Known(_default_cache() if cache is None else cache)
        whole = hashlib.sha256(f"kvladder weights {FORMAT}".encode())
        with ThreadPoolExecutor(THREADS) as readers:
            for file, digest in zip(files, readers.map(known.digest, files), strict=True):
                whole.update(f"{file.name}\0{digest}\0".encode())
        for name in _unlisted(path, files):
            whole.update(f"not in the index\0{name}\0".encode())
        known.write()
    except OSError as error:
        what = f"{error.filename or path}: {error.strerror}"
        where = "model.fingerprint"
        raise ConfigError(what, path=where, hint="expected readable weight files") from error
    return whole.hexdigest()


def read_weights_digest(name: str, *, revision: str | None = None) -> str:
    """Return the digest of the files from which an engine in this process read its weights.

    ``name`` is a directory, a file, or a name on the Hugging Face hub. A hub revision's files never
    change.

    Raises
    ------
    ConfigError
        There are no weights, or a file was replaced since this process began. In that case it is
        unknown whether the engine has read the old or the new file.
    """
    path = Path(name)
    if not path.exists():
        return weights_digest(downloaded(name, revision=revision))
    digest = weights_digest(path)
    try:
        late = replaced_since(path, process_start_s())
    except OSError as error:
        late = [Path(str(error.filename or path))]
    if late:
        raise ConfigError(
            f"{late[0]} was replaced after the engine began, so the weights in use are unknown",
            path="model.fingerprint",
            hint="restart the engine; or set it to text of your own that changes whenever"
            " the weights do",
        )
    return digest


def replaced_since(path: Path, start_s: float) -> list[Path]:
    """Return those of ``path`` and its weight files that were written or renamed after a time.

    ``start_s`` is in seconds since the epoch. A directory does not count because a file was added
    to it later; the added file counts if it is a weight file.
    """
    found: list[Path] = []
    for one in (path, *weight_files(path)):
        for stat in (one.stat(), one.lstat()):
            added = S_ISDIR(stat.st_mode) and stat.st_mtime > start_s
            if stat.st_ctime > start_s and not added and one not in found:
                found.append(one)
    return found


def process_start_s() -> float:
    """Return when this process began, in seconds since the epoch."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")  # after the machine's start
    return SystemClock().wall() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


def downloaded(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    what: str = "model",
) -> Path:
    """Return the local folder of a Hugging Face hub snapshot; download nothing.

    Raises
    ------
    ConfigError
        The snapshot is not on this machine.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        raise ConfigError(
            f"the weights of {what} {name} are not found on this machine",
            path="model.fingerprint",
            hint="set it to text of your own that changes whenever the weights do",
        ) from error
    return Path(found)


def weight_files(path: Path) -> list[Path]:
    """Return a directory's weight files, or ``path`` alone if it is a file.

    Engines load only the files in the directory itself; a trainer's checkpoints may lie below it.
    Files below count only if the directory itself has none. An adapter's settings file is added.
    """
    if path.is_file():
        return [path]
    for above in ("*", "**/*"):
        for suffix in SUFFIXES:
            given = (p for p in path.glob(f"{above}{suffix}") if p.name not in NOT_WEIGHTS)
            found = sorted(p for p in given if p.is_file())
            if found:
                return [*found, *(p for p in [path / SETTINGS] if p.is_file())]
    return []


def _unlisted(path: Path, files: Sequence[Path]) -> list[str]:
    """Return the weight files that the directory's index does not list; engines skip these."""
    found: set[str] = set()
    for suffix in SUFFIXES if path.is_dir() else ():
        for index in sorted(path.glob(f"*{suffix}.index*.json")):
            with suppress(
                ValueError, LookupError, AttributeError, TypeError
            ):  # an unreadable index leaves no file out
                listed = {*json.loads(index.read_bytes())["weight_map"].values()}
                names = {file.name for file in files if file.name.endswith(suffix)}
                if listed <= names:
                    found |= names - listed
    return sorted(found)


def stamp(file: Path) -> str:
    """Return text that changes when the file is written to or replaced; may raise OSError."""
    stat = file.stat()
    return f"{FORMAT} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvladder" / "weights.json"


class _Known:
    """A cache of file digests in a JSON file, valid while the files do not change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, list[str]] = {}
        self._changed = False
        with suppress(OSError, ValueError):
            plain: Any = json.loads(path.read_text())
            self._entries = {str(k): [str(v[0]), str(v[1])] for k, v in plain.items()}

    def digest(self, file: Path) -> str:
        real = file.resolve()
        now = stamp(real)
        entry = self._entries.pop(str(real), None)
        if entry is None or entry[0] != now:
            entry = [now, _file_digest(real)]
            self._changed = True
        self._entries[str(real)] = entry  # most recently used last
        return entry[1]

    def write(self) -> None:
        """Write new digests to the cache file; if that fails, the next start computes them."""
        if not self._changed:
            return
        kept = dict(list(self._entries.items())[-CACHE_ENTRIES_MAX:])
        aside = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(kept))
            aside.replace(self._path)


def _file_digest(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxh3_128).hexdigest()
