"""The machines over a pool find the faults that they are made for: each fault below is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as profile
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvladder.gpu.pool.commit import Committer
from kvladder.gpu.pool.finder import PoolMatch
from kvladder.gpu.requests.requests import CachedPrefix, Requests
from kvladder.gpu.requests.sequence import KVSequence, Sequences
from tests.gpu.test_device_machine import PartialGroups
from tests.gpu.test_pool_tiers_machine import TiersMachine


def match_one(self: Requests, parts: Sequence[KVSequence], limit: int) -> list[PoolMatch]:
    """``Requests._match``, with the first group's blocks assumed to be in all groups."""
    each = zip(self.groups, self._finders, parts, strict=True)
    first, *others = [CachedPrefix(*one, limit) for one in each]
    end = first.group.serves(first.holes, first.shared, limit // self._grain * self._grain, 1)
    return [one.reach(end) for one in (first, *others)]


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "what is still on its way is shared": (
        Committer,
        "_same",
        lambda self, node, slot: self.share(node, slot),
    ),
    "nobody waits for copies": (Sequences, "arriving", lambda *_: []),
}


def find(machine: type[RuleBasedStateMachine]) -> None:
    settings = profile(
        max_examples=2000,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        find(TiersMachine)


@pytest.mark.slow
def test_matching_only_one_group_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Requests, "_match", match_one)
    with pytest.raises(AssertionError):
        find(PartialGroups)
