"""A pytest plugin: ``--durations-file`` appends a line for each test to a file.

A line has the seconds of the test, the seconds of processor that it took, and its name. The second
figure includes child processes that have ended by then. Unlike the first, it is much the same on a
busy machine. Skipped tests are left out, so the file lists the tests that ran.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

CPU = "cpu_s"
"""The attribute of a report that ``Processor`` sets."""


class Durations:
    """Adds up setup, call and teardown of each test that ran, in other processes too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        self._cpu[report.nodeid] += getattr(report, CPU, 0.0)
        if report.skipped:
            self._skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for test, seconds in self._seconds.items():
                if test not in self._skipped:
                    file.write(f"{seconds:.2f}\t{self._cpu[test]:.2f}\t{test}\n")


class Processor:
    """Adds to each report the seconds of processor since the last one in this process."""

    def __init__(self) -> None:
        self._before = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = sum(os.times()[:4])  # of this process and of its children, in user and system
        setattr(report, CPU, now - self._before)
        self._before = now
        return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-file", type=Path, help="append seconds and name of each test to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path is None:
        return
    config.pluginmanager.register(Processor())
    if not hasattr(config, "workerinput"):  # a worker reports to the first
        config.pluginmanager.register(Durations(config.invocation_params.dir / path))
