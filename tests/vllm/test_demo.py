"""What ``make demo`` shows is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import RUN_S

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_every_claim_of_the_demo_holds() -> None:
    shown = subprocess.run(
        [sys.executable, str(DEMO)], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert shown.returncode == 0, shown.stdout[-4000:] + shown.stderr[-4000:]
