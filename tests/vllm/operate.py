"""An operator's actions on a running engine, from a separate process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from kvladder.control.sockets import ask
from tests.patience import PATIENCE_S
from tests.vllm.harness import stored_payloads

CLI = "import sys; from kvladder.cli import main; sys.exit(main())"


def command(*arguments: str) -> dict[str, Any]:
    """Run ``kvladder`` with these arguments; return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-c", CLI, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def told(engine: Any, *, arguments: list[str]) -> dict[str, Any]:
    """A command while the engine has nothing to do."""
    del engine
    return command(*arguments)


def until(engine: Any, *, path: str) -> None:
    """Wait until this file exists."""
    del engine
    while not Path(path).exists():
        time.sleep(0.05)


def kill(engine: Any, *, pid: int) -> None:
    """The end of a process that the engine depends on."""
    del engine
    os.kill(pid, signal.SIGKILL)


def purged(
    engine: Any, *, config: str, salt: str, files: str, serves: dict[str, Any]
) -> dict[str, Any]:
    """Purge while the engine serves another tenant."""
    results: dict[str, Any] = {"before": len(stored_payloads(Path(files)))}

    def operator() -> None:
        results["purge"] = command("purge", config, "--salt", salt)

    thread = threading.Thread(target=operator)
    thread.start()
    results["served"] = []
    while thread.is_alive() or not results["served"]:
        engine.reset()
        results["served"].append(engine.each(**serves))
    thread.join()
    results["after"] = len(stored_payloads(Path(files)))
    return results


def forgotten(engine: Any, *, control: str, token: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Purge over the HTTP port, as a service does; return the answer."""
    del engine
    listens = ask(Path(control), {"command": "status"})["listens"]
    url = next(one for one in listens if "://" in one).rstrip("/")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(f"{url}/purge", json.dumps(scope).encode(), headers)
    with urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def fill_disk(engine: Any) -> None:
    """From now on the disk has no room for another segment."""
    del engine

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = refuse
