"""Print the extras of built-in tiers whose libraries run in this process, one a line.

Tests of a wheel, and of the oldest versions of libraries, install these. A tier that always runs in
a process of its own has a large native library, and is tested in the tree alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not an installed kvladder
from kvladder.config.registry import BUILT_IN_TIERS

for one in BUILT_IN_TIERS.values():
    if one.extra and not one.isolates:
        print(one.extra)
