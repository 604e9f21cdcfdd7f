"""A plan promises what a replay at that size then does, and money where prices are given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvladder.cli import main
from kvladder.errors import ConfigError
from kvladder.replay.sizes import PlanSettings, Prices, SizePlan, interpolated, knee
from kvladder.units import Size
from tests.replay.test_replay import chats, lru_model, trace_of

BLOCK = 1 << 20
GIB = 1 << 30
PRICED = [
    *("--prefill", "1000", "--disk-read", "10GB"),
    *("--prices", "memory=2, disk=0.02, gpu=4"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of chats as a file."""
    path = tmp_path_factory.mktemp("plan") / "chats.jsonl"
    with path.open("w") as file:
        for one in chats(1, 2000).requests:
            entry = {
                "timestamp": int(one.at_s * 1000),
                "input_length": one.input_tokens,
                "output_length": one.output_tokens,
                "hash_ids": list(one.blocks),
            }
            file.write(json.dumps(entry) + "\n")
    return path


def planned(path: Path, capsys: Any, *more: str) -> dict[str, Any]:
    assert main(["plan", str(path), "--block-bytes", "1 MiB", "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def replayed(path: Path, capsys: Any, memory: int, disk: int, **tier: str) -> dict[str, Any]:
    """Replay the stack of these sizes in bytes by its own command."""
    config = path.with_name("stack.yaml")
    text = f"arena: {{size: {memory}}}\ntiers:\n  - {{type: host}}\n"
    if disk:
        text += f"  - {{type: files, path: /d, capacity: {disk}, when: commit}}\n"
    config.write_text(text)
    arguments = ["--config", str(config), "--block-bytes", "1 MiB", "--json"]
    assert main(["replay", str(path), *arguments, "--policies", "prioritized-lru"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    return dict(result)


@pytest.mark.slow
def test_the_promise_of_a_plan_is_met_by_a_replay(path: Path, capsys: Any) -> None:
    plan = planned(path, capsys, *PRICED)
    points = [plan["best"], plan["memory_knee"], plan["disk_knee"], *plan["memory"][::4]]
    assert plan["best"]["disk_bytes"] > 0
    for point in points:
        got = replayed(path, capsys, point["memory_bytes"], point["disk_bytes"])
        assert got["ratio"] == pytest.approx(point["ratio"], abs=0.01)
        assert got["ratio"] == pytest.approx(point["ratio"], rel=0.01)


@pytest.mark.slow
def test_a_check_prints_the_promise_and_the_replay(path: Path, capsys: Any) -> None:
    plan = planned(path, capsys, *PRICED, "--check")
    assert plan["replayed"]["ratio"] == pytest.approx(plan["best"]["ratio"], rel=0.01)
    arguments = ["plan", str(path), "--block-bytes", "1 MiB", *PRICED, "--check"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "plan: most money left\n" in out
    (written,) = re.findall(r"capacity: ([0-9.]+ [KMG]iB),", out)
    assert 1 <= Size.parse(written) / plan["best"]["disk_bytes"] < 1.01
    assert "; replayed: " in out.splitlines()[-1]


@pytest.mark.slow
def test_a_policy_is_replayed_at_some_sizes(path: Path, capsys: Any) -> None:
    exact = planned(path, capsys)
    plan = planned(path, capsys, "--policy", "prioritized-lru")
    assert plan["method"].startswith("prioritized-lru, replayed at 8")
    for one, other in zip(plan["memory"], exact["memory"], strict=True):
        assert one["memory_bytes"] == other["memory_bytes"]
        assert one["ratio"] == pytest.approx(other["ratio"], abs=0.05)
    few = planned(path, capsys, "--policy", "prioritized-lru", "--budget", "1e-9")
    assert few["method"].startswith("prioritized-lru, replayed at 1 size, ")


def test_without_prices_there_are_hits_and_no_money(path: Path, capsys: Any) -> None:
    plan = planned(path, capsys)
    assert plan["best"] is None
    assert plan["memory_knee"]["net_a_month"] is None
    assert main(["plan", str(path), "--block-bytes", "1 MiB"]) == 0
    out = capsys.readouterr().out
    assert "a split needs prices (not given: --prefill, --prices)" in out
    assert out.count("knee") >= 2


def test_prices_may_come_from_a_file(path: Path, tmp_path: Path, capsys: Any) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("{memory: 2, disk: 0.02, gpu: 4}")
    more = ["--prefill", "1000", "--disk-read", "10GB", "--prices", str(prices)]
    assert planned(path, capsys, *more) == planned(path, capsys, *PRICED)


def test_hits_are_those_of_lru_and_grow_with_the_size(path: Path, capsys: Any) -> None:
    plan, trace = planned(path, capsys), chats(1, 2000)
    hits = [round(point["ratio"] * trace.blocks) for point in plan["memory"]]
    assert hits == sorted(hits)
    assert hits == [lru_model(trace, point["memory_blocks"]) for point in plan["memory"]]
    assert plan["memory"][-1]["memory_blocks"] == trace.unique


def test_money_is_that_of_a_month() -> None:
    trace = trace_of([[n] for n in range(64)] * 2, every_s=1.0)  # 127 s, 64 hits if all fits
    prices = Prices(memory=3.0, disk=0.5, gpu=36.0)
    settings = PlanSettings(GIB, 0.001, 2.0 * GIB, prices)
    plan = SizePlan(trace, lambda blocks: 64.0 if blocks >= 100 else 10.0, settings)
    month_s = 365.25 / 12 * 86400
    memory = plan.point(100, 0)
    assert memory.saved_s == pytest.approx(64 * 0.512)
    assert memory.cost == pytest.approx(300.0)
    assert memory.value == pytest.approx(64 * 0.512 / 3600 * 36 * month_s / 127)
    both = plan.point(64, 100)
    assert both.saved_s == pytest.approx(10 * 0.512 + 54 * (0.512 - 0.5))
    assert both.cost == pytest.approx(64 * 3 + 100 * 0.5)
    assert both.net == pytest.approx((both.value or 0) - 242)


def test_a_disk_slower_than_computing_saves_nothing() -> None:
    settings = PlanSettings(GIB, 0.001, GIB / 100, Prices(3.0, 0.5, 36.0))
    plan = SizePlan(trace_of([[n] for n in range(64)] * 2), lambda blocks: blocks, settings)
    assert plan.point(64, 100).saved_s == plan.point(64, 0).saved_s
    best = plan.best()
    assert best is not None
    assert best.disk == 0


def test_the_knee_is_where_the_curve_bends() -> None:
    trace = trace_of([[n] for n in range(10_000)])
    plan = SizePlan(trace, lambda blocks: min(blocks, 640.0), PlanSettings(4096))
    bend = knee(plan.curve())
    assert bend is not None
    assert 500 < bend.memory < 1000
    flat = SizePlan(trace, lambda _: 5.0, PlanSettings(4096))
    assert knee(flat.curve()) is None


def test_interpolation_meets_what_was_measured() -> None:
    hits = interpolated([(10, 100.0), (40, 200.0), (160, 220.0)])
    assert [hits(at) for at in (5, 10, 20, 40, 160, 1000)] == pytest.approx(
        [50, 100, 150, 200, 220, 220]
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"memory_max": 63 * 4096}, r"--most memory: 252 KiB holds 63 blocks, less than 2 of the"),
        ({"disk_max": 4096}, r"--most disk: 4 KiB holds 1 block, less than one batch \(expected"),
    ],
)
def test_sizes_below_one_batch_are_refused(given: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SizePlan(trace_of([[0]]), float, PlanSettings(4096, **given))  # type: ignore[arg-type]


def test_memory_holds_two_of_the_longest_prompt() -> None:
    trace = trace_of([[*range(100)], [*range(50)]])
    assert SizePlan(trace, float, PlanSettings(4096)).curve()[0].memory == 200


def test_one_instant_has_no_month() -> None:
    trace = trace_of([[n] for n in range(64)] * 2, every_s=0.0)
    plan = SizePlan(trace, float, PlanSettings(GIB, 0.001, None, Prices(1.0, 1.0, 1.0)))
    assert plan.point(64, 0).value is None
    assert plan.best() is None


def test_any_numbers_make_a_plan() -> None:
    random = Random(1)
    for _ in range(50):
        prompts = [[*range(random.randint(0, 5))] for _ in range(random.randint(1, 9))]
        prompts.append([0])
        prices = Prices(*(random.choice([None, 0.0, 1.0, 1e9]) for _ in range(3)))
        token_s = random.choice([None, 1e-9, 10.0])
        settings = PlanSettings(random.choice([1, 4097, 1 << 40]), token_s, None, prices)
        plan = SizePlan(trace_of(prompts), float, settings)
        knee(plan.curve())
        knee(plan.disk_curve(), of_disk=True)
        plan.best()
