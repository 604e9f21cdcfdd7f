"""Every error that kvladder raises, on one page, named by what the caller does next.

A miss is a value, a failure is an exception, a bug is an assertion. No tier's failure reaches an
engine's request path: the stack turns it into a miss and a counter.
"""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager

PART_MAX = 400
"""Longest part of a message, in characters; a wrong value may be as long as a file."""


_WRONG_PATHS = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})


class KvladderError(Exception):
    """Base of every error that kvladder raises on purpose."""


class ConfigError(KvladderError, ValueError):
    """A setting is wrong: the message says where, what was found and what is expected instead.

    Parameters
    ----------
    message:
        The fault, in one sentence.
    path:
        The place: a path into the file such as ``tiers[1].capacity``, or an environment variable.
    hint:
        The correction, for example the nearest correct spelling.
    file:
        The file that the path leads into.
    """

    def __init__(self, message: str, *, path: str = "", hint: str = "", file: str = "") -> None:
        self.message = message
        self.path = path
        self.hint = hint
        self.file = file
        where = "".join(f"{_brief(part)}: " for part in (file, path) if part)
        instead = f" ({_brief(hint)})" if hint else ""
        super().__init__(f"{where}{_brief(message)}{instead}")


def _brief(text: str) -> str:
    """Return the beginning and the end of a long text."""
    return text if len(text) <= PART_MAX else f"{text[: PART_MAX // 2]}...{text[-PART_MAX // 4 :]}"


@contextmanager
def needed(extra: str) -> Generator[None]:
    """Add to the error of a library that is missing here which extra of kvladder installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvladder") or "install kvladder[" in error.msg:
            raise
        what = f"{error.msg}: install kvladder[{extra}]"
        raise ModuleNotFoundError(what, name=error.name) from error


class LayoutError(ConfigError):
    """The engine's KV layout cannot be stored without guessing."""


class ArenaError(KvladderError, RuntimeError):
    """A slot was used against its rules, e.g. released twice; nothing was changed."""


class ClosedError(KvladderError, RuntimeError):
    """The object was closed before the call."""


class TierError(KvladderError):
    """A tier could not do what it was asked. Never leaves the stack.

    ``temporary`` says whether the same call may succeed later. A timeout or a lost connection is
    temporary; a format of another version or a directory that is gone is not.
    """

    def __init__(self, message: str, *, temporary: bool = True) -> None:
        self.temporary = temporary
        super().__init__(message)


class Unavailable(TierError):
    """Something that a setting names is unavailable now: a full or failing disk, a server down.

    The two classes matter at a start. ``ConfigError`` means that the settings are wrong: only
    changing them helps, so the start fails. ``Unavailable``, like any other error of a tier, means
    that the environment is broken now. The cache starts without that part and retries, unless the
    level is ``required``.

    Parameters
    ----------
    message:
        The fault, in one sentence.
    path:
        The setting that names it, such as ``path``.
    hint:
        The remedy.
    """

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        self.message = message
        self.path = path
        self.hint = hint
        instead = f" ({_brief(hint)})" if hint else ""
        super().__init__(f"{_brief(message)}{instead}")


def refusal(error: BaseException, *, required: bool = True) -> ConfigError:
    """Return the error for a caller that cannot continue without the failed part.

    With ``required``, the message also offers to leave out the setting of this name.
    """
    message = str(error) if isinstance(error, TierError) else repr(error)
    path = hint = ""
    if isinstance(error, Unavailable):
        message, path, hint = error.message, error.path, error.hint
    if required:
        start = "leave out required: true, to start without this level"
        path, hint = path or "required", f"{hint}; or {start}" if hint else start
    return ConfigError(message, path=path, hint=hint)


def blames_settings(error: OSError) -> bool:
    """Return whether a path itself is wrong, such as a file used as a folder, or a loop.

    Any other error of the system may be gone tomorrow: a full, failing, read-only or forbidden
    medium, or too few file descriptors; see ``Unavailable``. A directory that does not exist is a
    wrong setting, too, but only the caller knows which part of its path is missing.
    """
    return error.errno in _WRONG_PATHS


class TierFull(TierError):
    """The medium has no room. The blocks were not stored; blocks stored before are intact."""


class PermissionDenied(TierError):
    """The medium does not let this client do it, and will not until the client's rights change.

    Raised by ``remove``, ``purge`` and ``survey``. The level does not try again: the blocks stay on
    the medium, and count as ``denied``.
    """

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message, temporary=temporary)


class PoolError(KvladderError, RuntimeError):
    """A block pool was used against its rules; nothing was changed."""


class NotHeld(PoolError):
    """A caller used or gave back blocks or a sequence that it does not hold."""


class NotReady(PoolError):
    """The sequence's blocks have not arrived yet, or were lost on the way: wait, or start over."""


class OutOfBlocks(PoolError):
    """More blocks were asked for than can be freed: wait for others to finish, or preempt one."""

    def __init__(self, needed: int, available: int) -> None:
        self.needed = needed
        self.available = available
        super().__init__(f"{needed} blocks are needed, {available} are available")


class BlocksBusy(OutOfBlocks):
    """The missing blocks are held by copies in flight: ask again when these have ended."""


class PlanError(ConfigError):
    """A model's resources contradict each other, or do not fit into the memory."""
