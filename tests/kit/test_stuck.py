"""A test that is stuck is ended, one that is busy or waits for its turn is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import stuck
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

IDLE_S = 1.0
BEGIN = f"""
import faulthandler, subprocess, sys, threading, time
faulthandler.enable()
command = [sys.executable, {stuck.__file__!r}, str(__import__("os").getpid()), "{IDLE_S}"]
watcher = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
def say(line):
    print(line, file=watcher.stdin, flush=True)
end = time.monotonic() + {4 * IDLE_S}
"""
WAITS = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
BURNS = "while time.monotonic() < end: pass"
CHILD = (
    "subprocess.run([sys.executable, '-c', 'import sys, time; end = time.monotonic() + 4\\n"
    "while time.monotonic() < end: pass'])"
)
STARTS = """
child = subprocess.Popen(
    ["sh", "-c", "sleep 7200 >&2 & echo $!; wait"],
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
)
print(child.pid, child.stdout.readline(), flush=True)
"""


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    script = "\n".join([BEGIN, *lines, "watcher.communicate()"])
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_test_that_waits_for_ever_is_ended_with_a_traceback() -> None:
    done = run("say('+ tests/a.py::test_b')", WAITS)
    assert done.returncode == -6
    assert f"stuck for {IDLE_S:g} s: tests/a.py::test_b" in done.stderr
    assert "most recent call first" in done.stderr


def lives(pid: int | str) -> bool:
    """Return whether a process is alive."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_children_of_a_stuck_test_are_ended_with_it() -> None:
    done = run(STARTS, "say('+ waits for its child')", "child.wait()")
    assert done.returncode == -6
    assert "in wait" in done.stderr, "it was still waiting when it told where it stands"
    pids = done.stdout.split()
    assert len(pids) == 2
    until(lambda: not any(lives(pid) for pid in pids))


@pytest.mark.parametrize(
    "lines",
    [
        ["say('+ burns')", BURNS],
        ["say('+ waits for a child')", CHILD],
        ["say('+ is over')", "say('-')", f"time.sleep({4 * IDLE_S})"],
        [f"time.sleep({4 * IDLE_S})"],
    ],
)
def test_busy_or_idle_runs_are_not_ended(lines: list[str], pytestconfig: pytest.Config) -> None:
    if pytestconfig.pluginmanager.has_plugin("tests.kit.jitter"):
        pytest.skip("what stands still for longer than a second is stuck here")
    done = run(*lines)
    assert done.returncode == 0, done.stderr
