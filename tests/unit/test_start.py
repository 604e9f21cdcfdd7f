"""Wrong settings end a start; a broken resource costs a level for a while. Real directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvladder
from kvladder.cli import main
from kvladder.errors import TierError, TierFull, Unavailable, blames_settings, refusal
from kvladder.tiers.files import tier as files
from kvladder.tiers.files.disk import Disk
from tests.kit.starts import REQUIRED, refused
from tests.patience import until

LAYOUT = kvladder.Layout(block_tokens=16, block_bytes=4096)


def stack(path: Path, **more: Any) -> dict[str, Any]:
    level = {"type": "files", "path": str(path), "capacity": "1 MiB", **more}
    level["breaker"] = {"retry": "20 ms", "retry_max": "20 ms"}
    return {"arena": {"size": "512 KiB"}, "tiers": [{"type": "host"}, level]}


def missing(path: Path) -> Path:
    return path / "none" / "kv"


def a_file(path: Path) -> Path:
    (path / "kv").touch()
    return path / "kv"


def below_a_file(path: Path) -> Path:
    return a_file(path) / "kv"


def a_link(path: Path) -> Path:
    (path / "kv").symlink_to(path)
    return path / "kv"


def a_loop(path: Path) -> Path:
    (path / "kv").symlink_to(path / "kv")
    return path / "kv" / "kv"


def too_long(path: Path) -> Path:
    return path / ("x" * 300)


def others(path: Path) -> Path:
    (path / "kv").mkdir()
    (path / "kv").chmod(0o777)
    return path / "kv"


@pytest.mark.parametrize("make", [missing, a_file, below_a_file, a_link, a_loop, too_long, others])
def test_a_wrong_path_ends_the_start(make: Callable[[Path], Path], tmp_path: Path) -> None:
    error = refused(stack(make(tmp_path)), LAYOUT)
    assert error.path == "tiers[1].path"
    assert REQUIRED not in error.hint


@pytest.mark.parametrize("more", [{"capasity": "1 GiB"}, {"capacity": "1 B"}, {"segment": "much"}])
def test_wrong_settings_end_the_start(more: dict[str, str], tmp_path: Path) -> None:
    # how many blocks a capacity is depends on their size, which is not known before
    foretold = "capacity" not in more
    error = refused(stack(tmp_path / "kv", **more), LAYOUT, foretold=foretold)
    assert REQUIRED not in error.hint


@pytest.mark.product("call", "code")
@pytest.mark.parametrize("call", ["open", "fsync", "fallocate", "preadv", "mkdir", "lock"])
@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE]
)
def test_a_failing_disk_costs_a_level_until_it_works(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = False

    class Broken(Disk):
        """A disk with failing calls of one kind."""

    def fail(self: Disk, *arguments: Any) -> Any:
        if works:
            return getattr(Disk, call)(self, *arguments)
        raise OSError(code, os.strerror(code))

    setattr(Broken, call, fail)
    monkeypatch.setattr(files, "Disk", Broken)
    error = refused(stack(tmp_path / "kv"), LAYOUT, foretold=False)
    assert error.path == "tiers[1].path"
    assert REQUIRED in error.hint
    with kvladder.open_cache(stack(tmp_path / "kv"), layout=LAYOUT) as cache:
        assert cache.stats()["files"]["left_out"] == 1
        works = True
        until(lambda: cache.stats()["files"]["left_out"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True])
def test_an_isolated_tier_reports_wrong_settings_too(*, isolate: bool) -> None:
    path = Path("/sys/kvladder")  # no user may make a directory there
    error = refused(stack(path, isolate=isolate), LAYOUT)
    assert error.path == "tiers[1].path"
    assert REQUIRED in error.hint


def test_check_says_whether_a_start_would_fail_or_leave_the_level_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    file = tmp_path / "stack.yaml"
    text = "arena: {size: 1 MiB}\ntiers:\n  - {type: host}\n  - {type: files, capacity: 1 MiB,"
    text += f" path: {tmp_path}"
    file.write_text(f"{text}}}\n")
    assert main(["check", str(file)]) == 0
    told = capsys.readouterr()
    said = f"access to {tmp_path} is denied (expected a directory that user"
    assert said in told.out + told.err
    assert "would start without this level, and try again" in told.out + told.err
    file.write_text(f"{text}, required: true}}\n")
    assert main(["check", str(file)]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert REQUIRED in told.err
    assert main(["check", str(file), "--offline"]) == 0
    required = next(line for line in capsys.readouterr().out.splitlines() if "required" in line)
    assert "True" in required.split()


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_only_a_few_system_errors_blame_the_settings(code: int) -> None:
    wrong = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
    assert blames_settings(OSError(code, "")) == (code in wrong)


@pytest.mark.parametrize(
    ("error", "path", "message"),
    [
        (Unavailable("down", path="url", hint="start it"), "url", "down"),
        (Unavailable("down"), "required", "down"),
        (TierFull("full"), "required", "full"),
        (TierError("lost"), "required", "lost"),
        (OSError(5, "bad"), "required", "OSError(5, 'bad')"),
    ],
)
def test_a_missing_required_tier_says_what_to_do(error: Exception, path: str, message: str) -> None:
    found = refusal(error)
    assert (found.path, found.message) == (path, message)
    assert found.hint.endswith(REQUIRED)
