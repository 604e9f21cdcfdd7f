"""The table of the benchmarks, and the command that fills it."""

from __future__ import annotations

import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import bench_vllm, gpu, gpu_parts
from benchmarks.row import HEADINGS, Row, cells, markdown, plain


def test_the_ratio_is_to_the_limit_or_else_to_the_peer():
    assert Row(name="a", unit="GB/s", ours=1, limit=2, peer=4).ratio == 0.5
    assert Row(name="a", unit="GB/s", ours=1, peer=4).ratio == 0.25
    assert Row(name="a", unit="s", ours=1, limit=2, ratio=7).ratio == 7
    assert Row(name="a", unit="s", ours=1).ratio is None


def test_tables_hold_every_column():
    rows = [
        Row(name="copy", unit="GB/s", ours=4.5678, limit=5, goal="ratio >= 0.9", note="a|b"),
        Row(name="recover", unit="blocks", ours=1234567),
    ]
    assert cells(rows[0]) == ("copy", "GB/s", "5", "", "4.568", "0.91", "ratio >= 0.9", "a|b")
    first, *lines = plain(rows).splitlines()
    assert tuple(first.split()) == HEADINGS
    assert lines[1].split() == ["recover", "blocks", "1,234,567"]
    table = markdown(rows).splitlines()
    assert table[2] == "| copy | GB/s | 5 |  | 4.568 | 0.91 | ratio >= 0.9 | a\\|b |"
    assert len(table) == 4


@pytest.fixture
def benches(monkeypatch, tmp_path):
    """Return two benchmarks; the second one fails after its first row."""

    def good():
        yield Row(name="one", unit="s", ours=1)

    def bad():
        yield Row(name="two", unit="s", ours=2)
        raise RuntimeError("the disk is gone")

    for name, rows in (("good", good), ("bad", bad)):
        (tmp_path / f"bench_{name}.py").touch()
        module = ModuleType(f"benchmarks.bench_{name}")
        vars(module)["rows"] = rows
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(command, "HERE", tmp_path)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    return tmp_path


def test_one_benchmark_is_measured_and_written(benches, capsys):
    assert command.main(["--only", "good", "--out", "first.md"]) == 0
    out = capsys.readouterr().out
    for heading in ("machine: ", "commit: ", "date: ", "python: ", "name"):
        assert heading in out
    written = (benches / "results" / "first.md").read_text()
    assert written.startswith("# Measured 20")
    assert "| one | s |  |  | 1 |  |  |  |" in written


def test_a_failing_benchmark_does_not_hide_the_others(benches, capsys):
    assert command.main([]) == 1
    captured = capsys.readouterr()
    assert "the disk is gone" in captured.err
    assert "benchmark bad failed" in captured.err
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines[-2:] == [["two", "s", "2"], ["one", "s", "1"]]


def test_an_unknown_benchmark_is_refused_with_the_known_names(benches, capsys):
    assert command.main(["--only", "x"]) == 2
    assert capsys.readouterr().err == "no benchmark x; there are: bad, good\n"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_scheduler_half_is_measured_as_it_runs(monkeypatch):
    monkeypatch.setattr(bench_vllm, "BLOCKS", 64)
    monkeypatch.setattr(bench_vllm, "HASHES", bench_vllm.HASHES[:64])
    monkeypatch.setattr(bench_vllm, "ROUNDS", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM, whatever it warns of
        names = [row.name for row in bench_vllm.rows()]
    assert names == [
        *[f"scheduler {part}, 64 blocks" for part in bench_vllm.PARTS],
        "scheduler repeated poll",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_each_part_for_one_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for part in gpu.parts():
        assert f"{part.name}: skipped: there is no " in told
    [written] = tmp_path.glob("*-gpu-none.md")
    assert "there is no CUDA device" in written.read_text()
    told = json.loads(written.with_suffix(".json").read_text())
    assert len(told["parts"]) == len(gpu.parts())


def test_a_failing_part_is_named_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "missing", lambda part: "")
    row = Row(name="copy", unit="GB/s", ours=1.0)

    def fails() -> list[Row]:
        raise RuntimeError("an illegal address")

    wanted = [gpu.Part("bad", fails), gpu.Part("good", lambda: [row])]
    rows, outcomes = gpu.run(wanted, 1.0)
    assert rows == [row]
    assert [one.state for one in outcomes] == [
        "failed: RuntimeError('an illegal address')",
        "passed",
    ]
    _, [late] = gpu.run(wanted[1:], 0.0)
    assert late.state == "skipped: 0 minutes are over"
    assert "good: skipped" in capsys.readouterr().out


def test_every_part_for_a_device_has_its_function() -> None:
    assert all(callable(getattr(gpu_parts, name)) for name in gpu.NAMES.values())


@pytest.mark.slow
def test_the_rows_of_models_run_at_a_tiny_size_without_a_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main(["--dry"]) == 0
    told = capsys.readouterr().out
    for name in gpu.MODELS:
        assert f"{name}: passed" in told
    for way in ("host, whole, BLHNC", "host, by layer, LBHNC", "files"):
        assert f"first token of 128 tokens from {way}" in told
    assert "written to" not in told
