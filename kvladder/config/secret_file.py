"""Reads a secret from a file that a setting names."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvladder.errors import ConfigError


def read_secret(file: str, setting: str, require: Callable[[str, str], None]) -> str:
    """Return the only line of a file; ``require`` raises ConfigError if it is no good secret.

    Parameters
    ----------
    file:
        The file's path.
    setting:
        The path of the setting that names the file.
    require:
        Gets the secret and the path of the setting.

    Raises
    ------
    ConfigError
        The file cannot be read, or holds no such secret.
    """
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = f"{file}: {getattr(error, 'strerror', None) or error}"
        hint = "expected a readable file with one line"
        raise ConfigError(why, path=setting, hint=hint) from error
    require(secret, setting)
    return secret


def exposed(file: str, setting: str) -> Iterator[str]:
    """Yield a warning if every user of the machine may read a secret's file.

    A group may: Kubernetes gives mounted secrets a group of the pod's own.
    """
    with suppress(OSError):  # its reader reports that
        if file and Path(file).stat().st_mode & stat.S_IROTH:
            yield f"{setting}: {file} can be read by every user: chmod o-r {file}"
