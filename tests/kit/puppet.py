"""A process that executes a test's commands: lines of JSON in, a line of JSON out for each."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast


class Puppet:
    """Runs a function of a module with arguments; it says ``ready`` when it is.

    Parameters
    ----------
    log:
        The file for its standard error.
    python, path:
        Another interpreter, and the only folder of this tree that it imports from.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        log: Path,
        *,
        name: str = "main",
        python: Path | None = None,
        path: Path | None = None,
    ) -> None:
        self._log = log
        command = [str(python or sys.executable)]
        command += ["-c", f"from {module} import {name}; {name}()"]
        parts = [str(path)] if path else [part or "." for part in sys.path]
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [*command, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)},
                cwd=path,
            )
        self.ready = self._answer()

    def __call__(self, call: str, *arguments: Any) -> Any:
        """Execute a command; bytes are passed and returned as such."""
        assert self.process.stdin is not None
        print(line(call, *arguments), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        """The next line that is one: libraries print, too."""
        assert self.process.stdout is not None
        while not (said := self.process.stdout.readline()).startswith("["):
            assert said, self._log.read_text()
        return heard(said)[0]

    def kill(self, sent: int = signal.SIGKILL) -> None:
        """Send it a signal. After SIGKILL, wait for its end; after SIGSTOP, for all its threads."""
        self.process.send_signal(sent)
        if sent == signal.SIGKILL:
            self.process.communicate()
        while sent == signal.SIGSTOP and not self._is_stopped():  # a busy machine takes a while
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def line(*values: object) -> str:
    """Values as one line."""
    return json.dumps([_packed(value) for value in values])


def heard(said: str | bytes) -> list[Any]:
    """The values of a line."""
    return [_unpacked(value) for value in json.loads(said)]


def _packed(value: object) -> object:
    if isinstance(value, list):
        return [_packed(one) for one in cast("list[object]", value)]
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(one) for one in value]
    is_bytes = isinstance(value, dict) and "bytes" in value
    return base64.b64decode(value["bytes"]) if is_bytes else value
