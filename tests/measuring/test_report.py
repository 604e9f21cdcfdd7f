"""The pages of reports, as a browser shows them: headless Chromium draws them and is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.row import Row
from kvladder.cli import main
from tests.kit.browser import CHROMIUM, Browser, browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="install chromium")
pytestmark = pytest.mark.slow


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for n in range(300):
            talk, length = n * 7 % 40, 1 + n % 9
            ids = [100 * talk + at for at in range(length)]
            line = {"timestamp": n * 500, "input_length": length * 512, "hash_ids": ids}
            file.write(json.dumps({**line, "output_length": 3}) + "\n")
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as shown:
        yield shown


DRAWN = """[...document.querySelectorAll('.js-plotly-plot')]
  .filter((plot) => plot.querySelector('svg.main-svg') && plot.querySelector('.point'))
  .map((plot) => { let at = plot; while (at.tagName !== 'H2') at =
    at.previousElementSibling || at.parentElement; return at.textContent; })"""
"""The title of each plot that is drawn, with its points: the heading above it."""
WIDTH = """Math.max(document.documentElement.scrollWidth,
  ...[...document.querySelectorAll('svg.main-svg')].map((e) => e.getBoundingClientRect().right))"""


def holds(chromium: Browser, page: Path, *titles: str) -> None:
    """Check the page in light on a desk, and in dark on a phone."""
    text = page.read_text()
    assert not re.findall(r"""<(?:link|img|iframe)\b|\bsrc=["']""", text[: text.index("<script>")])
    assert "default-src 'none'" in text
    pictures = set()
    for dark, width in ((False, 1000), (True, 390), (False, 360)):
        chromium.problems.clear()
        chromium.requested.clear()
        chromium.look(dark=dark, width=width)
        chromium.go(page.as_uri())
        chromium.until("document.readyState === 'complete'")
        assert chromium.run(DRAWN) == [*titles]
        colour = "rgb(230, 232, 235)" if dark else "rgb(31, 35, 40)"
        chromium.until(f"document.querySelector('.xtick text')?.style.fill === '{colour}'")
        assert chromium.run(WIDTH) <= width
        assert {url for url in chromium.requested if not url.startswith("data:")} == {page.as_uri()}
        assert chromium.problems == []
        picture = page.with_suffix(f".{width}.png")
        chromium.picture(picture)
        pictures.add(picture.read_bytes())
    assert len(pictures) == 3


@needs_browser
def test_a_replay_is_drawn(chromium: Browser, trace: Path, tmp_path: Path, capsys: Any) -> None:
    stack, page = tmp_path / "stack.yaml", tmp_path / "replay.html"
    tiers = "[{type: host}, {name: cold, type: memory, capacity: 2 MiB, when: commit}]"
    stack.write_text(f"arena: {{size: 256 KiB}}\ntiers: {tiers}\n")
    arguments = ["replay", str(trace), "--config", str(stack), "--block-bytes", "4 KiB"]
    assert main([*arguments, "--prefill", "2000", "--report", str(page)]) == 0
    assert "prioritized-lru" in capsys.readouterr().out
    holds(chromium, page, "Hits by level", "Bytes written by level", "Computing saved by level")


@needs_browser
def test_a_plan_is_drawn(chromium: Browser, trace: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "plan.html"
    arguments = ["plan", str(trace), "--block-bytes", "1 MiB", "--prefill", "2000"]
    prices = ["--prices", "memory=3,disk=0.1,gpu=2.5"]
    assert main([*arguments, *prices, "--report", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("hits ")
    holds(chromium, page, "Hits by size", "Money left by size")


@needs_browser
def test_a_bench_is_drawn(chromium: Browser, tmp_path: Path, capsys: Any) -> None:
    page, disk = tmp_path / "bench.html", tmp_path / "disk <b>"
    disk.mkdir()
    arguments = ["bench", str(disk), "--sizes", "64KiB", "--depths", "1,2", "--bytes", "8MiB"]
    assert main([*arguments, "--report", str(page)]) == 0
    assert "limit" in capsys.readouterr().out
    assert "disk &lt;b&gt;" in page.read_text()
    holds(chromium, page, "Read", "Write")


@needs_browser
def test_runs_of_the_benchmarks_are_drawn_with_their_history(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(benchmarks, "names", lambda: ["one"])
    page = tmp_path / "bench.html"
    for day, ours in (("2026-01-02", 2.0), ("2026-01-03", 3.0)):
        row = Row(name="copy", unit="GB/s", limit=4.0, peer=1.0, ours=ours)
        other = Row(name="find", unit="s", ours=ours)
        monkeypatch.setattr(benchmarks, "measure", lambda _wanted, kept=(row, other): (kept, []))
        monkeypatch.setattr(benchmarks, "machine", lambda at=day: {"date": f"{at} 10:00 UTC"})
        assert benchmarks.main(["--out", f"{day}.md", "--report", str(page)]) == 0
    capsys.readouterr()
    kept = json.loads((tmp_path / "results" / "2026-01-02.json").read_text())
    assert [row["ours"] for row in kept["rows"]] == [2.0, 2.0]
    holds(chromium, page, "GB/s", "s", "Ratio over the runs")


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    trace: Path, tmp_path: Path, capsys: Any
) -> None:
    page = tmp_path / "absent" / "plan.html"
    assert main(["plan", str(trace), "--block-bytes", "1 MiB", "--report", str(page)]) == 2
    hint = "expected a file in a directory that exists"
    error = capsys.readouterr().err
    assert error == f"kvladder: --report: {page}: no such directory ({hint})\n"
