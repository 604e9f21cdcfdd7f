"""A seed alone determines a world: no address, hash or clock of the machine has an effect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.kit.soak import run_world

PRINT_TRACES = """
import sys
from tests.kit.soak import run_world
for seed in map(int, sys.argv[1:]):
    world = run_world(seed)
    print(*world.trace, sep="\\n")
    for tier in world.tiers:
        print(*((call.operation, len(call.keys), call.at_s) for call in tier.calls), sep="\\n")
"""
SEEDS = range(20, 26)


def printed(program: str, seeds: Iterable[object], hash_seed: str) -> str:
    """Run a program with seeds in another process with this hash seed; return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *map(str, seeds)],
        env={
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


@pytest.mark.slow
def test_other_processes_with_other_hash_seeds_do_the_same() -> None:
    first = printed(PRINT_TRACES, SEEDS, "1")
    assert len(first.splitlines()) > 1000
    assert printed(PRINT_TRACES, SEEDS, "2") == first


@pytest.mark.slow
def test_the_same_seed_does_the_same_and_another_does_not() -> None:
    assert run_world(5).trace == run_world(5).trace
    assert run_world(5).trace != run_world(6).trace
