"""Keeps locks and listening sockets from forked children.

A lock taken with ``flock`` belongs to an open file, and a forked child inherits that file with its
descriptor. So the lock would stay taken as long as any such child lives. POSIX record locks are not
inherited, but they exclude no other thread of the process, and any ``close`` of the same file
releases them.

So right after a fork, the child replaces each owned descriptor by one of ``/dev/null``. The number
stays taken: when the child's copy of the owner closes it, no unrelated file is closed. Executed
programs never inherit owned descriptors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

_owned: set[int] = set()
_closing = threading.Lock()
"""Lock that is held while an owned descriptor is closed, and while the process forks."""


def own(fd: int) -> None:
    """Keep a descriptor from all children forked from now on; close it within ``ending``.

    Call it before taking a lock on the descriptor, so that no child is forked in between.
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
    """Replace, in a child, the descriptors that its parent owns."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in _owned:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
    except OSError:  # the process has no free descriptor for /dev/null
        for fd in _owned:
            with suppress(OSError):
                os.close(fd)
    _owned.clear()
    _closing.release()


os.register_at_fork(
    before=_closing.acquire, after_in_parent=_closing.release, after_in_child=_begin_anew
)
