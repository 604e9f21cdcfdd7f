"""Peers' policies and Belady's bound over a trace: C++ that is compiled on demand."""

from __future__ import annotations

import subprocess
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.policies.traces import Trace

SOURCE = Path(__file__).with_name("peers.cpp")
_FOLDER = TemporaryDirectory(prefix="kvladder-peers-")
BELADY = "Belady"


class Outcome(NamedTuple):
    """What a policy served of a trace."""

    hits: int
    """Number of blocks in the prefixes that were there."""
    work: float
    """Work to compute them, in blocks at the start of a prompt."""
    cut: int
    """Number of requests that found less than a level without a bound has."""


def work(hits: int) -> float:
    """Return the work that leading blocks save: at 131,072 tokens a token costs twice as much."""
    return hits + (hits - 1) * hits / 2 / 256


@cache
def _program() -> Path:
    program = Path(_FOLDER.name) / "peers"
    command = ["g++", "-std=c++20", "-O2", str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def peers(trace: Trace, sizes: Sequence[int]) -> dict[int, dict[str, Outcome]]:
    """Return the outcome of each peer's policy at each size, and of Belady's."""
    data = Path(_FOLDER.name) / "trace"
    with data.open("wb") as out:
        for prompt in trace.prompts:
            array("i", [len(prompt), *prompt]).tofile(out)
    command = [str(_program()), str(data), *map(str, sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[int, dict[str, Outcome]] = {size: {} for size in sizes}
    for line in done.stdout.splitlines():
        name, size, hits, saved, cut = line.split()
        found[int(size)][name] = Outcome(int(hits), float(saved), int(cut))
    return found
