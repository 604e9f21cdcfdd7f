"""A real S3 server for tests, moto's: on a free loopback port, ended by its process.

It keeps buckets in memory: one that is killed and started again has none.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvladder.testing.redisserver import ServerProcess, free_ports

BUCKET = "blocks"
ANSWER_S = 60.0
HEADERS = {  # of a request with an unchecked signature
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request",
    "Content-Type": "application/octet-stream",
}


class ObjectServer(ServerProcess):
    """One server with a bucket; its log is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)[0]
        super().__init__(folder / f"moto-{self.port}.log")
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    @property
    def options(self) -> dict[str, Any]:
        """Return the options with which a tier reaches it."""
        return {
            "endpoint": self.address,
            "allow_http": True,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "hunter2",
        }

    def start(self) -> None:
        """Start the process, again on the same port, wait until it answers, make the bucket."""
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(self.port)]
        self.launch(command, self._answers)

    def _answers(self) -> bool:
        with suppress(URLError, OSError):
            self.ask("PUT", BUCKET)
            return True
        return False

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes | None:
        """Return the answer to a plain request; None if there is nothing."""
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
