"""Caches in use while the servers of their level die, stop, fail over and come back.

``python -m tests.kit.trials 200 --alone failover`` does more, and prints the times.
"""

from __future__ import annotations

import asyncio

import pytest

from kvladder.testing.redisserver import program
from tests.kit.failover import FAILOVER_LANES
from tests.kit.lanes import FIRST, LAST, run
from tests.kit.mooncake import PROGRAM
from tests.tiers import objecttests  # noqa: F401 - starts the library

NEEDED = {"mooncake-store": PROGRAM.exists(), "object": True}


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("name", FAILOVER_LANES)
def test_a_failover_costs_only_misses_and_ends(tmp_path, name):
    """Each fault happens once, until the level serves blocks saved after it."""
    if not NEEDED.get(name, program() is not None):
        pytest.skip("what it needs is not installed")
    lane = FAILOVER_LANES[name]
    figures = asyncio.run(run(tmp_path, len(lane.cases()), [lane]))
    assert {*figures.services} == {*figures.trials} == {*lane.cases()}
    assert {FIRST, LAST} < {*figures.held[name]}
    figures.check()
