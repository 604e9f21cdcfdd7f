"""``kvladder inspect``, ``verify`` and ``evict`` with running caches, and with files at rest."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from kvladder import KeyScheme, Layout, open_cache
from kvladder.cli import main
from kvladder.cli.running.inspect import token_ids
from kvladder.errors import ConfigError
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=2, block_bytes=4096, fields={"model": "upkeep"})
ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef0123"  # of these tests alone


def settings(tmp_path, **more):
    files = {"name": "nvme", "type": "files", "path": str(tmp_path / "kv"), "capacity": "1 MiB"}
    return {
        "arena": {"size": "128 KiB"},
        "control": str(tmp_path / "kv.sock"),
        "tiers": [{"type": "host"}, {**files, "when": "commit"}],
        **more,
    }


@contextmanager
def running(tmp_path, **more):
    """Open a cache; yield its stack's YAML file as text, and the cache."""
    path = tmp_path / "stack.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, **more)))
    with open_cache(str(path), layout=LAYOUT) as cache:
        yield str(path), cache


def save(cache, tokens, **told):
    """Save a prompt's blocks; return their keys once they are written below."""
    scheme = KeyScheme(cache.namespace, block_tokens=2)
    keys = scheme.chain(tokens, parent=scheme.root(salt=told.get("salt", "")))
    saving = cache.save(keys, **told)
    for slot, key in zip(saving.slots, keys, strict=True):
        cache.arena.view(slot)[:32] = key
    saving.commit()
    until(cache.idle)
    return keys


