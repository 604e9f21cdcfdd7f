"""The connector measures compute time, and waits for no load that takes longer."""

from __future__ import annotations

import asyncio
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from kvladder.config import registry
from kvladder.tiers.label import Read
from kvladder.tiers.memory import MemoryTier
from tests.patience import until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    from kvladder.connectors.vllm.requests.computing import Computing
    from kvladder.connectors.vllm.step import Report
    from tests.connectors.scripted import TOKENS, Engine, Request

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPT = 40 * TOKENS


class Clock:
    """A clock that shows the time set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def state() -> Any:
    return SimpleNamespace(left=0)


class Steps:
    """Runs steps of a ``Computing`` and keeps its reports."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.told: list[tuple[int, float]] = []
        self.computing = Computing(self.clock, lambda *one: self.told.append(one))

    def step(self, seconds: float, *scheduled: tuple[Any, int]) -> None:
        number = self.computing.begin(scheduled, timed=True)
        self.clock.now_s += seconds
        self.computing.end(number)


def test_the_time_of_a_prompt_is_its_step_less_the_time_of_decoding() -> None:
    steps, one, two = Steps(), state(), state()
    for seconds in (2.0, 3.0, 100.0):
        steps.step(seconds, (one, 1), (two, 1))
    steps.computing.expect(one, 100)
    steps.step(10.0, (one, 60), (two, 1))
    steps.step(9.0, (one, 50), (two, 1))  # 10 of them are no prompt's
    assert steps.told == [(60, 7.0), (40, 6.0)]
    assert (one.left, steps.computing.waiting) == (0, 0)


def test_steps_that_overlap_count_from_the_end_of_the_one_before() -> None:
    steps, one = Steps(), state()
    steps.computing.expect(one, 200)
    first = steps.computing.begin([(one, 100)], timed=True)
    steps.clock.now_s = 4.0
    second = steps.computing.begin([(one, 100)], timed=True)
    steps.clock.now_s = 5.0
    steps.computing.end(first)
    steps.clock.now_s = 11.0
    steps.computing.end(second)
    steps.computing.end(second)
    assert steps.told == [(100, 5.0), (100, 6.0)]


def test_unreported_steps_are_forgotten_with_the_next_reported_one() -> None:
    steps, one = Steps(), state()
    begun = [steps.computing.begin([(one, 1)], timed=True) for _ in range(3)]
    steps.computing.end(begun[-1])
    assert not steps.computing._begun


def test_idle_steps_and_steps_that_load_are_not_timed() -> None:
    steps, one = Steps(), state()
    steps.computing.expect(one, 100)
    assert steps.computing.begin([], timed=True) == 0
    assert steps.computing.begin([(one, 100)], timed=False) == 0
    steps.computing.end(0)
    assert steps.told == []
    assert one.left == 0


def test_waiting_tokens_are_counted_until_they_are_computed() -> None:
    steps, one, two = Steps(), state(), state()
    steps.computing.expect(one, 100)
    steps.computing.expect(two, 50)
    steps.computing.expect(one, 30)  # the rest is loaded
    assert steps.computing.waiting == 80
    steps.computing.expect(one, 0)
    steps.step(1.0, (two, 20))
    assert steps.computing.waiting == 30


def test_the_step_that_ended_is_reported_by_all_ranks_together() -> None:
    whole = Report(step=3).aggregate(Report(step=3))
    assert isinstance(whole, Report)
    assert whole.step == 3


class TurnedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a tier without any."""


class TurnedTier(MemoryTier):
    """A tier as fast as memory, until the test makes it hang."""

    batch_max = 4
    hangs: ClassVar[bool] = False
    Options: ClassVar = TurnedOptions

    def __init__(self, options: TurnedOptions) -> None:
        super().__init__()

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        if TurnedTier.hangs:
            await asyncio.sleep(30.0)
        return await super().get(reads)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KVLADDER__FETCH__WHEN")
    registry.register("tiers", "turned", TurnedTier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    TurnedTier.hangs = False
    del registry._registered["tiers", "turned"]


def run(engine: Engine) -> None:
    """Run until every request has ended, with a whole prompt in a step."""
    while engine.entries or engine.half.busy:
        engine.step(budget=2 * PROMPT)


def prompt(seed: int) -> list[int]:
    return Random(seed).choices(range(50), k=PROMPT)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_no_request_waits_for_a_tier_that_hangs(load: str) -> None:
    """The deadline of an hour is never reached: a first measurement ends all waits."""
    source = {
        "arena": {"size": f"{100 * 4} KiB"},
        "fetch": {"budget": "100 %", "deadline": "1 h"},
        "tiers": [
            {"type": "host"},
            {
                "type": "turned",
                "capacity": "8 MiB",
                "when": "commit",
                "queue": "100 %",
                "timeout": "1 h",
            },
        ],
    }
    engine = Engine(source, load=load, blocks=100)
    level = engine.half.connector.manager._stack.levels[0]
    for seed in range(6):  # more than host has room for: the first ones are below it only
        engine.add(prompt(seed))
        run(engine)
        until(engine.half.connector.manager.idle)  # all is written
    assert level.stats.hits == 0
    for seed in range(4):
        assert engine.half.connector.manager.lookup(keys_of(engine, seed)).total > 20
    TurnedTier.hangs = True
    for seed in range(4):
        engine.add(prompt(seed))
        run(engine)
    assert level.stats.hits == 0
    assert level.stats.slower + level.stats.late > 40
    TurnedTier.hangs = False
    engine.close()


def keys_of(engine: Engine, seed: int) -> list[Any]:
    group = engine.half._groups.main
    return group.keys(Request("", prompt(seed)).block_hashes, 0, 40)
