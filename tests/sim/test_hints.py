"""Random hints of two tenants, with saves, loads, purges, faults and restarts between them.

``KVLADDER_HINTS`` is the number of actions. ``python -m tests.kit.hinting`` prints figures.
"""

from __future__ import annotations

import os

import pytest

from tests.kit.hinting import DEADLINE_S, HintWorld

ACTIONS = int(os.environ.get("KVLADDER_HINTS", "4000"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_random_hints_keep_to_their_tenant_and_the_limits(seed: int) -> None:
    world = HintWorld(seed)
    await world.run(ACTIONS // 2)
    assert world.load_s <= DEADLINE_S + 0.1, "a load waited for hints"
    assert {"loads", "faults", "purges", "restarts", "saves"} <= world.did.keys()
    seen = {outcome for _, outcome in world.outcomes}
    assert seen >= {"accepted", "clipped", "rejected", "missing", "deferred"}
    assert {verb for verb, outcome in world.outcomes if outcome == "accepted"} >= {
        "retain",
        "prefetch",
        "demote",
        "share",
    }
