"""The soak of each kind of model, with as many requests as it needs to compare memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.soak import MIXES, soak


@pytest.mark.parametrize("mix", MIXES)
def test_random_requests_get_right_answers(tmp_path: Path, mix: str) -> None:
    found = soak(mix, seed=1, folder=tmp_path)
    assert min(found["resets"], found["aborted"]) > 0
