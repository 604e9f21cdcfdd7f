"""A minute of the soak."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.soak import soak


def test_a_minute_of_random_requests(tmp_path: Path) -> None:
    found = soak("llama", seconds=60, seed=1, folder=tmp_path)
    assert min(found["resets"], found["aborted"]) > 0
