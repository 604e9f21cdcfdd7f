"""Describes the machine and the version that a benchmark measured; needs only Python."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def machine() -> dict[str, str]:
    """Return a description of the machine and the measured version."""
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} CPUs, {_memory()}, {platform.platform()}",
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
    }


def medium(folder: Path) -> str:
    """Return the kind of file system that holds a folder, and its source: ``ext4 on /dev/sda1``."""
    best, found = "", "unknown"
    real = f"{folder.resolve()}/"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")  # a space is \040
        if len(place) >= len(best) and real.startswith(f"{place.rstrip('/')}/"):
            kind, source, *_ = after.split()
            best, found = place, f"{kind} on {source}"
    return found


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return "unknown"
    return found.stdout.strip() or "unknown"
