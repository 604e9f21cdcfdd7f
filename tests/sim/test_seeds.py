"""Simulated worlds: seeds that once found a fault, and a fresh range of others.

Each line below is a seed and the fault that its world found at first.
"""

from __future__ import annotations

from typing import get_args

import pytest

from tests.kit import soak
from tests.kit.knobs import Kind
from tests.kit.world import World

FOUND = """
    2       a removal left behind met a write of its block
    13      what waited for a level behind its breaker was never written
    37      two blocks took turns for ever in a level smaller than the reserve
    54      a call that only the end of its tier could end held a slot past closing
    145     a batch of removals had a key twice
    290     a commit met its block, which had arrived meanwhile
    349     a removal met a write of its block that had been left behind
    583     a writer that was cancelled and woken at once went on
    662     closing waited for ever for a writer that was cancelled and woken at once
    278     what waited for a level was not written after calls left behind had crowded it out
    200192  blocks took turns for ever in a level smaller than the reserve, and below it
    303258  what waited for a level was not written after a removal had tried it out
"""
SEEDS = [int(line.split()[0]) for line in FOUND.strip().splitlines()]


@pytest.mark.parametrize("seed", SEEDS)
def test_worlds_that_once_found_a_fault_pass(seed: int) -> None:
    soak.run_world(seed)


@pytest.mark.slow
def test_other_worlds_run_ten_thousand_steps() -> None:
    worlds = [soak.run_world(seed) for seed in range(50_000, 50_050)]
    served = sum((world.served for world in worlds), start=worlds[0].served)
    assert set(served) == {"host", "level1", "level2", "level3"}, "they reach every level"


@pytest.mark.slow
def test_worlds_with_codecs_run_five_thousand_steps() -> None:
    worlds = [soak.run_world(seed, kind="coded") for seed in range(60_000, 60_025)]
    served = sum((world.served for world in worlds), start=worlds[0].served)
    assert set(served) >= {"host", "level1", "level2"}
    assert any(level.client.pipeline.refused for world in worlds for level in world.cache.levels)


@pytest.mark.slow
def test_worlds_with_request_parameters_run_ten_thousand_steps() -> None:
    worlds = [soak.run_world(seed, kind="wishing") for seed in range(80_050, 80_100)]
    served = sum((world.served for world in worlds), start=worlds[0].served)
    assert set(served) == {"host", "level1", "level2", "level3"}
    assert any(level.stats.expired for world in worlds for level in world.cache.levels)
    assert sum("purged" in line for world in worlds for line in world.trace) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shared", "unruly"])
def test_worlds_with_fetched_sets_run_four_thousand_steps(kind: Kind) -> None:
    worlds = [soak.run_world(seed, kind=kind, sets=True) for seed in range(95_000, 95_020)]
    gathered = [line for world in worlds for line in world.trace if " gather " in line]
    assert sum(": 0 of" not in line for line in gathered) > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Kind))
def test_worlds_whose_process_stands_still_run_six_thousand_steps(kind: Kind) -> None:
    worlds = [soak.run_world(seed, kind=kind, pauses=True) for seed in range(96_000, 96_030)]
    assert sum(" pause " in line for world in worlds for line in world.trace) > 100


@pytest.mark.slow
def test_worlds_with_misbehaving_tiers_run_ten_thousand_steps() -> None:
    worlds = [soak.run_world(seed, kind="unruly") for seed in range(90_000, 90_050)]
    served = sum((world.served for world in worlds), start=worlds[0].served)
    assert set(served) == {"host", "level1", "level2", "level3"}
    gates = [level.client for world in worlds for level in world.cache.levels]
    for kind in ("get", "put", "remove"):
        assert any(calls.breakers[kind].opened for calls in gates)


def test_the_command_prints_the_blocks_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", "400", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("2/2 worlds, to seed 4; blocks served: host ")


def test_the_command_names_the_seed_of_a_world_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(World, "check", broken)
    with pytest.raises(AssertionError) as failure:
        soak.main(["--steps", "1", "--seed", "7"])
    assert "--seed 7" in capsys.readouterr().out
    assert failure.value.__notes__[0].startswith("seed 7\nKnobs(")
