"""Control sockets in the file system: their names, who has one, and asking one."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from kvladder.errors import ConfigError

WHERE: Final = "control.path"
MODE: Final = 0o600
NAME_BYTES_MAX: Final = 107
"""What the name of a Unix-domain socket may have."""
REPLY_BYTES_MAX: Final = 16 << 20
CONNECT_S: Final = 5.0
_USER_HINT: Final = "ask as the user that runs the engine, or as root"
_OTHER_HINT: Final = "give each engine its own, for example with ${NAME}"
_RUNNING_HINT: Final = "expected the socket of a running cache"


def socket_path(path: str, instance: int) -> Path:
    """The socket of one of several engines with one setting: of the second ``kv.dp1.sock``."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.dp{instance}{whole.suffix}") if instance else whole


def sockets(path: str) -> list[Path]:
    """The sockets that engines with this setting may have made, as far as they exist.

    Raises
    ------
    ConfigError
        It cannot be told: the directory may not be looked into.
    """
    whole = Path(path)
    name = re.compile(rf"{re.escape(whole.stem)}(\.dp[0-9]+)?{re.escape(whole.suffix)}")
    found: list[Path] = []
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            found = [one for one in whole.parent.iterdir() if name.fullmatch(one.name)]
            found.sort(key=lambda one: (len(one.name), one.name))
        return list(filter(_is_socket, found))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=WHERE, hint=_USER_HINT) from error


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:  # its engine has ended meanwhile
        return False


def require_name(path: Path) -> None:
    """Raise ConfigError if there can be no socket of this name, OSError if that cannot be told."""
    if len(os.fsencode(path)) > NAME_BYTES_MAX:
        hint = f"a socket's name has at most {NAME_BYTES_MAX} bytes"
        raise ConfigError(str(path), path=WHERE, hint=hint)
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is no socket", path=WHERE, hint="choose another name")


class BoundSocket:
    """A socket at a path that is this process's alone, until ``close`` removes it.

    A lock beside it tells a socket that is served from one that a killed process left, which is
    replaced. Nobody but this user may connect.

    Raises
    ------
    ConfigError
        The path cannot be had.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        try:
            require_name(path)
            self._lock_fd = self._locked()
            try:
                self.socket = self._bound()
            except BaseException:
                self._unlock()
                raise
        except OSError as error:
            why = error.strerror or str(error)
            hint = "expected a name in a directory that this user may write to"
            raise ConfigError(f"{path}: {why}", path=WHERE, hint=hint) from error

    def _locked(self) -> int:
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._lock_path, flags, MODE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self._lock_path.stat()):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                    return fd
            except FileNotFoundError:
                pass  # its owner has ended and removed it meanwhile
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                taken = f"{self.path} is in use by process {owner}"
                raise ConfigError(taken, path=WHERE, hint=_OTHER_HINT) from None
            os.close(fd)

    def _bound(self) -> socket.socket:
        """Who connects is refused until somebody listens: then it is this user's alone."""
        self.path.unlink(missing_ok=True)  # what a killed process left
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound.bind(str(self.path))
            self.path.chmod(MODE)
        except BaseException:
            bound.close()
            raise
        return bound

    def _unlock(self) -> None:
        with suppress(OSError):
            self._lock_path.unlink()
        os.close(self._lock_fd)

    def close(self) -> None:
        """Remove it, and let the next process have the name; called once."""
        with suppress(OSError):
            self.path.unlink()
        self.socket.close()
        self._unlock()


class NotAnswering(ConfigError):
    """There is no answer, or not one of a running cache."""


class NobodyThere(NotAnswering):
    """Nobody listens at the socket: its process was killed, or has removed it meanwhile."""


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float = 10.0) -> Any:
    """Send one request to a running cache and return its result.

    Parameters
    ----------
    path:
        Its control socket.
    request:
        ``command`` and what belongs to it, see ``docs/control.md``.
    timeout_s:
        How long the answer may take.

    Raises
    ------
    NobodyThere
        Nobody listens there.
    NotAnswering
        Somebody may, but this user may not ask, or there is no answer in time.
    ConfigError
        The cache refuses the request: says why.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        try:
            stream.settimeout(min(CONNECT_S, timeout_s))
            try:
                stream.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError) as error:
                why = f"no answer: {error.strerror}"
                raise NobodyThere(why, path=str(path), hint=_RUNNING_HINT) from error
            stream.settimeout(timeout_s)
            stream.sendall(msgspec.json.encode(request) + b"\n")
            with stream.makefile("rb") as answers:
                data = answers.readline(REPLY_BYTES_MAX)
            if not data.endswith(b"\n"):
                raise ConnectionError("it hung up, or said too much")
        except OSError as error:
            why = error.strerror or str(error)
            hint = _USER_HINT if isinstance(error, PermissionError) else _RUNNING_HINT
            raise NotAnswering(f"no answer: {why}", path=str(path), hint=hint) from error
    try:
        reply = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise NotAnswering(f"{error}", path=str(path), hint="is it kvladder's?") from error
    if "error" in reply:
        raise ConfigError(str(reply["error"]), path=str(path))
    return reply.get("result")
