"""Ends stuck tests, but no slow ones, however busy the machine is.

``python stuck.py PID IDLE_S`` watches the process of a test run and its children. Lines on its
standard input announce the begin of a test, ``+ NAME``, and its end, ``-``. A test is stuck when
for IDLE_S seconds none of its threads has run, nor waited for a processor or a disk. The process
then gets SIGABRT, and pytest prints a traceback of each thread. Its children are killed once it has
ended: if they were killed earlier, the stuck test could continue.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

BUSY_SHARE = 0.01
"""The share of one processor that a waiting test uses at most, even if it polls now and then."""
ABORT_S = 60.0
"""The time limit for a process to print its tracebacks; then it is killed, too."""
STATE, PARENT = 0, 1
"""Their positions in /proc/PID/stat, after the name."""
Spent = dict[int, int]
"""Nanoseconds, by thread, that it ran or waited for a processor."""


def below(*roots: int) -> set[int]:
    """Return processes and their descendants, as far as the parents of these live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[PARENT])
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def spent(pids: set[int]) -> tuple[Spent, bool]:
    """Return the time that threads have spent so far, and whether one of them waits for a disk."""
    found: Spent = {}
    disk = False
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[int(task.name)] = int(ran) + int(waited)
                state = (task / "stat").read_text().rpartition(")")[2].split()[STATE]
                disk = disk or state == "D"
    return found, disk


def end(root: int) -> None:
    """Abort the process that started this one, and kill its other children."""
    found = below(root)
    os.kill(root, signal.SIGABRT)
    latest_s = time.monotonic() + ABORT_S
    while os.getppid() == root and time.monotonic() < latest_s:
        time.sleep(0.01)
    if os.getppid() != root:
        found.discard(root)
    for pid in below(*found - {os.getpid()}) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def watch(root: int, idle_s: float) -> None:
    """Until standard input ends, or ``root`` is stuck."""
    every_s, name = idle_s / 20, ""
    before: Spent = {}
    looked_s = busy_s = time.monotonic()
    while os.getppid() == root:
        if select.select([sys.stdin], [], [], every_s)[0]:
            lines = os.read(sys.stdin.fileno(), 1 << 16).decode(errors="replace").splitlines()
            if not lines:
                return
            name = lines[-1][1:].strip()
            busy_s = time.monotonic()
            continue
        now_s = time.monotonic()
        after, disk = spent(below(root) - {os.getpid()})
        used_s = sum(max(0, ns - before.get(thread, 0)) for thread, ns in after.items()) / 1e9
        if not name or disk or used_s > BUSY_SHARE * (now_s - looked_s):
            busy_s = now_s
        before, looked_s = after, now_s
        if now_s - busy_s > idle_s:
            print(f"stuck for {idle_s:g} s: {name}", file=sys.stderr, flush=True)
            end(root)
            return


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
