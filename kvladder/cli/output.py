"""Prints what commands return, and reports when standard output cannot be written."""

from __future__ import annotations

import os
import sys


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
