"""Reads a secret from a file that a setting names."""

from __future__ import annotations

from collections.abc import Callable
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
