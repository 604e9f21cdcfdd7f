"""A digest of a model's weights that takes a second, not the minutes of reading them all."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from kvladder.errors import ConfigError

FORMAT = "1"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""The first of these that a directory has is what its model is made of."""
SAMPLE_BYTES = 4096
SAMPLES = 256
"""Of a file that does not say where its tensors are."""
HEADER_BYTES_MAX = 100 << 20
CACHE_ENTRIES_MAX = 1000


def weights_digest(path: Path, *, cache: Path | None = None) -> str:
    """Digest of the weights in a directory, or of one file.

    Every safetensors header and a sample of each tensor in it go into it; of other formats a
    sample taken at even distances. What was found out is kept by path, size, inode and times.

    Parameters
    ----------
    path:
        A model's directory, or a file.
    cache:
        A JSON file that keeps digests of files; None takes one in the user's cache directory.

    Raises
    ------
    ConfigError
        There are no weights, or they cannot be read.
    """
    try:
        files = [path] if path.is_file() else _weight_files(path)
        if not files:
            raise ConfigError(
                f"no weights in {path}",
                path="model.fingerprint",
                hint=f"expected {', '.join(SUFFIXES)}; or set it to text of your own that"
                " changes whenever the weights do",
            )
        known = _Known(_default_cache() if cache is None else cache)
        whole = hashlib.sha256(f"kvladder weights {FORMAT}".encode())
        for file in files:
            whole.update(f"{file.name}\0{known.digest(file)}\0".encode())
        known.write()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}",
            path="model.fingerprint",
            hint="expected weights that can be read",
        ) from error
    return whole.hexdigest()


def downloaded(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    what: str = "model",
) -> Path:
    """Where something that came from the Hugging Face hub lies; nothing is downloaded.

    Raises
    ------
    ConfigError
        It is not on this machine.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:  # all of the hub's errors are one of them
        raise ConfigError(
            f"the weights of {what} {name} are not found on this machine",
            path="model.fingerprint",
            hint="set it to text of your own that changes whenever the weights do",
        ) from error
    return Path(found)


def _weight_files(directory: Path) -> list[Path]:
    for suffix in SUFFIXES:
        for pattern in (f"*{suffix}", f"**/*{suffix}"):
            found = sorted(p for p in directory.glob(pattern) if p.is_file())
            if found:
                return found
    return []


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvladder" / "weights.json"


class _Known:
    """Digests of files that have not changed since they were made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, list[str]] = {}
        self._changed = False
        with suppress(OSError, ValueError):
            plain: Any = json.loads(path.read_text())
            self._entries = {str(k): [str(v[0]), str(v[1])] for k, v in plain.items()}

    def digest(self, file: Path) -> str:
        real = file.resolve()
        stat = real.stat()
        stamp = f"{FORMAT} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        entry = self._entries.pop(str(real), None)
        if entry is None or entry[0] != stamp:
            entry = [stamp, _file_digest(real, stat.st_size)]
            self._changed = True
        self._entries[str(real)] = entry  # the last one is the most recent
        return entry[1]

    def write(self) -> None:
        """Keep what was found out; where that is not possible it is found out again."""
        if not self._changed:
            return
        kept = dict(list(self._entries.items())[-CACHE_ENTRIES_MAX:])
        aside = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(kept))
            aside.replace(self._path)


def _file_digest(file: Path, size: int) -> str:
    state = hashlib.sha256(struct.pack("<Q", size))
    with file.open("rb") as stream:
        header = _safetensors_header(stream, size) if file.suffix == ".safetensors" else b""
        state.update(header)
        for offset, length in _tensor_offsets(header) or _even_offsets(size):
            stream.seek(offset)
            state.update(stream.read(length))
    return state.hexdigest()


def _safetensors_header(stream: BinaryIO, size: int) -> bytes:
    """Length and header of a safetensors file; nothing if it is none."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        return b""
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, HEADER_BYTES_MAX):
        return b""
    return prefix + stream.read(length)


def _tensor_offsets(header: bytes) -> list[tuple[int, int]]:
    """A sample from the middle of each tensor; nothing if the header does not name tensors."""
    try:
        tensors: Any = json.loads(header[8:])
        spans = sorted(v["data_offsets"] for k, v in tensors.items() if k != "__metadata__")
        lengths = [min(SAMPLE_BYTES, end - begin) for begin, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [
        (len(header) + begin + (end - begin - length) // 2, length)
        for (begin, end), length in zip(spans, lengths, strict=True)
    ]


def _even_offsets(size: int) -> list[tuple[int, int]]:
    length = min(SAMPLE_BYTES, size)
    steps = min(SAMPLES, max(1, size // SAMPLE_BYTES))
    return [((size - length) * step // max(1, steps - 1), length) for step in range(steps)]
