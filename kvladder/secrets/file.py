"""Reads secrets from a file that a setting names, and again when the file has changed."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvladder.errors import ConfigError

LINES_MAX: Final = 8
"""Largest number of secrets in a file: the new one, and those that still count."""


def read_secrets(file: str, setting: str, require: Callable[[str, str], object]) -> tuple[str, ...]:
    """Return the lines of a file; ``require`` raises ConfigError for a line that is no good secret.

    Parameters
    ----------
    file:
        The file's path.
    setting:
        The path of the setting that names the file.
    require:
        Gets a secret and the path of the setting.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is no such secret.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = f"{file}: {getattr(error, 'strerror', None) or error}"
        hint = "expected a readable file with one secret in each line"
        raise ConfigError(why, path=setting, hint=hint) from error
    found = tuple(line.strip() for line in text.strip().split("\n"))
    if len(found) > LINES_MAX:
        hint = f"expected at most {LINES_MAX}: remove old ones"
        raise ConfigError(f"{file}: {len(found)} lines", path=setting, hint=hint)
    for secret in found:
        require(secret, setting)
    return found


def exposed(file: str, setting: str) -> Iterator[str]:
    """Yield a warning if every user of the machine may read a secret's file.

    A group may: Kubernetes gives mounted secrets a group of the pod's own.
    """
    with suppress(OSError):  # its reader reports that
        if file and Path(file).stat().st_mode & stat.S_IROTH:
            yield f"{setting}: {file} can be read by every user: chmod o-r {file}"


class Secrets:
    """The secrets of one setting: the newest is used, and all are accepted.

    Those in a file are read again at each use. So an operator adds a line for a new secret before
    the old line, and removes the old line later. While the file is wrong, the secrets that it last
    had stay in effect.

    Parameters
    ----------
    given:
        The secret itself; empty if there is a file, or if there is none.
    file:
        The file's path.
    setting, require:
        See ``read_secrets``.
    say:
        Called with a kind and a text when the file has changed, or is wrong.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is no good secret.
    """

    def __init__(
        self,
        given: str = "",
        *,
        file: str = "",
        setting: str = "",
        require: Callable[[str, str], object] = lambda _secret, _setting: None,
        say: Callable[[str, str], object] = lambda _kind, _text: None,
    ) -> None:
        self._file = file
        self._setting = setting
        self._require = require
        self._say = say
        self._wrong = ""
        self._lines = self._read() if file else (given,) if given else ()

    def _read(self) -> tuple[str, ...]:
        return read_secrets(self._file, self._setting, self._require)

    def lines(self) -> tuple[str, ...]:
        """Return the secrets, the newest first; empty if none is set. Blocks to read the file."""
        if not self._file:
            return self._lines
        try:
            found = self._read()
        except ConfigError as error:
            if str(error) != self._wrong:
                self._wrong = str(error)
                self._say(self._setting, f"{error}: kvladder keeps the secrets that it had")
            return self._lines
        if found != self._lines or self._wrong:
            self._wrong, self._lines = "", found
            self._say(
                self._setting, f"{self._file} has changed; secrets in effect now: {len(found)}"
            )
        return self._lines
