"""Resources named in a configuration are examined before anything is opened."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import pytest

from kvladder import Layout, open_cache
from kvladder import preflight as module
from kvladder.cli import main
from kvladder.config import registry
from kvladder.config.stack import load_config
from kvladder.preflight import preflight
from kvladder.tiers.files import disk
from tests.kit.unruly import UnrulyTier


def config(*below, **more):
    """A stack with these levels below host."""
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, *below], **more}
    return load_config(source, env={})


def files(path, **more):
    return {"name": "disk", "type": "files", "path": str(path), "capacity": "1 MiB", **more}


def test_preflight_reports_existing_resources(tmp_path):
    found = preflight(config(files(tmp_path / "kv")))
    assert (found.warnings, found.errors) == ([], [])
    facts = found.facts["disk"]
    assert facts["directory"] == f"{tmp_path / 'kv'} (will be created)"
    assert facts["direct I/O"] in {"yes", "no"}
    assert "0 B in files there" in facts["free"]
    assert {"msgspec", "xxhash"} <= found.facts["libraries"].keys()
    assert not list(tmp_path.iterdir())


def test_preflight_works_while_an_event_loop_runs(tmp_path):
    async def ask():
        return preflight(config(files(tmp_path)))

    assert asyncio.run(ask()).errors == []


def test_a_capacity_beyond_the_disk_is_reported(tmp_path):
    (warning,) = preflight(config(files(tmp_path, capacity="1000 TiB"))).warnings
    assert warning.startswith(f"tiers[1]: capacity is 1000 TiB, but {tmp_path} has room for only ")


def test_an_arena_beyond_the_machines_memory_is_reported(monkeypatch, tmp_path):
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    meminfo = tmp_path / "proc" / "meminfo"
    for text, warnings in (
        ("MemTotal: 9 kB\nMemAvailable:    512 kB\n", 1),
        ("MemTotal: 9 kB\nMemAvailable:    4096 kB\n", 0),
        ("MemTotal: 9 kB\n", 0),
    ):
        meminfo.write_text(text)
        assert len(preflight(config()).warnings) == warnings
    meminfo.unlink()
    assert preflight(config()).warnings == []


def test_an_unusable_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for path, says in (
        (tmp_path / "none" / "kv", f"{tmp_path / 'none'} does not exist"),
        (tmp_path / "file", f"{tmp_path / 'file'} is not a directory"),
        (tmp_path / "file" / "kv", f"{tmp_path / 'file'} is not a directory"),
        ("/proc/kv", "access to /proc is denied"),
    ):
        if path == "/proc/kv" and os.access("/proc", os.W_OK):
            continue  # root may write everywhere, it seems
        (error,) = preflight(config(files(path))).errors
        assert error.path == "tiers[1].path"
        assert says in str(error)


@pytest.mark.slow
def test_an_isolated_tier_is_examined_in_its_process(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._registered, ("tiers", "unruly"), UnrulyTier)
    order = tmp_path / "order"
    unruly = {"type": "unruly", "path": str(order), "capacity": "1 MiB", "isolate": True}
    found = preflight(config(unruly))
    assert found.facts["unruly"] == {"capacity": str(1 << 20)}
    assert found.warnings == ["tiers[1]: it may be late"]
    order.write_text("exit")
    found = preflight(config(unruly))
    ended = "the process of UnrulyTier has ended: exit status 3"
    assert found.warnings == [f"tiers[1]: the tier cannot be examined: {ended}"]
    assert (found.errors, "unruly" in found.facts) == ([], False)


def test_a_missing_key_is_reported(monkeypatch, tmp_path):
    monkeypatch.delenv("KVLADDER_KEY", raising=False)
    coded = config(files(tmp_path, codecs=["zstd", "aes-gcm"]))
    (error,) = preflight(coded).errors
    assert error.path == "tiers[1].codecs.aes-gcm.variable"
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    found = preflight(coded)
    assert not found.errors
    assert "cryptography" in found.facts["libraries"]


def test_a_control_socket_without_a_directory_is_reported(tmp_path):
    (error,) = preflight(config(control=str(tmp_path / "none" / "socket"))).errors
    assert error.path == "control.path"
    assert not preflight(config(control=str(tmp_path / "socket"))).errors


def test_a_control_socket_that_cannot_have_its_name_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for name, says in (("x" * 120, "a path of at most 107 bytes"), ("file", "not a socket")):
        (error,) = preflight(config(control=str(tmp_path / name))).errors
        assert error.path == "control.path"
        assert says in str(error)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    assert not preflight(config(control=str(tmp_path / "left"))).errors


def test_the_http_port_and_its_token_are_checked(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = preflight(config(http=address))
        assert found.errors == []
        (warning,) = found.warnings
        assert warning.startswith(f"http.listen: {address}: Address already in use")
    assert preflight(config(http=address)).warnings == []
    absent = {"listen": address, "token_file": str(tmp_path / "absent")}
    (error,) = preflight(config(http=absent)).errors
    assert error.path == "http.token_file"


def test_addresses_for_events_are_checked():
    pytest.importorskip("zmq")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        found = preflight(config(events={"publish": address}))
    assert found.errors == []
    assert found.warnings == [
        f"events.publish: {address} is already in use, perhaps by a running engine"
    ]
    (error,) = preflight(config(events={"publish": "tcp://no.such.host.invalid:1"})).errors
    assert error.path == "events.publish"


@pytest.mark.parametrize(
    ("required", "says"),
    [
        ("msgspec>=999", "msgspec: version"),
        ("no-such-library-at-all>=1", "library-at-all: is not installed (reinstall kvladder)"),
        ("no-such-library-at-all>=1 ; extra == 'encryption'", "kvladder[encryption]"),
    ],
)
def test_a_library_of_the_wrong_version_is_reported(monkeypatch, required, says):
    monkeypatch.setattr(module, "requires", lambda _: [required, "absent>1; extra == 'vllm'"])
    monkeypatch.setenv("KVLADDER_KEY", "11" * 32)
    coded = {"type": "memory", "capacity": "1 MiB", "codecs": ["aes-gcm"]}
    wrong = preflight(config() if "extra" not in required else config(coded)).errors
    if "extra" in required:
        wrong = [error for error in wrong if error.path == "no-such-library-at-all"]
    (error,) = wrong
    assert says in str(error)


def test_check_examines_resources_unless_offline(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVLADDER_KEY", raising=False)
    stack = tmp_path / "stack.yaml"
    text = f"""
        arena: {{size: 1 MiB}}
        tiers:
          - {{type: host}}
          - {{name: one, type: files, path: {tmp_path}/none/kv, capacity: 1 MiB}}
          - {{name: two, type: files, path: {tmp_path}/kv, capacity: 1 MiB, codecs: [aes-gcm]}}
    """
    stack.write_text(text)
    assert main(["check", str(stack)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, second = told.err.splitlines()
    assert first.startswith(f"kvladder: {stack}: tiers[1].path: {tmp_path}/none does not exist")
    assert second.startswith(f"kvladder: {stack}: tiers[2].codecs.aes-gcm.variable: KVLADDER_KEY")
    assert main(["check", str(stack), "--offline"]) == 0
    assert "found on this system" not in capsys.readouterr().out
    stack.write_text(
        text.replace("/none/kv", "/other").replace("codecs: [aes-gcm]", "when: commit")
    )
    assert main(["check", str(stack)]) == 0
    told = capsys.readouterr()
    assert f"  two: directory {tmp_path}/kv (will be created); free " in told.out
    assert "  libraries: kvladder " in told.out


def warned(caplog, source):
    """The warnings of a start."""
    caplog.clear()
    with open_cache(source, layout=Layout(block_tokens=4, block_bytes=4096)):
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_every_start_logs_the_warnings_of_check(tmp_path, caplog, monkeypatch):
    unchecked = files(tmp_path / "kv", capacity="16 MiB", codecs=[])
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, unchecked]}
    monkeypatch.setattr(disk, "space", lambda _directory: (0, 4096))
    monkeypatch.setattr(module, "memory_available", lambda _root: 4096)
    expected = [*load_config(source, env={}).warnings, *preflight(load_config(source)).warnings]
    assert len(expected) == 3
    assert sorted(warned(caplog, source)) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["hang", "exit", ""])
@pytest.mark.parametrize("isolate", [True, False])
def test_a_start_does_not_wait_for_a_silent_tier(tmp_path, caplog, monkeypatch, order, isolate):
    if order == "exit" and not isolate:
        pytest.skip("it would end this process")
    monkeypatch.setitem(registry._registered, ("tiers", "unruly"), UnrulyTier)
    monkeypatch.setattr(module, "START_S", 0.5 if order == "hang" else 60.0)
    (tmp_path / "order").write_text(order)
    unruly = {"type": "unruly", "path": str(tmp_path / "order"), "capacity": "1 MiB"}
    unruly["isolate"] = isolate
    said = warned(caplog, {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, unruly]})
    assert ("tiers[1]: it may be late" in said) == (order == "")
    assert any("it is open" in text for text in said)


@pytest.mark.parametrize(("mode", "is_exposed"), [(0o600, 0), (0o640, 0), (0o440, 0), (0o644, 1)])
def test_secrets_that_every_user_can_read_are_reported(tmp_path, caplog, mode, is_exposed):
    for name in ("token", "key"):
        (tmp_path / name).write_text("0123456789abcdef0123456789abcdef")
        (tmp_path / name).chmod(mode)
    http = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "token")}
    forget = {"path": str(tmp_path / "purges"), "key_file": str(tmp_path / "key")}
    codec = {"name": "aes-gcm", "key_file": str(tmp_path / "key")}
    level = {"type": "memory", "capacity": "1 MiB", "codecs": [codec]}
    stack = config(level, http=http, forget=forget)
    files = (("http.token_file", "token"), ("forget.key_file", "key"), ("tiers[1].codecs", "key"))
    expected = [
        f"{setting}: {tmp_path / name} can be read by every user: chmod o-r {tmp_path / name}"
        for setting, name in files
    ] * is_exposed
    assert preflight(stack).warnings == expected
    with caplog.at_level(logging.WARNING, "kvladder"):
        module.warn_at_start(stack)
    assert [record.message for record in caplog.records] == expected
