"""The table of the benchmarks, and the command that fills it."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from types import ModuleType

import pytest

from benchmarks import __main__ as command
from benchmarks import bench_vllm
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
