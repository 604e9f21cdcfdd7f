"""Writes statistics to a file while an engine runs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvladder.notices import Notices

EVERY_S = 1.0


class StatsFile:
    """A thread that writes statistics as JSON, whole or not at all, when they have changed."""

    def __init__(
        self,
        path: Path,
        stats: Callable[[], Mapping[str, object]],
        *,
        notices: Notices,
        every_s: float = EVERY_S,
    ) -> None:
        self._path = path
        self._stats = stats
        self._notices = notices
        self._every_s = every_s
        self._written = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvladder-stats", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.wait(self._every_s):
            self.write()

    def write(self) -> None:
        """Write now, if anything has changed."""
        text = json.dumps(self._stats(), indent=1)
        if text == self._written:
            return
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            aside.write_text(text)
            aside.replace(self._path)
        except OSError as error:
            self._notices.say("statistics", f"statistics cannot be written: {error}")
            text = ""
        self._written = text

    def close(self) -> None:
        """End the thread; the last statistics are written. May be called again."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self.write()
