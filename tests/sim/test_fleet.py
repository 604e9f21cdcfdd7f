"""Fleets of engines, servers and stores over a network, under every kind of fault.

``KVLADDER_FLEETS`` is the number of worlds; ``python -m tests.sim.night`` runs a night's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from random import Random
from typing import Any

import pytest

from kvladder.arena import Arena
from tests.sim import night
from tests.sim.fleet.engine import Engine
from tests.sim.fleet.faults import FAULTS
from tests.sim.fleet.loop import FleetLoop, Process
from tests.sim.fleet.net import Net
from tests.sim.fleet.plan import Failed, Step, command, drawn, kept, run, shrunk
from tests.sim.fleet.serving import Planes
from tests.sim.test_determinism import printed

FLEETS = int(os.environ.get("KVLADDER_FLEETS", "8"))
PRINT_TRACES = """
import sys
from tests.sim.fleet.plan import drawn, run
for seed in map(int, sys.argv[1:]):
    fleet = run(seed, drawn(seed, 60))
    print(*fleet.trace, sorted(fleet.net.counts.items()), sep="\\n")
    print(fleet.loop.time(), [sorted(engine.sources.items()) for engine in fleet.engines])
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_dies_begins_nothing_more(stopped: bool) -> None:
    """Neither new tasks, nor what waits for a turn, nor a task that wakes at this very instant."""
    for seed in range(40):
        loop = FleetLoop(seed)
        process, ran = Process("engine0", loop), list[int]()

        async def work(number: int, ran: list[int] = ran) -> None:
            ran.append(number)
            try:
                await asyncio.sleep(0.05)
                ran.append(number)
            finally:
                await asyncio.sleep(0.01)  # cleans up for a while

        def begin(number: int, work: Any = work, loop: FleetLoop = loop) -> None:
            loop.create_task(work(number))

        process.run(begin, 0)
        loop.run_until_complete(asyncio.sleep(0.0))
        if stopped:
            process.stop()
        for number in range(1, 4):
            process.post(begin, number)
        loop.run_until_complete(asyncio.sleep(0.05))
        process.post(ran.append, 4)
        before = [*ran]
        process.die()
        loop.run_until_complete(asyncio.sleep(1.0))
        assert process.is_over
        assert ran == before, f"seed {seed}"
        assert not asyncio.all_tasks(loop), f"seed {seed}"
        loop.close()


@pytest.mark.parametrize("killed_s", [0.02, 0.05])
def test_no_agent_outlives_the_process_that_makes_it(killed_s: float) -> None:
    for seed in range(20):
        loop = FleetLoop(seed)
        planes = Planes(loop, Net(loop, Random(seed)))
        process = Process("server0", loop)
        with closing(Arena.create(1, 4096)) as arena:
            process.run(loop.create_task, planes.make(arena))
            loop.run_until_complete(asyncio.sleep(killed_s))
            planes.gone(process)
            process.die()
        assert not planes.every, f"seed {seed}"
        loop.close()


@pytest.mark.slow
def test_fleets_hold_under_every_kind_of_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert night.main(["--worlds", str(FLEETS), "--seed", "1"]) == 0
    table = capsys.readouterr().out
    assert "Worlds that failed: 0." in table
    assert table.count("\n| ") >= len(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [160, 1000650, 1000696, 5001047, 7001937, 7003659])
def test_worlds_that_failed_hold(seed: int) -> None:
    """A put that the object store carries out after the purge of its block; power that fails while
    all faults end; a write whose second copy comes after its end; two losses of power, of which
    the second one undid a removal; a purge that spared a damaged label in Redis; a write that hid
    the removals behind it.
    """
    steps = kept(seed)
    assert steps
    run(seed, steps)


@pytest.mark.slow
def test_a_seed_alone_determines_a_fleet() -> None:
    first = printed(PRINT_TRACES, (1, 2), "1")
    assert len(first.splitlines()) > 50
    assert printed(PRINT_TRACES, (1, 2), "2") == first


def test_each_seed_has_frequencies_of_its_own() -> None:
    plans = [drawn(seed, 300) for seed in range(4)]
    kinds = [{step.name for step in plan} & FAULTS.keys() for plan in plans]
    assert all(kinds)
    assert len({frozenset(some) for some in kinds}) == 4
    assert drawn(3, 300) == plans[3]


def test_a_failing_plan_is_shrunk_to_the_steps_that_matter() -> None:
    steps = [Step("serve", number, 0, 0) for number in range(50)]
    steps[20] = Step("clock: jumps", 20, 0, 0)
    tried: list[int] = []

    def fails(some: Sequence[Step]) -> bool:
        tried.append(len(some))
        return {7, 20, 33} <= {step.a for step in some}

    assert shrunk(steps, fails) == [7, 20, 33]
    assert len(tried) < 100
    assert command(5, 50, [7, 20, 33]) == (
        "python -m tests.sim.night --seed 5 --steps 50 --worlds 1 --only 7,20,33"
    )


def test_a_night_ends_soon_though_failures_are_slow_to_shrink(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(seed: int, steps: Sequence[Step]) -> None:
        ran.append(seed)
        raise Failed(ValueError("broken"), 50, ()) from ValueError("broken")

    monkeypatch.setattr(night, "run", run)
    monkeypatch.setattr(night, "fails", lambda *_: ran.append(0))
    monkeypatch.setattr(night, "SHRINK_S", -1.0)
    assert night.main(["--worlds", "2", "--seed", "7"]) == 1
    assert ran == [7, 8], "a world was tried to shrink one after the time for it"
    said = capsys.readouterr().out
    for seed in ran:
        again = command(seed, 120, range(120))
        assert f"\nrepeat it: {again}" in said
    assert "Worlds that failed: 2." in said


def test_a_world_that_differs_from_itself_has_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Differs:
        def __init__(self) -> None:
            self.trace = [object()]

    monkeypatch.setattr(night, "run", lambda *_: Differs())
    assert night.main(["--worlds", "1", "--seed", "100"]) == 1
    said = capsys.readouterr().out
    assert "the same seed did something else" in said
    assert "Worlds that failed: 1." in said


@pytest.mark.slow
def test_a_failure_is_printed_with_a_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: Engine, seconds: float) -> None:
        raise AssertionError(f"broken by {seconds}")

    monkeypatch.setattr(Engine, "jump", broken)
    seed = next(n for n in range(100) if "clock: jumps" in {s.name for s in drawn(n, 20)})
    given = ["--seed", str(seed), "--steps", "20", "--worlds", "1"]
    assert night.main(given) == 1
    said = capsys.readouterr().out
    (again,) = (line for line in said.splitlines() if line.startswith("repeat it: "))
    only = again.split("--only ")[1]
    assert len(only.split(",")) == 1
    monkeypatch.undo()
    monkeypatch.setattr(Engine, "jump", broken)
    chosen = [drawn(seed, 20)[int(index)] for index in only.split(",")]
    with pytest.raises(Failed, match="broken by"):
        run(seed, chosen)
