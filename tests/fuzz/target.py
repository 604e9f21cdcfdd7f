"""What a fuzz target is, and how it takes an input apart."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A part of kvladder that takes bytes of others.

    Parameters
    ----------
    about:
        What the bytes are.
    run:
        Gives them to the part. Raises nothing that the part does not document, and AssertionError
        if the part breaks a promise.
    seeds:
        Returns inputs that are valid, from which others are made.
    tokens:
        Pieces of bytes that mean something there.
    """

    about: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    tokens: Sequence[bytes] = ()


class Input:
    """Takes numbers from the front of an input; an empty one gives zeros."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def number(self, end: int) -> int:
        """Return a number below ``end``, which is at most 65,536."""
        count = 1 if end <= 256 else 2
        taken, self.rest = self.rest[:count], self.rest[count:]
        return int.from_bytes(taken, "little") % end

    def part(self, length: int) -> bytes:
        """Return the next bytes; fewer if there are no more."""
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def frames(self) -> Iterator[bytes]:
        """Yield what is left as frames: two bytes of length, little endian, and the content."""
        while self.rest:
            yield self.part(self.number(1 << 16))


def explained(error: Exception) -> None:
    """Take an error that is documented; it has to say something."""
    assert str(error), repr(error)


def framed(*frames: bytes) -> bytes:
    """Return frames as ``Input.frames`` reads them."""
    return b"".join(len(one).to_bytes(2, "little") + one for one in frames)


class TooLong(BaseException):  # no target takes it for an error of its part
    """An input took more processor time than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise ``TooLong`` once this process has used so much processor time; for the main thread.

    Time in which it waits, or others have the processor, does not count.
    """

    def end(_number: int, _frame: object) -> None:
        raise TooLong(f"took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    """Give constants of a module other values, and their own ones again at the end."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
