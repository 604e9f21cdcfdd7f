"""Stops what a program started when the program itself is stopped."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def exit_on_sigterm() -> None:
    """Leave all ``with`` blocks at SIGTERM, as at Ctrl-C, so that servers and engines end too.

    Only the main thread may call this. Python ends a process without that by default.
    """
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not break off the end
    sys.exit(128 + number)
