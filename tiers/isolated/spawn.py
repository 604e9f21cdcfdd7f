"""A child process and its sure end: from then on it touches nothing that it mapped."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self

from kvladder.errors import ConfigError, TierError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
RETRY_S, RETRY_MAX_S = 0.2, 30.0
"""From the end of a child to the next start; doubled each time that fails."""


class Spawned:
    """A child, and a connection to it. Whoever started it ends it, on the same loop.

    It does not outlive the thread of that loop.
    """

    def __init__(
        self,
        module: str,
        fd: int,
        descriptors: Sequence[int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Start it and watch it; if that fails there is none, and the connection is closed."""
        self.reader = reader
        self.writer = writer
        self._why = ""
        path = os.pathsep.join(part or "." for part in sys.path)
        child: subprocess.Popen[bytes] | None = None
        try:
            child = subprocess.Popen(  # noqa: S603 - it ends with this thread
                # -P: a module of the current folder is not ours, unless this process imports it too
                [sys.executable, "-P", "-m", module, str(os.getpid()), str(fd)],
                pass_fds=(fd, *descriptors),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._pidfd = os.pidfd_open(child.pid)
        except OSError:
            writer.close()
            if child is not None:
                child.kill()
                child.wait()
            raise
        self._child = child

    @classmethod
    async def start(cls, module: str, descriptors: Sequence[int] = ()) -> Self:
        """Have a child run a module, which calls ``run``; it inherits these descriptors.

        Nothing is awaited once there is a child. Raises OSError if there can be none.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return cls(module, theirs.fileno(), descriptors, reader, writer)

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    @property
    def how(self) -> str:
        """How it ended."""
        code = self._child.returncode
        return self._why or (f"exit status {code}" if code >= 0 else signal.Signals(-code).name)

    def kill(self, why: str = "") -> None:
        """End it at once; ``why`` is what ``how`` says then."""
        if self._child.returncode is None:  # not waited for: its process id is its own
            self._why = self._why or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and wait until it is dead, which the kernel tells, however often cancelled."""
        self.kill()
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, dead.set)
        while not dead.is_set():
            with suppress(asyncio.CancelledError):  # its slots are not free before
                await dead.wait()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._child.wait()
        self.writer.close()


async def start_again(
    start: Callable[[], Awaitable[object]], failed: Callable[[Exception], object]
) -> None:
    """Try to ``start`` until it can be done; ``failed`` is told why not, each time."""
    wait_s = RETRY_S
    while True:
        await asyncio.sleep(wait_s)
        try:
            await start()
            return
        except (TierError, ConfigError) as error:
            failed(error)
            wait_s = min(2 * wait_s, RETRY_MAX_S)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def run(serve: Serve) -> None:
    """Be such a child: ``serve`` the parent until it is gone, by whose death this one ends."""
    parent, fd = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that took effect
        os._exit(0)
    for ending in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group, as by a terminal
        signal.signal(ending, signal.SIG_IGN)  # the parent still has something to store
    status = 0
    try:
        asyncio.run(_serve(serve, fd))
    except BaseException:  # noqa: BLE001 - the other side hears of an end
        traceback.print_exc()
        status = 1
    os._exit(status)  # not by the end of the interpreter: threads of a library may hang


async def _serve(serve: Serve, fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    with suppress(ConnectionError):
        await serve(reader, writer)
