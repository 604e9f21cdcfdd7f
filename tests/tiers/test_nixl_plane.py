"""Two ends of NIXL's data plane in one process of their own, over TCP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
BLOCK = 64 << 10
SLOT = BLOCK + 4096


@pytest.mark.slow
def test_a_block_of_any_length_is_written_up_to_the_next_eighth() -> None:
    pytest.importorskip("nixl_cu13", reason="the extra nixl is not installed")
    told = [sys.executable, "-m", "tests.tiers.test_nixl_plane"]
    done = subprocess.run(
        told, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def write_all_lengths() -> None:
    """Write blocks of lengths around each eighth, and look at the other end's slots."""
    from kvladder.arena import Arena, Slot
    from kvladder.tiers.nixl.plane import CLASSES, NixlPlane

    unit = BLOCK // CLASSES
    lengths = [at * unit + more for at in range(CLASSES + 1) for more in (-1, 0, 1)]
    lengths = [one for one in lengths if 0 < one <= BLOCK]
    count = len(lengths)
    with closing(Arena.create(count, SLOT)) as near, closing(Arena.create(count, SLOT)) as far:
        ours, theirs = (NixlPlane(one, "tcp", "lo") for one in (near, far))
        try:
            ours.join(theirs.metadata, theirs.area, BLOCK)
            for number in range(count):
                near.view(Slot(number))[:] = b"\x5a" * SLOT
            until = time.monotonic() + PATIENCE_S
            posted = ours.write(range(count), range(count), lengths)
            while not ours.ended(posted):
                theirs.progress()
                assert time.monotonic() < until
            for slot, length in enumerate(lengths):
                written = -(-length // unit) * unit
                expected = b"\x5a" * written + bytes(SLOT - written)
                assert bytes(far.view(Slot(slot))) == expected, length
        finally:
            ours.destroy()
            theirs.destroy()


if __name__ == "__main__":
    write_all_lengths()
    os._exit(0)  # two agents of one process do not survive its ordinary end
