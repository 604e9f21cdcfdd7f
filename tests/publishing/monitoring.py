"""A Prometheus of the tests' own, and its tools."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvladder.testing.redisserver import ServerProcess, free_ports


def tool(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``."""
    found = shutil.which(name)
    assert found is not None, "install Debian's package prometheus"
    return found


class Prometheus(ServerProcess):
    """A Prometheus that scrapes targets every second, on a port of its own on loopback.

    Parameters
    ----------
    folder:
        Where its data, configuration and log are.
    targets:
        Addresses that serve ``/metrics``.
    rules:
        Files of rules, evaluated every second.
    """

    def __init__(self, folder: Path, targets: Sequence[str], rules: Sequence[Path]) -> None:
        super().__init__(folder / "prometheus.log")
        self.port = free_ports(1)[0]
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": "kvladder", "static_configs": [{"targets": list(targets)}]}
            ],
        }
        path = folder / "prometheus.yaml"
        path.write_bytes(msgspec.yaml.encode(config))
        self.launch(
            [
                tool("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            self.is_ready,
        )

    def is_ready(self) -> bool:
        """Return whether it answers queries."""
        try:
            return bool(self.ask("query", query="vector(1)"))
        except OSError:
            return False

    def ask(self, what: str, **arguments: str) -> Any:
        """Return the data that its API answers; an error fails the test."""
        query = urllib.parse.urlencode(arguments)
        address = f"http://127.0.0.1:{self.port}/api/v1/{what}?{query}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # not ready
                raise
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def series(self, query: str) -> list[dict[str, Any]]:
        """Return the series of a query, each with its labels and value."""
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found
