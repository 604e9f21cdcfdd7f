"""A child process that can be ended reliably; after its end it touches no mapped memory."""

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
"""Seconds from the end of a child to the next start, first and at most; doubled at each failure."""


class Spawned:
    """A child process and a connection to it. Call ``end`` on the loop that started it.

    The child does not outlive the thread of that loop.
    """

    def __init__(
        self,
        module: str,
        fd: int,
        descriptors: Sequence[int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Start the child and watch it; after a failure no child runs, and ``writer`` is closed."""
        self.reader = reader
        self.writer = writer
        self._why = ""
        path = os.pathsep.join(part or "." for part in sys.path)
        child: subprocess.Popen[bytes] | None = None
        try:
            child = subprocess.Popen(  # noqa: S603 - it ends with this thread
                # -P: no modules from the current folder, unless this process imports them, too
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
        """Start a child that runs a module, which calls ``run``, and inherits these descriptors.

        Nothing is awaited after the child was started. Raises OSError if it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return cls(module, theirs.fileno(), descriptors, reader, writer)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    @property
    def how(self) -> str:
        """Reason of the child's end: as given to ``kill``, or the exit status or signal."""
        code = self._child.returncode
        return self._why or (f"exit status {code}" if code >= 0 else signal.Signals(-code).name)

    def kill(self, why: str = "") -> None:
        """Kill the child at once; ``how`` then says ``why``."""
        if self._child.returncode is None:  # not waited for yet, so its pidfd is still open
            self._why = self._why or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the child and wait until the kernel reports its death, even if cancelled."""
        self.kill()
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, dead.set)
        while not dead.is_set():
            with suppress(asyncio.CancelledError):  # until then it may write into slots
                await dead.wait()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._child.wait()
        self.writer.close()


async def start_again(
    start: Callable[[], Awaitable[object]], failed: Callable[[Exception], object]
) -> None:
    """Call ``start`` until it succeeds, with pauses; call ``failed`` with each error."""
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
    """Run as the child: ``serve`` the parent until its connection ends; die with the parent."""
    parent, fd = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(0)
    for ending in (signal.SIGINT, signal.SIGTERM):  # a terminal sends these to a whole group
        signal.signal(ending, signal.SIG_IGN)  # the parent may still have blocks to store
    status = 0
    try:
        asyncio.run(_serve(serve, fd))
    except BaseException:  # noqa: BLE001 - the other side hears of an end
        traceback.print_exc()
        status = 1
    os._exit(status)  # skips the interpreter's shutdown, since threads of a library may hang


async def _serve(serve: Serve, fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    with suppress(ConnectionError):
        await serve(reader, writer)
