"""A real S3 server for tests, moto's: on a free loopback port, ended by its process.

It keeps buckets in memory: one that is killed and started again has none.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvladder.testing.redisserver import free_ports

BUCKET = "blocks"
START_TIMEOUT_S = 300.0
ANSWER_S = 60.0
_TRIES_PER_S = 20
HEADERS = {  # of a request whose signature nobody checks
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request",
    "Content-Type": "application/octet-stream",
}


class ObjectServer:
    """One server process with a bucket; a context manager. What it logs is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._port = free_ports(1)[0]
        self._log = folder / f"moto-{self._port}.log"
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def options(self) -> dict[str, Any]:
        """How a tier reaches it."""
        return {
            "endpoint": self.address,
            "allow_http": True,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "hunter2",
        }

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, again on the same port, wait until it answers, make the bucket."""
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(int(START_TIMEOUT_S * _TRIES_PER_S)):
            with suppress(URLError, OSError):
                self.ask("PUT", BUCKET)
                return
            with suppress(subprocess.TimeoutExpired):  # a wait that ends with the process
                self._process.wait(1 / _TRIES_PER_S)
                raise AssertionError(self._log.read_text())
        raise AssertionError(f"no answer within {START_TIMEOUT_S:g} s")

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes | None:
        """What is answered to a plain request; None if nothing is there."""
        url = f"{self.address}/{path}"
        try:
            request = Request(url, data=body, method=method, headers=HEADERS)
            with urlopen(request, timeout=ANSWER_S) as answer:
                found: bytes = answer.read()
                return found
        except HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise

    def pause(self) -> None:
        """Stop the process where it is: its sockets stay open and nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
