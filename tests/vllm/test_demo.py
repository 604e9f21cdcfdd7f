"""The claims of ``make demo`` are true."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import RUN_S
from tests.vllm.harness import HERE, environment

DEMO = HERE.parents[1] / "examples" / "demo.py"


def test_every_claim_of_the_demo_holds() -> None:
    shown = subprocess.run(
        [sys.executable, str(DEMO)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout[-4000:] + shown.stderr[-4000:]
    assert "same output as without connector" in shown.stdout
    assert "flipped byte: detected" in shown.stdout
