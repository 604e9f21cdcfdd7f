"""``kvladder serve`` as a process of its own, and stacks of engines that use it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from kvladder.control.sockets import ask
from kvladder.testing.redisserver import free_ports
from kvladder.tiers.nixl.curve import make_keys
from tests.patience import PATIENCE_S

COMMAND = (
    f"import sys; from kvladder.tiers.ladder import batched; batched.ROOM_S = {PATIENCE_S}\n"
    "from kvladder.cli import main; sys.exit(main())"
)
"""The command, which waits for room as long as tests wait."""
_READY = re.compile(r"ready: clients at (\S+):(\d+), (\d+) blocks of up to (.*) in memory\n")


class Server:
    """A server in a folder, with a level of files; ended by ``stop`` or ``kill``."""

    python = sys.executable
    environment: Mapping[str, str] | None = None
    """The interpreter, and its environment if it is not this process's."""

    def __init__(
        self,
        folder: Path,
        *,
        block: str = "64 KiB",
        arena: str = "16 MiB",
        keys: Path | None = None,
        when: str = "evict",
        **export: str,
    ):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.file = folder / "server.yaml"
        self.keys = keys or folder / "keys"
        if not self.keys.exists():
            make_keys(self.keys)
        files = {"type": "files", "path": str(folder / "kv"), "capacity": "64 MiB", "when": when}
        anything = {"min_priority": 0}
        self.stack: dict[str, Any] = {
            "block": block,
            "arena": {"size": arena},
            "tiers": [{"type": "host", **anything}, {**files, **anything}],
            "export": {
                "listen": f"127.0.0.1:{free_ports(1)[0]}",
                "keys": str(self.keys / "server.keys"),
                **export,
            },
            "control": str(folder / "control"),
            "http": f"127.0.0.1:{free_ports(1)[0]}",
        }
        self._start()

    def _start(self) -> None:
        self.file.write_text(yaml.safe_dump(self.stack))
        self.process = subprocess.Popen(
            [self.python, "-c", COMMAND, "serve", str(self.file)],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder if self.environment else None,
        )
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            ready = _READY.fullmatch(line)
            assert ready, (line, self.process.communicate())
        except BaseException:  # nobody has this server yet who would end it
            self.kill()
            raise
        self.address = f"127.0.0.1:{ready[2]}"
        self.slots = int(ready[3])

    def level(self, **more: Any) -> dict[str, Any]:
        """The level of an engine that keeps its blocks there."""
        return {
            "name": "far",
            "type": "nixl",
            "servers": [self.address],
            "keys": str(self.keys / "client.keys"),
            "capacity": "64 MiB",
            "when": "commit",
            **more,
        }

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counters of the server."""
        found: dict[str, dict[str, Any]] = ask(
            self.folder / "control", {"command": "stats"}, timeout_s=PATIENCE_S
        )
        return found

    def stop(self, *, by: signal.Signals = signal.SIGTERM) -> int:
        """End it in the usual way; its exit code."""
        self.process.send_signal(by)
        out, _ = self.process.communicate()
        assert out == f"ended by {by.name}\n"
        return self.process.returncode

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()

    def again(self) -> None:
        """Start another server at the same address."""
        self.stack["export"]["listen"] = self.address
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
