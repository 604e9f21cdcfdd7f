"""A benchmark that is stopped stops what it started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import family
from tests.kit.source import ROOT
from tests.patience import PATIENCE_S, until

COMMANDS = sorted(
    path
    for path in [*(ROOT / "benchmarks").rglob("*.py"), ROOT / "tests/upgrade/turns.py"]
    if "sys.exit(main())" in path.read_text()
)


@pytest.mark.slow
def test_a_server_ends_with_the_benchmark_that_started_it() -> None:
    command = [sys.executable, "-m", "benchmarks.floods", "--clients", "2"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: any(_serves(pid) for pid in family(process.pid)))
        started = family(process.pid)[1:]
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + 15
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def test_every_benchmark_that_starts_something_can_be_stopped_so() -> None:
    starts = ("subprocess", "ExitStack", "TemporaryDirectory", "benches")
    silent = [
        str(path.relative_to(ROOT))
        for path in COMMANDS
        if any(word in (text := path.read_text()) for word in starts)
        and "exit_on_sigterm()" not in text
    ]
    assert silent == []


def _serves(pid: int) -> bool:
    try:
        return b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
