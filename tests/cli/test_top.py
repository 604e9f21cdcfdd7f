"""``kvladder top``: glances at statuses, pictures of any width, and a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from kvladder import open_cache
from kvladder.cli import main
from kvladder.cli.running.glance import (
    Watch,
    bytes_text,
    share_text,
    spread_text,
    time_text,
)
from kvladder.cli.running.top import text_of
from kvladder.metrics import DURATIONS_S
from tests.cli.test_running import LAYOUT, running, save
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).parents[2]


def histogram(**calls):
    counts = [0] * (len(DURATIONS_S) + 1)
    for at, count in calls.items():
        counts[int(at[1:])] = count
    return {"le": list(DURATIONS_S), "counts": counts, "sum": 0.0}


def level(**more):
    zero = dict.fromkeys(
        ("blocks", "queries", "hits", "evicted", "loaded_bytes", "stored_bytes"), 0
    )
    return {**zero, "capacity": 100, "loaded_call_s": histogram(), **more}


def status(time_s, **levels) -> dict[str, Any]:
    return {
        "version": "1", "process": 7, "namespace": "ab" * 32, "block_bytes": 1 << 20,
        "time_s": time_s, "open_s": time_s, "sessions": 0,
        "levels": [{"name": name, "type": "files"} for name in levels],
        "stats": {**levels, "arena": {"slots": 10, "free": 3}}, "notices": [],
    }  # fmt: skip


def test_rates_and_percentiles_are_those_of_late():
    watch = Watch("here")
    first = level(queries=100, hits=10, loaded_bytes=1000, loaded_call_s=histogram(n9=1000))
    found = watch.look(status(10.0, host=level(), nvme=first))
    assert [one.read_per_s for one in found.levels] == [0.0, 0.0]
    assert found.levels[1].read_s == (DURATIONS_S[9], DURATIONS_S[9])
    later = level(
        queries=200, hits=40, loaded_bytes=5000, loaded_call_s=histogram(n9=1000, n0=98, n3=2)
    )
    nvme = watch.look(status(14.0, host=level(), nvme=later)).levels[1]
    assert (nvme.hits_per_s, nvme.read_per_s, nvme.hit_rate) == (7.5, 1000.0, 0.2)
    assert nvme.read_s == (DURATIONS_S[0], DURATIONS_S[3])
    quiet = watch.look(status(100.0, host=level(), nvme=later)).levels[1]
    assert quiet.read_per_s == 0.0
    assert quiet.read_s == (DURATIONS_S[9], DURATIONS_S[9])  # no calls of late: since the start
    restarted = watch.look(status(1.0, host=level(), nvme=first)).levels[1]
    assert restarted.read_per_s == 0.0


def test_losses_and_trouble_are_named_by_reason_and_level():
    nvme = level(dropped={"queue": {"30": 2, "90": 1}}, late=4, breakers={"get": 2, "put": 0})
    far = level(late=1, left_out=1, breakers_opened={"get": 3})
    found = Watch("here").look(status(1.0, host=level(), nvme=nvme, far=far))
    assert found.losses == {"dropped: queue": {"nvme": 3}, "late": {"nvme": 4, "far": 1}}
    assert [one.trouble for one in found.levels] == ["", "open: get", "left out"]
    assert found.levels[2].opened == 3


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("levels", [0, 1, 20])
def test_a_picture_fits_its_width_and_shows_every_level(width, levels, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"level-{n}" for n in range(levels)]
    big = {"blocks": 99, "queries": 123_456_789, "hits": 9_876_543, "late": 5}
    one = status(9.0, **{name: level(**big) for name in names})
    one["notices"] = [{"age_s": 70.0, "kind": "x", "text": "tier far: [red]no[/red] answer " * 9}]
    text = text_of([Watch("http://127.0.0.1:9480/").look(one)])
    assert max(map(len, text.splitlines())) <= width
    flat = "".join(text.split())
    assert all(name in flat for name in names)
    assert "[red]no[/red]" in flat
    assert ("Thiscachehasnolevels" in flat) == (not levels)
    if width >= 80 and levels:
        assert "99%" in flat
        assert "123,456,789" in flat


@pytest.mark.slow
def test_the_shadow_of_other_sizes_is_shown(tmp_path, capsys):
    with running(tmp_path, shadow=True) as (stack, cache):
        keys = save(cache, range(8))
        for _ in range(2):
            cache.fetch(keys).release()
        until(lambda: cache.stats()["shadow"]["hit_ratio"]["host"]["1"] > 0)
        assert main(["top", stack, "--once", "--every", "0.01"]) == 0
        out = capsys.readouterr().out
        assert "other sizes, by the live shadow" in out
        assert re.search(r"^host 0\.5x [01]\.[0-9]{3} 1x 0\.[1-9][0-9]* ", out, re.MULTILINE)


def test_numbers_are_short():
    assert [bytes_text(n) for n in (0, 1023, 1536, 73 << 20, 1 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "73 MiB", "1.0 TiB",
    ]  # fmt: skip
    assert [time_text(s) for s in (0, 25e-6, 0.0025, 1.5, 119, 600, 8000, 1e6)] == [
        "0 s", "25 µs", "2.5 ms", "1.5 s", "119 s", "10 min", "2.22 h", "12 d",
    ]  # fmt: skip
    assert (share_text(None), share_text(0.9346)) == ("-", "93.5%")
    assert (spread_text(None), spread_text((0.001, float("inf")))) == ("-", "1 ms / longer")


@pytest.mark.slow
def test_one_picture_is_printed_for_pipes_and_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with running(tmp_path) as (stack, cache):
        save(cache, range(8))
        assert main(["top", stack, "--every", "0.01"]) == 0  # the output is no terminal
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "nvme files" in out
        assert main(["top", stack, "--once", "--every", "0.01", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out).values()
        assert [(one["name"], one["blocks"]) for one in found["levels"]] == [
            ("host", 4),
            ("nvme", 4),
        ]
    assert main(["top", stack, "--once"]) == 2
    assert "no control socket at" in capsys.readouterr().err


@contextmanager
def shown_in_a_terminal(stack, term):
    """Run ``kvladder top`` in a terminal of 40 lines and 80 columns; end with it closed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvladder", "top", stack, "--every", "0.05"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={"PYTHONPATH": str(ROOT), "TERM": term, "PATH": os.environ["PATH"]},
    )  # fmt: skip
    os.close(theirs)
    yield Shown(process, ours)
    os.close(ours)


