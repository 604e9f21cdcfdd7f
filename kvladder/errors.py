"""Every error kvladder raises, on one page, named by what the caller does next.

A miss is a value, a failure is an exception, a bug is an assertion. Nothing here ever reaches an
engine's request path: the stack turns a failing tier into a miss and a counter.
"""

from __future__ import annotations

import errno

PART_MAX = 400
"""Characters of each part of a message: what is wrong may be as long as a file."""


_WRONG_PATHS = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})


class KvladderError(Exception):
    """Base of every error raised on purpose by kvladder."""


class ConfigError(KvladderError, ValueError):
    """A setting is wrong: the message says where, what was found and what is expected instead.

    Parameters
    ----------
    message:
        What is wrong, in one sentence.
    path:
        Where: a path into the file such as ``tiers[1].capacity``, or an environment variable.
    hint:
        What would be right, for example the nearest right spelling.
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
    """What a person reads of a long text: its beginning and its end."""
    return text if len(text) <= PART_MAX else f"{text[: PART_MAX // 2]}...{text[-PART_MAX // 4 :]}"


class LayoutError(ConfigError):
    """The engine's KV layout is not one that can be stored without guessing."""


class ArenaError(KvladderError, RuntimeError):
    """A slot was used against its rules, e.g. released twice; nothing was changed."""


class ClosedError(KvladderError, RuntimeError):
    """The object was closed before the call."""


class TierError(KvladderError):
    """A tier could not do what it was asked. Never leaves the stack.

    ``temporary`` says whether the same call may succeed later (a time-out, a lost connection) or
    not (a format of another version, a directory that is gone).
    """

    def __init__(self, message: str, *, temporary: bool = True) -> None:
        self.temporary = temporary
        super().__init__(message)


class Unavailable(TierError):
    """What a setting names cannot be used now: a full or failing disk, a server that is down.

    This is the line at a start. ``ConfigError`` means that the settings are wrong: nothing but a
    change of them helps, so the start fails. ``Unavailable``, like any other error of a tier, means
    that the world is broken today: the cache starts without that part and tries again, unless the
    level is ``required``.

    Parameters
    ----------
    message:
        What was found, in one sentence.
    path:
        The setting that names it, such as ``path``.
    hint:
        What to do about it.
    """

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        self.message = message
        self.path = path
        self.hint = hint
        instead = f" ({_brief(hint)})" if hint else ""
        super().__init__(f"{_brief(message)}{instead}")


def refusal(error: BaseException, *, required: bool = True) -> ConfigError:
    """Return the error for a caller that cannot go on without what failed.

    ``required`` says that this is so because of the setting of this name.
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
    """Return whether a path is wrong whatever state the machine is in: a file as a folder, a loop.

    Any other error of the system (a full, failing, read-only or forbidden medium, too few file
    descriptors) may be gone tomorrow: see ``Unavailable``. A directory that does not exist is a
    wrong setting, too, but where exactly it is missing only the caller knows.
    """
    return error.errno in _WRONG_PATHS


class TierFull(TierError):
    """The medium has no room; the blocks were not stored, what was stored before is intact."""


class PoolError(KvladderError, RuntimeError):
    """A block pool was used against its rules; nothing was changed."""


class NotHeld(PoolError):
    """Blocks or a sequence were used or given back by a caller who does not hold them."""


class NotReady(PoolError):
    """The sequence's blocks have not arrived yet, or were lost on the way: wait, or begin anew."""


class OutOfBlocks(PoolError):
    """More blocks were asked for than can be freed: wait for others to finish, or preempt one."""

    def __init__(self, needed: int, available: int) -> None:
        self.needed = needed
        self.available = available
        super().__init__(f"{needed} blocks are needed, {available} can be had")


class BlocksBusy(OutOfBlocks):
    """Copies under way hold the blocks that are missing: ask again when they have ended."""


class PlanError(ConfigError):
    """A model's resources contradict each other, or do not fit into the memory."""