def said(capsys, *words, code=0):
    """Return what a command prints as JSON."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def damage(tmp_path, key):
    """Change a byte of a block in the files."""
    for path in tmp_path.rglob("seg-*"):
        data = path.read_bytes()
        at = data.find(key, data.find(key) + 1)  # the label has the key, too
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(b"\xff")
            return
    raise AssertionError("the block is in no file")


def test_a_block_is_found_by_its_key_and_by_tokens(tmp_path, capsys):
    with running(tmp_path) as (stack, cache):
        first, last = save(cache, range(4), salt="red", priorities=[60, 60], ttl_s=1000)
        found = said(capsys, "inspect", stack, "--tokens", "0,1,2,3,4", "--salt", "red")
        (copies,) = found.values()
        assert [*copies] == [first.hex(), last.hex()]
        host, nvme = copies[first.hex()]
        assert (host["level"], host["state"], host["priority"]) == ("host", "held", 60)
        assert (nvme["level"], nvme["bytes"]) == ("nvme", 2 * 4096)
        assert host["rank"] == 1  # the tail goes first
        assert copies[last.hex()][0]["rank"] == 0
        assert 990 < host["expires_s"] <= 1000
        assert host["holds"] == 0
        assert host["below"] == ""
        fetch = cache.fetch([first], salt="red")
        assert fetch.done
        (copies,) = said(capsys, "inspect", stack, first.hex(), "0" * 64).values()
        host, nvme = copies[first.hex()]
        assert (host["holds"], host["rank"], host["hits"]) == (1, None, 1)
        assert copies["0" * 64] == []
        assert main(["inspect", stack, first.hex(), "0" * 64]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0] == first.hex()
        assert out[1].split() == [
            *("level", "state", "priority", "hits", "idle", "size", "holds", "next")
        ]
        assert "stays while it is held, expires in " in out[2]
        assert "first, for a block of priority 60 or more" in out[3] or "after 1 others" in out[3]
        assert out[4] == f"{'0' * 64}: in no level"
        fetch.release()


def test_blocks_are_evicted_by_key_and_by_amount_but_not_while_held(tmp_path, capsys):
    with running(tmp_path) as (stack, cache):
        keys = save(cache, range(16))
        fetch = cache.fetch(keys[:1])
        assert fetch.done
        hexes = [key.hex() for key in keys[:3]]
        (done,) = said(capsys, "evict", stack, *hexes, "0" * 64, "--level", "host").values()
        assert done == {"evicted": 2, "held": 1, "missing": 1, "waiting": 0}
        assert cache.stats()["host"]["blocks"] == 6
        assert cache.stats()["nvme"]["blocks"] == 8
        (done,) = said(capsys, "evict", stack, "--amount", "50%", "--level", "host").values()
        assert done["evicted"] == 3
        (done,) = said(capsys, "evict", stack, "--amount", "16KiB", "--level", "nvme").values()
        assert done["evicted"] == 4
        assert main(["evict", stack, "--amount", "100", "--level", "host"]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/kv.sock: 2 blocks evicted from host\n"
        assert cache.stats()["host"]["blocks"] == 1  # the held one
        assert cache.stats()["host"]["evicted"] == 7
        fetch.release()
        cache.check()


def test_what_host_alone_has_is_written_below_before_it_is_evicted(tmp_path, capsys):
    tiers = settings(tmp_path)["tiers"]
    tiers[1]["when"] = "evict"
    with running(tmp_path, tiers=tiers) as (stack, cache):
        keys = save(cache, range(16))
        before = cache.stats()["nvme"]["blocks"]
        (copies,) = said(capsys, "inspect", stack, keys[0].hex()).values()
        assert before == 0
        assert copies[keys[0].hex()][0]["below"] == "nvme"
        (done,) = said(capsys, "evict", stack, "--amount", "8", "--level", "host").values()
        assert done["evicted"] == 8
        until(cache.idle)
        assert cache.stats()["host"]["blocks"] == 0
        assert cache.stats()["nvme"]["blocks"] == 8
        cache.check()


@pytest.mark.parametrize("codecs", [None, ["zstd", "checksum"]])
def test_damaged_blocks_of_a_running_cache_are_dropped_and_counted(tmp_path, capsys, codecs):
    tiers = settings(tmp_path)["tiers"]
    tiers[1] |= {"codecs": codecs} if codecs else {}
    with running(tmp_path, tiers=tiers) as (stack, cache):
        keys = save(cache, range(60))
        (good,) = said(capsys, "verify", stack).values()
        assert (good["checked"], good["damaged"], good["lost"]) == (30, 0, 0)
        assert cache.stats()["nvme"]["hits"] == 0
        files = [*tmp_path.rglob("seg-*")]
        if codecs:
            for path in files:
                data = bytearray(path.read_bytes())
                at = data.find(keys[7])
                data[at - 16 : at + 600] = bytes(616)  # its label
                with path.open("r+b") as file:
                    file.write(data)
        else:
            damage(tmp_path, keys[7])
        (bad,) = said(capsys, "verify", stack, "--level", "nvme", code=1).values()
        assert (bad["checked"], bad["damaged"] + bad["lost"]) == (30, 1)
        assert cache.stats()["nvme"]["blocks"] == 29
        (copies,) = said(capsys, "inspect", stack, keys[7].hex()).values()
        assert [one["level"] for one in copies[keys[7].hex()] if one["state"] == "held"] in (
            ["host"],
            [],
        )
        assert main(["verify", stack]) == 0
        assert ": 29 blocks checked (116 KiB), 0 damaged, 0 lost" in capsys.readouterr().out
        cache.check()


def test_files_at_rest_are_checked_and_the_damaged_are_not_found_again(tmp_path, capsys):
    with running(tmp_path) as (stack, cache):
        keys = save(cache, range(40))
    damage(tmp_path, keys[5])
    assert main(["verify", stack]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"nvme at {tmp_path}/kv: 20 blocks checked (160 KiB), 1 damaged")
    assert "1 block damaged or lost, dropped" in captured.err
    (again,) = said(capsys, "verify", stack).values()
    assert (again["checked"], again["damaged"]) == (19, 0)
    (rest,) = said(capsys, "verify", stack, "--resume", "nvme:15").values()
    assert rest["checked"] == 4
    with running(tmp_path) as (_, cache):
        assert cache.lookup(keys).total == 5
        assert cache.stats()["nvme"]["recovered"] == 19


def test_an_interrupted_check_says_how_to_continue(tmp_path, capsys):
    with running(tmp_path) as (stack, cache):
        save(cache, range(60))
        words = [sys.executable, "-m", "kvladder", "verify", stack, "--rate", "64KiB"]
        checking = subprocess.Popen(
            words,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        until(lambda: cache.stats()["nvme"]["loaded"] > 16)  # a second step has begun
        checking.send_signal(signal.SIGINT)
        out, err = checking.communicate(timeout=PATIENCE_S)
        assert checking.returncode == 128 + signal.SIGINT
        (done,) = re.findall(r": ([0-9]+) blocks checked", out)
        assert int(done) in {16, 30}
        assert err == f"kvladder: interrupted: --resume nvme:{done} continues\n"
        (rest,) = said(capsys, "verify", stack, "--resume", f"nvme:{done}").values()
        assert rest["checked"] == 30 - int(done)


def test_a_terminal_shows_a_bar_while_blocks_are_checked(tmp_path):
    with running(tmp_path) as (stack, cache):
        save(cache, range(60))
        ours, theirs = pty.openpty()
        checking = subprocess.Popen(
            [sys.executable, "-m", "kvladder", "verify", stack],
            stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True,
            env={"PYTHONPATH": str(ROOT), "TERM": "xterm", "PATH": os.environ["PATH"]},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal's other side is closed
            while data := os.read(ours, 1 << 16):
                shown += data
        os.close(ours)
        assert checking.wait(PATIENCE_S) == 0
    assert f"{tmp_path}/kv.sock nvme".encode() in shown
    assert b"[####################################]" in shown
    assert b"Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect"], "inspect: which blocks? (expected either keys or --tokens)"),
        (["inspect", "beef"], "keys: 'beef' (expected 64 hexadecimal digits)"),
        (["inspect", "--tokens", "1"], "--tokens: 1 tokens, and a block has 2"),
        (["inspect", "--tokens", "one"], "--tokens: invalid literal"),
        (["evict", "--level", "host"], "evict: which blocks?"),
        (["evict", "--level", "host", "--amount", "few"], "--amount: 'few'"),
        (
            ["evict", "--level", "far", "--amount", "1"],
            "no level 'far': expected one of host",
        ),
        (["evict", "--level", "far", "--amount", "10%"], "--level: 'far' (expected one of host"),
        (["verify", "--level", "host"], "--level: 'host' (expected one of nvme)"),
        (["verify", "--resume", "nvme"], "--resume: 'nvme' (expected LEVEL:NUMBER"),
        (["verify", "--rate", "fast"], "--rate: 'fast'"),
        (["top", "--every", "0"], "--every: 0 (expected more than 0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, capsys, words, says):
    with running(tmp_path) as (stack, _):
        assert main([words[0], stack, *words[1:]]) == 2
        assert says in capsys.readouterr().err


def test_a_port_needs_a_token_to_change_something(tmp_path, capsys):
    http = {"listen": "127.0.0.1:0", "token": TOKEN}
    with running(tmp_path, http=http) as (_, cache):
        save(cache, range(4))
        listens = said(capsys, "top", f"{tmp_path}/kv.sock", "--once", "--every", "0.01")
        assert [*listens] == [f"{tmp_path}/kv.sock"]
        from kvladder.control.sockets import ask

        names = ask(tmp_path / "kv.sock", {"command": "status"})["listens"]
        (url,) = [one for one in names if one.startswith("http")]
        assert main(["evict", url, "--amount", "1", "--level", "host"]) == 2
        assert "missing token" in capsys.readouterr().err
        (tmp_path / "token").write_text(TOKEN + "\n")
        words = ["--amount", "1", "--level", "host", "--token-file", str(tmp_path / "token")]
        (done,) = said(capsys, "evict", url, *words).values()
        assert done["evicted"] == 1
        assert said(capsys, "inspect", url, "0" * 64) == {url: {"0" * 64: []}}
    assert main(["inspect", url, "0" * 64]) == 2
    assert f"{url}: no answer: Connection refused" in capsys.readouterr().err


def test_token_ids_are_read_from_text_and_files(tmp_path):
    (tmp_path / "ids").write_text("[1, 2,\n3 4]\n")
    assert token_ids("1,2") == [1, 2]
    assert token_ids(f"@{tmp_path}/ids") == [1, 2, 3, 4]
    for wrong in ("", "-1", "1,,x", f"@{tmp_path}/none", str(1 << 32)):
        with pytest.raises(ConfigError, match="--tokens"):
            token_ids(wrong)
