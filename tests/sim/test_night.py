"""The night's command: sums that continue after a stop, several processes, worlds by density."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.sim import night
from tests.sim.fleet import plan
from tests.sim.fleet.faults import FAULTS
from tests.sim.fleet.fleet import STORES, FleetKnobs
from tests.sim.fleet.plan import DENSITIES, Climate, drawn

SMALL = ["--seed", "40", "--steps", "12"]


def sums(kept: Path) -> dict[str, Any]:
    """Return what a night kept, but for the time that it took."""
    found: dict[str, Any] = json.loads(kept.read_text())
    del found["cpu_s"]
    return found


@pytest.mark.slow
def test_a_night_continues_where_another_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(night, "BATCH", 2)
    whole, parts, out = tmp_path / "whole.json", tmp_path / "parts.json", tmp_path / "table.md"
    assert night.main([*SMALL, "--worlds", "4", "--kept", str(whole)]) == 0

    ran: list[int] = []

    def stopped(seed: int, steps: Any) -> Any:
        ran.append(seed)
        os.kill(os.getpid(), signal.SIGTERM)
        return plan.run(seed, steps)

    monkeypatch.setattr(night, "run", stopped)
    before = signal.getsignal(signal.SIGTERM)
    given = [*SMALL, "--worlds", "4", "--kept", str(parts), "--out", str(out)]
    assert night.main(given) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert ran == [40, 41], "a batch began after the signal"
    assert "| **all** |" in out.read_text(), "a stopped night writes its table"
    assert sums(parts)["worlds"] == 2
    monkeypatch.setattr(night, "run", plan.run)
    assert night.main(given) == 0
    assert sums(parts) == sums(whole)
    with pytest.raises(SystemExit, match="give the --seed and --steps"):
        night.main(["--seed", "41", "--kept", str(parts)])


@pytest.mark.slow
def test_two_processes_count_what_one_does(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert night.main([*SMALL, "--worlds", "22", "--kept", str(one)]) == 0
    given = [*SMALL, "--worlds", "22", "--jobs", "2", "--kept", str(two)]
    subprocess.run([sys.executable, "-m", "tests.sim.night", *given], check=True)
    assert sums(two) == sums(one)
    assert sums(one)["worlds"] == 22


def test_worlds_are_of_every_density_and_have_only_faults_with_targets() -> None:
    climates = {seed: Climate.of(seed) for seed in range(300)}
    assert {climate.density for climate in climates.values()} == {*DENSITIES}
    few = [climate for climate in climates.values() if len(climate.kinds) <= 3]
    assert 30 < len(few) < 150
    assert {kind for climate in climates.values() for kind in climate.kinds} == {*FAULTS}
    for seed in range(60):
        stores = FleetKnobs.draw(Random(seed)).stores
        rooms = {kind.partition(":")[0] for kind in climates[seed].kinds}
        assert rooms & {*STORES} <= {*stores}
        names = Counter(step.name for step in drawn(seed, 400))
        faults = sum(count for name, count in names.items() if name in FAULTS)
        assert abs(faults / 400 - DENSITIES[climates[seed].density]) < 0.12
        assert {name for name in names if name in FAULTS} <= {*climates[seed].kinds}
