"""``--durations-file`` writes one line a test, also for tests that ran in other processes."""

from __future__ import annotations

import os
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_test_that_ran_is_recorded_once_and_after_those_before(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytester.makepyfile(
        test_it="import pytest, time\n"
        "@pytest.fixture\ndef slow(): time.sleep(0.2)\n"
        "def test_fast(): pass\ndef test_slow(slow): time.sleep(0.3)\n"
        "def test_busy():\n"
        "    end = time.process_time() + 0.4\n    while time.process_time() < end: pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    file = pytester.path / "durations.tsv"
    file.write_text("1.00\t0.50\tearlier\n")
    options = ("-p", "tests.kit.durations", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result = pytester.runpytest_subprocess(*options, "-n", workers, "--durations-file", file.name)
    assert result.ret == 0
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    assert rows[0] == ["1.00", "0.50", "earlier"]
    found = {test: (float(seconds), float(cpu_s)) for seconds, cpu_s, test in rows[1:]}
    assert len(rows) == 4
    assert set(found) == {f"test_it.py::test_{name}" for name in ("fast", "slow", "busy")}
    assert found["test_it.py::test_slow"][0] >= 0.5
    assert found["test_it.py::test_slow"][1] < 0.3 <= found["test_it.py::test_busy"][1]