class Shown:
    """What a terminal was sent, in ``text``."""

    def __init__(self, process, ours):
        self._process = process
        self._ours = ours
        self.text = b""

    def has(self, text):
        self.text += os.read(self._ours, 1 << 16)
        return text in self.text

    def interrupt(self):
        """Press Ctrl-C, and wait until the screen is as it was."""
        self._process.send_signal(signal.SIGINT)
        until(lambda: self.has(b"\x1b[?1049l"))
        assert self._process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_terminal_shows_it_live_until_an_interrupt(tmp_path):
    with running(tmp_path) as (stack, cache):
        save(cache, range(8))
        with shown_in_a_terminal(stack, "xterm-256color") as shown:
            until(lambda: shown.has(b"nvme"))
            assert b"\x1b[?1049h" in shown.text  # the alternate screen
            save(cache, range(100, 120))
            until(lambda: shown.has(b"14 "))
            shown.interrupt()
            assert b"Traceback" not in shown.text


@pytest.mark.slow
def test_a_cache_that_ends_is_told_and_awaited(tmp_path):
    with ExitStack() as open_ones:
        with running(tmp_path) as (stack, _):
            shown = open_ones.enter_context(shown_in_a_terminal(stack, "xterm"))
            until(lambda: shown.has(b"works"))
        until(lambda: shown.has(b"not connected"))
        shown.text = b""
        with open_cache(stack, layout=LAYOUT):
            until(lambda: shown.has(b"works"))
            shown.interrupt()
