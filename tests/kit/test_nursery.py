"""A process of the nursery ends as Python does, though it takes no modules apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit
import sys
import threading
import time

def late():
    time.sleep(0.1)
    print("the thread has ended")

atexit.register(print, "the last words")
threading.Thread(target=late).start()
print("the program has ended")
"""
SAID = ["the program has ended", "the thread has ended", "the last words"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no room')", 1, "no room"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
    ],
)
def test_a_program_ends_with_its_threads_its_last_words_and_its_code(
    tmp_path: Path, last: str, code: int, error: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + last)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tests.vllm.nursery import end, run; end(run(sys.argv[1]))",
            str(program),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert [line for line in done.stdout.splitlines() if line in SAID] == SAID
    assert error in done.stderr
    assert error or not done.stderr
