"""Control sockets in the file system: their names, their owners, and requests to them."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec

from kvladder.errors import ConfigError, Unavailable, blames_settings
from kvladder.tiers import forks

WHERE: Final = "control.path"
MODE: Final = 0o600
NAME_BYTES_MAX: Final = 107
"""Longest name of a Unix-domain socket."""
REPLY_BYTES_MAX: Final = 16 << 20
CONNECT_S: Final = 5.0
PEER_S: Final = 0.2
"""Time limit for finding out which process listens at a socket."""
POSTED: Final = frozenset({"purge", "receipt", "change", "drain", "warm", "hottest"})
"""Commands that are sent as ``POST``, with their arguments."""
_USER_HINT: Final = "ask as the user that runs the engine, or as root"
_OTHER_HINT: Final = "end that process, or give each engine its own socket, e.g. with ${NAME}"
_PEER: Final = Struct("iII")
_RUNNING_HINT: Final = "expected the socket of a running cache"


def socket_path(path: str, instance: int) -> Path:
    """Return the socket of engine ``instance`` with this setting: ``kv.dp1.sock`` for 1."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.dp{instance}{whole.suffix}") if instance else whole


def sockets(path: str) -> list[Path]:
    """Return the existing sockets that engines with this setting may have made.

    Raises
    ------
    ConfigError
        The directory cannot be read.
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
    """Raise ConfigError if no socket can have this name, OSError if that cannot be checked."""
    try:
        path.parent.stat()
    except FileNotFoundError as error:
        what = f"{path}: {error.strerror}"
        raise ConfigError(what, path=WHERE, hint="expected a directory that exists") from error
    if len(os.fsencode(path)) > NAME_BYTES_MAX:
        hint = f"expected a path of at most {NAME_BYTES_MAX} bytes"
        raise ConfigError(str(path), path=WHERE, hint=hint)
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            what = f"{path} exists and is not a socket"
            raise ConfigError(what, path=WHERE, hint="choose another name")


class BoundSocket:
    """A bound socket that belongs to this process alone, until ``close`` removes it.

    A lock file beside it distinguishes a served socket from one that a killed process left; such a
    socket is replaced. Only this user may connect. The constructor blocks for a moment.

    Raises
    ------
    ConfigError
        No socket can have this name.
    Unavailable
        Another process has it, or the file system does not allow to make it now.
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
            kind = ConfigError if blames_settings(error) else Unavailable
            raise kind(f"{path}: {why}", path=WHERE, hint=hint) from error

    @property
    def name(self) -> str:
        """Path of the socket."""
        return str(self.path)

    def _locked(self) -> int:
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._lock_path, flags, MODE)
            is_kept = False
            try:
                forks.own(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self._lock_path.stat()):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                    is_kept = True
                    return fd
            except FileNotFoundError:
                pass  # its owner has ended and removed it meanwhile
            except BlockingIOError:
                raise Unavailable(self._owned(fd), path=WHERE, hint=_OTHER_HINT) from None
            finally:
                if not is_kept:
                    forks.close(fd)

    def _owned(self, lock_fd: int) -> str:
        """Return a sentence that names the owner: the listening process, else the lock file's."""
        process = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PEER_S)
            probe.connect(str(self.path))
            told = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            process = str(_PEER.unpack(told)[0] or process)  # 0 if it is in another container
        return f"{self.path} is in use by process {process or 'unknown'}"

    def _bound(self) -> socket.socket:
        """Bind without listening: connections are refused until access is limited to this user."""
        self.path.unlink(missing_ok=True)  # left by a killed process
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            forks.own(bound.fileno())
            bound.bind(str(self.path))
            self.path.chmod(MODE)
        except BaseException:
            with forks.ending(bound.fileno()):
                bound.close()
            raise
        return bound

    def _unlock(self) -> None:
        if self._is_ours:
            with suppress(OSError):
                self._lock_path.unlink()
        forks.close(self._lock_fd)

    @property
    def _is_ours(self) -> bool:
        """True if this process owns the files, not the parent that it was forked from."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._lock_fd), self._lock_path.stat())
        return False

    def close(self) -> None:
        """Remove it, so that the next process can have the name; called once."""
        if self._is_ours:
            with suppress(OSError):
                self.path.unlink()
        with forks.ending(self.socket.fileno()):
            self.socket.close()
        self._unlock()


class NotAnswering(ConfigError):
    """There is no answer, or not the answer of a running cache."""


class NobodyThere(NotAnswering):
    """No process listens at the socket: it was killed, or has removed the socket meanwhile."""


class UnixConnection(HTTPConnection):
    """A connection of the standard library's client to a Unix-domain socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(min(CONNECT_S, self.timeout or CONNECT_S))
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.timeout)


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float = 10.0) -> Any:
    """Send one request to a running cache and return its result.

    Parameters
    ----------
    path:
        The cache's control socket.
    request:
        ``command`` (``stats``, ``describe``, ``status``, or one of ``POSTED``) and its arguments,
        see ``docs/how-to/control.md``.
    timeout_s:
        Time limit for the answer, in seconds.

    Raises
    ------
    NobodyThere
        No process listens there.
    NotAnswering
        A process may listen, but this user may not ask it, or it does not answer in time.
    ConfigError
        The cache refuses the request; the message says why.
    """
    command = request["command"]
    arguments = {name: value for name, value in request.items() if name != "command"}
    try:
        with closing(UnixConnection(path, timeout_s)) as client:
            if command in POSTED:
                body = msgspec.json.encode(arguments)
                kind = {"Content-Type": "application/json"}
                client.request("POST", f"/{command}", body, kind)
            else:
                client.request("GET", "/describe" if command == "describe" else "/status")
            answer = client.getresponse()
            status, data = answer.status, answer.read(REPLY_BYTES_MAX)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        why = f"no answer: {error.strerror}"
        raise NobodyThere(why, path=str(path), hint=_RUNNING_HINT) from error
    except OSError as error:
        why = error.strerror or str(error)
        hint = _USER_HINT if isinstance(error, PermissionError) else _RUNNING_HINT
        raise NotAnswering(f"no answer: {why}", path=str(path), hint=hint) from error
    except HTTPException as error:
        why = f"not HTTP: {error!r}"
        raise NotAnswering(why, path=str(path), hint=_RUNNING_HINT) from error
    if command == "describe" and status == HTTPStatus.OK:
        return data.decode()
    try:
        reply = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotAnswering(f"not JSON: {error}", path=str(path), hint=_RUNNING_HINT) from error
    if status != HTTPStatus.OK:
        raise ConfigError(str(reply.get("error", status)), path=str(path))
    return reply["stats"] if command == "stats" else reply
