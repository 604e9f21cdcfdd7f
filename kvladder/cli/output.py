"""What commands print, and what happens where nothing takes it."""

from __future__ import annotations

import os
import sys


class Unwritable(Exception):
    """Nothing takes what a command prints: a full disk, a pipe whose reader has ended."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        self.is_pipe = isinstance(error, BrokenPipeError)
        """Whether its reader has ended, as ``head`` does when it has enough."""


def say(text: object, end: str = "\n") -> None:
    """Print on standard output, at once.

    Raises
    ------
    Unwritable
        Nothing takes it; what is printed from then on is dropped.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # the end of the interpreter writes what is left
        os.close(nothing)
        raise Unwritable(error) from error
