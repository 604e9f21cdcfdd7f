"""The machines over a pool find out what they are for: each fault below is found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as profile
from hypothesis.stateful import run_state_machine_as_test

from kvladder.gpu.pool.commit import Committer
from kvladder.gpu.requests.sequence import Sequences
from tests.gpu.test_pool_tiers_machine import TiersMachine

FAULTS: dict[str, tuple[Any, str, Any]] = {
    "what is still on its way is shared": (
        Committer,
        "_same",
        lambda self, node, slot: self.share(node, slot),
    ),
    "nobody waits for copies": (Sequences, "arriving", lambda *_: []),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    settings = profile(
        max_examples=2000,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(TiersMachine, settings=settings)
