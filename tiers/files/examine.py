"""A files tier's directory, looked at before anything is made there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from kvladder.errors import ConfigError
from kvladder.units import Size


def space(directory: Path) -> tuple[int, int]:
    """Bytes that are free on the file system of ``directory``, and bytes that it holds itself.

    The directory need not exist; OSError if its file system does not answer.
    """
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    info = os.statvfs(existing)
    held = sum(
        (Path(folder) / name).lstat().st_blocks * 512
        for folder, _, names in os.walk(directory)
        for name in names
    )
    return info.f_bavail * info.f_frsize, held


def examine(
    directory: Path, capacity_bytes: int, direct: bool | None, warn: Callable[[str], object]
) -> Mapping[str, str]:
    """What a files tier would find; nothing stays of what is tried there.

    Raises
    ------
    ConfigError
        The directory cannot be used.
    """
    try:
        target = directory if directory.exists() else directory.parent
        if not target.is_dir():
            wrong = "is no directory" if target.exists() else "does not exist"
            hint = "expected a directory, or a new one in a directory that exists"
            raise ConfigError(f"{target} {wrong}", path="path", hint=hint)
        if not os.access(target, os.R_OK | os.W_OK | os.X_OK):
            hint = f"expected a directory that user {os.geteuid()} may write"
            raise ConfigError(f"{target} cannot be written", path="path", hint=hint)
        free, held = space(directory)
        takes = _takes_direct(target)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(
            f"{directory}: {why}", path="path", hint="expected a directory"
        ) from error
    if direct and takes is False:
        hint = "leave it out, or choose another file system"
        raise ConfigError("this file system has no direct I/O", path="direct", hint=hint)
    if capacity_bytes > free + held:
        warn(
            f"capacity is {Size(capacity_bytes).about()}, and {directory} has room for"
            f" {Size(free + held).about()}: what does not fit is not kept"
        )
    return {
        "directory": f"{directory}{'' if directory.exists() else ' (will be made)'}",
        "free": f"{Size(free).about()}, and {Size(held).about()} are held there",
        "direct I/O": "no" if direct is False or not takes else "yes",
    }


def _takes_direct(directory: Path) -> bool:
    """Whether files in ``directory`` can be read and written around the page cache."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".kvladder-") as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
