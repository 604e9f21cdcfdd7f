"""The examples run as they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.name not in {"demo.py", "demo_sglang.py", "prefill_decode.py", "router.py", "agent.py"}
]
TESTS = [path for path in EXAMPLES if path.name.startswith("test_")]
SCRIPTS = [path for path in EXAMPLES if path not in TESTS]


def test_examples_are_found():
    assert SCRIPTS
    assert TESTS


@pytest.mark.slow
@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: path.name)
def test_an_example_runs(example, tmp_path):
    done = run([example], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it says nothing of what happened"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("example", TESTS, ids=lambda path: path.name)
def test_an_example_of_tests_passes(example, mode, seed, tmp_path):
    """Runs in its own project with pytest-asyncio's own settings only."""
    shutil.copy(example, tmp_path)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\n"
    )
    options = ("-q", "-p", "no:cacheprovider", "--strict-markers", f"--sim-seed={seed}")
    done = run(["-m", "pytest", *options, example.name], tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout


def run(arguments, folder):
    environment = os.environ | ({"PYTHONPATH": str(ROOT)} if (ROOT / "kvladder").is_dir() else {})
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
