"""What a process keeps to itself when it forks: locks and listening sockets.

A lock that ``flock`` took belongs to an open file, which a forked child inherits with its
descriptor: the lock would outlive its owner for as long as any such child lives. POSIX record locks
are not inherited, but they exclude nobody within the process, and any ``close`` of the same file
ends them. So descriptors that are ``owned`` are replaced in each child, right after the fork, by
ones that stand for nothing: their numbers stay taken, and a copy of the owner that is closed there
closes no file of somebody else. Programs that are executed inherit none of them in any case.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

_owned: set[int] = set()
_closing = threading.Lock()
"""Held while an owned descriptor is closed, and while the process forks."""


def own(fd: int) -> None:
    """Keep a descriptor from children that are forked from now on; it is closed in ``ending``.

    To be called before the lock is taken, so that no child is forked in between.
    """
    _owned.add(fd)


@contextmanager
def ending(fd: int) -> Generator[None]:
    """Keep the process from forking while a descriptor is closed, if it is owned."""
    if fd not in _owned:
        yield
        return
    with _closing:
        _owned.discard(fd)
        yield


def close(fd: int) -> None:
    """Close a descriptor, whether it is owned or not."""
    with ending(fd):
        os.close(fd)


def _begin_anew() -> None:
    """Replace in a child what belongs to its parent."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in _owned:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
    except OSError:  # no descriptor is left for that
        for fd in _owned:
            with suppress(OSError):
                os.close(fd)
    _owned.clear()
    _closing.release()


os.register_at_fork(
    before=_closing.acquire, after_in_parent=_closing.release, after_in_child=_begin_anew
)
