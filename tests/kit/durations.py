"""A pytest plugin: ``--durations-file`` appends the seconds and the name of each test to a file.

Skipped tests are left out, so the file lists the tests that ran.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest


class Durations:
    """Adds up setup, call and teardown of each test that ran, in other processes too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.skipped:
            self._skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for test, seconds in self._seconds.items():
                if test not in self._skipped:
                    file.write(f"{seconds:.2f}\t{test}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-file", type=Path, help="append seconds and name of each test to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path is not None and not hasattr(config, "workerinput"):  # a worker reports to the first
        config.pluginmanager.register(Durations(config.invocation_params.dir / path))
