"""Reads secrets from a file that a setting names, and again when the file has changed."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvladder.errors import ConfigError

T = TypeVar("T")
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


class FileReader(Generic[T]):
    """Reads a file again on request. While it is wrong, its last good value stays in effect.

    Parameters
    ----------
    read:
        Returns what the file says now; it raises ConfigError if the file is wrong.
    say:
        Called with a text when the file is wrong, once for each reason.
    what:
        Name of the value for users.
    """

    def __init__(self, read: Callable[[], T], say: Callable[[str], object], what: str) -> None:
        self._read = read
        self._say = say
        self._what = what
        self._wrong = ""
        self.value = read()

    def renew(self) -> tuple[bool, bool]:
        """Read the file, which blocks.

        Return whether the value is another one, and whether the file was wrong until now.
        """
        try:
            found = self._read()
        except ConfigError as error:
            if str(error) != self._wrong:
                self._wrong = str(error)
                self._say(f"{error}: kvladder keeps the {self._what} that it had")
            return False, False
        was_wrong, self._wrong = bool(self._wrong), ""
        is_other, self.value = found != self.value, found
        return is_other, was_wrong


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
        self._given = (given,) if given else ()
        self._changed = partial(say, setting)
        self._file = file
        self._reader: FileReader[tuple[str, ...]] | None = None
        if file:
            read = partial(read_secrets, file, setting, require)
            self._reader = FileReader(read, partial(say, setting), "secrets")

    def lines(self) -> tuple[str, ...]:
        """Return the secrets, the newest first; empty if none is set. Blocks to read the file."""
        if self._reader is None:
            return self._given
        if any(self._reader.renew()):
            count = len(self._reader.value)
            self._changed(f"{self._file} has changed; secrets in effect now: {count}")
        return self._reader.value
