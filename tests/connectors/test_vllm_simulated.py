"""The connector under vLLM's own scheduler: in every step each byte that is read is checked."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvladder.config import registry
from tests.connectors.moody import MoodyTier

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from kvladder.gpu.copy.copier import Copier
from tests.connectors.lazy import LazyCopier
from tests.connectors.mixes import MODELS
from tests.connectors.simulated import Simulation

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOST: dict[str, Any] = {"host": "1 MiB"}


def moody(slots: int, *, seed: int = 0, mood: float = 0.1) -> dict[str, Any]:
    """Return a stack with this many host slots and more below; a slot takes a page of memory."""
    return {
        "arena": {"size": f"{4 * slots} KiB"},
        "fetch": {"budget": "100 %", "deadline": "100 ms"},
        "tiers": [
            {"type": "host"},
            {
                "type": "moody",
                "seed": seed,
                "mood": mood,
                "capacity": "2 MiB",
                "when": "commit",
                "queue": "100 %",
                "timeout": "20 ms",
                "breaker": {"failures": 8, "retry": "10 ms", "retry_max": "20 ms"},
            },
        ],
    }


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    registry.register("tiers", "moody", MoodyTier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.sched.scheduler")
    yield
    del registry._registered["tiers", "moody"]


def prompt(seed: int, length: int = 30) -> list[int]:
    return Random(seed).choices(range(50), k=length)


@pytest.mark.parametrize("model", MODELS)
def test_computed_blocks_are_loaded(tmp_path: Path, model: str) -> None:
    one = Simulation(tmp_path, HOST, model, ranks=2)
    unit = max(tokens for _, tokens in one.groups)
    first = one.add(prompt(1, 64), length=20)
    one.run()
    assert one.hits == 0
    one.reset()
    second = one.add(prompt(1, 64), length=20)
    one.run()
    assert one.hits == 63 // unit * unit
    assert one.answers[first] == one.answers[second]
    one.close()


def test_an_engine_sleeps_and_finds_its_blocks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test calls vLLM's hooks for sleep where it has them: all of them, or none."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    hooks = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    assert hooks & {*dir(KVConnectorBase_V1)} in (set(), hooks)
    one = Simulation(tmp_path, HOST, "full")
    connector, (rank,) = one.connector, one.ranks
    assert connector.supports_sleep_mode(one.vllm_config.kv_transfer_config)
    connector.worker = rank.half
    woken: list[Copier] = []
    monkeypatch.setattr(LazyCopier, "moved", lambda copier: woken.append(copier))
    for hits in (0, 28):
        one.add(prompt(1))
        one.run()
        assert one.hits == hits
        one.reset()
        connector.unregister_kv_caches()
        connector.restore_kv_caches()
    assert woken == [rank.copier] * 2, "its copies are told that the tensors may lie elsewhere"
    one.close()


def disturb(one: Simulation, random: Random, *, weights: float = 0.05) -> None:
    """Cause random events between two steps; ``weights`` is the chance of other weights."""
    for request_id in [*one.requests]:
        if random.random() < 0.02:
            one.abort(request_id)
    chance = random.random()
    if chance < 0.06:
        one.reset(running=random.random() < 0.3, connector=random.random() < 0.1)
    chance = random.random()
    if chance < weights:
        told = random.random() < 0.5
        one.reload(random.randrange(3), noticed=not told)
        if told:
            one.reset(running=random.random() < 0.3, connector=True)
    for rank in one.ranks:
        if rank.copier is not None:
            rank.copier.failing = random.choice([0.0, 0.0, 0.15])
            rank.copier.held = random.random() < 0.2


def windows_or_states(model: str) -> bool:
    return any(kind in ("window", "state") for kind, _ in MODELS[model])


@pytest.mark.parametrize("source", ["host", "small host", "moody"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("early", [False, True], ids=["fence first", "writes first"])
@pytest.mark.parametrize("seed", range(3))
def test_no_request_reads_bytes_that_were_not_written(
    tmp_path: Path, model: str, source: str, seed: int, early: bool
) -> None:
    """Shared prefixes, preemption, aborts, resets, other weights, copies and tiers that fail.

    With a model runner that first lets the connector fence, and with one that first writes.
    """
    random = Random(f"{model} {source} {seed}")
    given = {"host": HOST, "small host": {"host": "64 KiB"}, "moody": moody(12, seed=seed)}[source]
    one = Simulation(
        tmp_path,
        {**given, "on_reset": random.choice(["forget", "keep"])},
        model,
        seed=seed,
        blocks=len(MODELS[model]) * random.choice([20, 30]),
        budget=random.choice([6, 16, 48]),
        ranks=random.choice([1, 2]),
        overlap=random.random() < 0.4,
        interval=random.choice([None, None, 0, 32]) if windows_or_states(model) else None,
        early=early,
    )
    trunks = [prompt(n, 40) for n in range(3)]
    for _ in range(150):
        if random.random() < 0.3 and len(one.requests) < 6:
            trunk = random.choice(trunks)[: random.randrange(1, 41)]
            one.add(
                [*trunk, *prompt(random.randrange(5), random.randrange(1, 9))],
                length=random.randrange(1, 20),
                priority=random.randrange(3),
                salt=random.choice([None, None, None, "a"]),
                recompute=random.random() < 0.05,
            )
        disturb(one, random)
        one.step()
    for rank in one.ranks:
        if rank.copier is not None:
            rank.copier.failing, rank.copier.held = 0.0, False
    one.run()
    assert one.reads > 0
    one.close()
