"""Prints what commands return, and reports when standard output cannot be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any, Final, NamedTuple

import msgspec

from kvladder.errors import KvladderError

EXIT_SIGNAL: Final = 128
"""The exit code that a shell reports for a program ended by a signal, less its number."""


class Result(NamedTuple):
    """What a command prints: text for people, and the same as plain data for ``--json``."""

    text: str
    data: Any


Results = Generator[Result, None, None]


class Failed(KvladderError):
    """A command did its work, and exits with a code other than 0; ``result`` is printed first."""

    def __init__(self, what: str, code: int, result: Result | None = None) -> None:
        super().__init__(what)
        self.code = code
        self.result = result


class Unwritable(Exception):
    """Standard output cannot be written: the disk is full, or the reader of the pipe has ended."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        self.is_pipe = isinstance(error, BrokenPipeError)
        """True if output is a pipe and its reader has ended, as ``head`` does."""


def say(text: object, end: str = "\n") -> None:
    """Print on standard output and flush.

    Raises
    ------
    Unwritable
        Standard output cannot be written. Everything printed afterwards is dropped.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # the interpreter flushes the rest when it exits
        os.close(nothing)
        raise Unwritable(error) from error


def say_result(found: Result | Results, *, as_json: bool) -> None:
    """Print one result, or several as they come; with ``as_json`` these are one line each.

    Raises
    ------
    Unwritable
        Standard output cannot be written.
    """
    if isinstance(found, Result):
        say(msgspec.json.format(_json(found.data), indent=2) if as_json else found.text)
        return
    with closing(found):
        for one in found:
            say(_json(one.data) if as_json else one.text)


def _json(data: Any) -> str:
    return msgspec.json.encode(data, enc_hook=_plain).decode()


def _plain(value: Any) -> int | float | str:
    """Return a value of a type of our own, such as ``Size``, as one that JSON has."""
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str(value)
