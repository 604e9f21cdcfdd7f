"""Locks of PyTorch's that a process which was killed has left where SGLang's hash is compiled."""

from __future__ import annotations

from pathlib import Path

from tests.sglang.engine import remove_abandoned


def test_abandoned_locks_are_removed(tmp_path: Path) -> None:
    held, left = (tmp_path / name / "lock" for name in ("held", "left"))
    for lock in (held, left):
        lock.parent.mkdir()
        lock.touch()
    with held.open():
        remove_abandoned(tmp_path)
    assert (held.exists(), left.exists()) == (True, False)
