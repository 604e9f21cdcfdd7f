"""The examples run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "demo.py"]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example, tmp_path):
    environment = os.environ | ({"PYTHONPATH": str(ROOT)} if (ROOT / "kvladder").is_dir() else {})
    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
