"""Digests of a model's weights: of its files, or of its parameters in memory."""

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

import torch
from xxhash import xxh3_128, xxh3_128_digest

from kvladder.errors import ConfigError
from kvladder.runtime import SystemClock

FORMAT = "2"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""The first of these that a directory has is what its model is made of."""
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""What trainers leave beside weights under the same suffixes; no engine loads it."""
SETTINGS = "adapter_config.json"
"""What an adapter's weights are scaled with; a model's settings are told apart by its engine."""
THREADS = 4
CACHE_ENTRIES_MAX = 1000
_START_FIELD: Final = 19
"""Which field after the command's name says when a process began; see proc(5)."""


def weights_digest(path: Path, *, cache: Path | None = None) -> str:
    """Digest of the weights in a directory, or of one file.

    Every byte counts: a model is changed in a few rows of one tensor too, and whatever a sample
    does not see would be served with the other model's KV. What was found out is kept by path,
    size, inode and times, so files are read at the first start alone, at a few GB/s where the
    engine has just read them; see docs/decisions/0013-digests-of-whole-weights.md.

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
        raise ConfigError(what, path=where, hint="expected weights that can be read") from error
    return whole.hexdigest()


def read_weights_digest(name: str, *, revision: str | None = None) -> str:
    """Return the digest of the files that an engine in this process has read its weights from.

    ``name`` is a directory, a file, or a name on the Hugging Face hub, whose files never change.

    Raises
    ------
    ConfigError
        There are none, or they were replaced since this process began: the engine may have read
        those before or these, and nothing tells which.
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
            f"{late[0]} was replaced after the engine began: which weights it has is not known",
            path="model.fingerprint",
            hint="start the engine again; or set it to text of your own that changes whenever"
            " the weights do",
        )
    return digest


def replaced_since(path: Path, start_s: float) -> list[Path]:
    """List the weights' files, and ``path`` itself, that were written or renamed after a moment.

    ``start_s`` is in seconds since the epoch. A directory to which a file was added meanwhile
    counts only if that file does.
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


def weight_files(path: Path) -> list[Path]:
    """List the files that a directory's weights are in; ``path`` alone if it is a file.

    Engines load what lies in the directory itself, whatever lies below it, as a trainer's
    checkpoints do; only where there is nothing, files below count.
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
    """Files of weights that an index of the directory leaves out: engines do not load them."""
    found: set[str] = set()
    for suffix in SUFFIXES if path.is_dir() else ():
        for index in sorted(path.glob(f"*{suffix}.index*.json")):
            with suppress(
                ValueError, LookupError, AttributeError, TypeError
            ):  # then it leaves nothing out
                listed = {*json.loads(index.read_bytes())["weight_map"].values()}
                names = {file.name for file in files if file.name.endswith(suffix)}
                if listed <= names:
                    found |= names - listed
    return sorted(found)


def stamp(file: Path) -> str:
    """Another one when the file has been written to or replaced; raises OSError."""
    stat = file.stat()
    return f"{FORMAT} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"


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
        now = stamp(real)
        entry = self._entries.pop(str(real), None)
        if entry is None or entry[0] != now:
            entry = [now, _file_digest(real)]
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


def _file_digest(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxh3_128).hexdigest()


WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By size of an element, what its bits are read as; larger ones as several of 64 bits."""
PIECE: Final = 1 << 22
"""Words that are mixed at a time, 32 MiB each for a few intermediate results."""
STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
ROUNDS: Final = (
    (30, 0xBF58476D1CE4E5B9 - (1 << 64)),
    (27, 0x94D049BB133111EB - (1 << 64)),
    (31, 1),
)
"""Those of SplitMix64: the constants are what int64 makes of them."""


def model_digest(model: Any) -> str:
    """Digest of a model's configuration, and of every parameter and buffer that it saves."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    state = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        state.update(digest(value))
    return state.hexdigest()


def digest(tensor: torch.Tensor, device: torch.device | None = None) -> bytes:
    """Digest of all of a tensor's bits, computed where it lies or on ``device``: not the same."""
    device = tensor.device if device is None else device
    return on_host(tensor) if device.type == "cpu" else on_device(tensor, device)


def on_host(tensor: torch.Tensor) -> bytes:
    """Digest of all bytes of a tensor in host memory, of 128 bits."""
    flat = tensor.detach().reshape(-1).contiguous()
    return xxh3_128_digest(flat.view(torch.uint8).numpy().data)


def on_device(tensor: torch.Tensor, device: torch.device | None = None) -> bytes:
    """Digest of all bits of a tensor, of 64 bits, computed where it lies or on ``device``.

    Each word is mixed with its position and the results are summed, as integers: the order of a
    sum does not matter, and where one element differs, or two change places, the sum does.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    words = flat.view(WORDS.get(flat.element_size(), torch.int64))
    device = flat.device if device is None else device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), PIECE):
        mixed = words[start : start + PIECE].to(device).to(torch.int64, copy=True)
        mixed += torch.arange(start, start + len(mixed), device=device) * STEP
        for shift, factor in ROUNDS:
            mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
            mixed *= factor
        total += mixed.sum()
    return int(total).to_bytes(8, "little", signed=True)
