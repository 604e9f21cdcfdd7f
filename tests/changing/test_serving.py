"""A real cache gets another stack while it serves: over its socket, its port and by command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import yaml

from kvladder import open_cache
from kvladder.changing.answers import ChangeAnswers
from kvladder.cli import main
from kvladder.control.sockets import ask
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from tests.kit.served import Server
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

LAYOUT = Layout(block_tokens=1, block_bytes=4096, fields={"model": "changing"})
TOKEN = "0123456789abcdef0123"  # of these tests alone
STACK = """# the cache of these tests
arena: {{size: 1 MiB}}
control: {0}/kv.sock
http: {{listen: "127.0.0.1:0", token: {1}}}
tiers:
  - type: host
  - name: disk   # the fast one
    type: files
    path: {0}/disk
    capacity: 1 MiB
    segment: 64 KiB
    when: commit
"""
COLD = "  - {{name: cold, type: files, path: {0}/cold, capacity: 1 MiB, segment: 64 KiB}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("disk", "cold"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "stack.yaml"
    path.write_text(STACK.format(folder, TOKEN), encoding="utf-8")
    return path


@pytest.fixture
def cache(file: Path) -> Iterator[CacheManager]:
    with open_cache(file, layout=LAYOUT) as cache:
        yield cache


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "little")) for number in numbers]


def save(cache: CacheManager, *numbers: int, **options: Any) -> None:
    for number in numbers:
        saving = cache.save(keys(number), **options)
        for slot in saving.slots:
            cache.arena.view(slot)[:4096] = bytes([number % 251]) * 4096
        saving.commit()
    until(cache.idle)


def served(cache: CacheManager, *numbers: int) -> list[str]:
    """Return where each block comes from, and check its bytes; "" for a miss."""
    found: list[str] = []
    for number in numbers:
        fetch = cache.fetch(keys(number), deadline_s=PATIENCE_S)
        until(partial(getattr, fetch, "done"))
        for slot in fetch.slots:
            assert bytes(cache.arena.view(slot)[:4096]) == bytes([number % 251]) * 4096
        found += fetch.sources or [""]
        fetch.release()
    return found


def change(folder: Path, **request: Any) -> Any:
    return ask(folder / "kv.sock", {"command": "change", **request}, timeout_s=PATIENCE_S)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main([*map(str, argv)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_whole_stack_is_applied_saved_and_survives_a_restart(
    cache: CacheManager, file: Path, folder: Path
) -> None:
    save(cache, *range(100))
    text = STACK.format(folder, TOKEN).replace("1 MiB\n    segment", "512 KiB\n    segment")
    text += COLD.format(folder)
    done = change(folder, stack=text, save=True)
    assert done["changed"] == [
        "tiers.disk.capacity: 1 MiB -> 512 KiB",
        "tiers.cold: files, attached below disk",
    ]
    assert done["saved"] == str(file)
    assert file.read_text(encoding="utf-8") == text
    stats = cache.stats()
    assert [name for name in stats if "capacity" in stats[name]] == ["host", "disk", "cold"]
    assert stats["disk"]["capacity"] == stats["disk"]["blocks"] == 64
    assert "512 KiB" in cache.describe()
    levels = ask(folder / "kv.sock", {"command": "status"})["levels"]
    assert [one["name"] for one in levels] == ["host", "disk", "cold"]
    save(cache, 20, 21)
    cache.close()
    with open_cache(file, layout=LAYOUT) as again:
        assert "" not in served(again, 20, 21)
        assert again.stats()["disk"]["recovered"] == 64


def without_clients(told: str) -> str:
    """Return a description without the clients of sockets, which come and go."""
    return "\n".join(line for line in told.splitlines() if "clients at the" not in line)


def unchanged(cache: CacheManager, file: Path, folder: Path) -> Callable[[], None]:
    """Return a check that nothing has changed since."""
    text, told = file.read_text(encoding="utf-8"), without_clients(cache.describe())
    counts = cache.stats()

    def check() -> None:
        assert file.read_text(encoding="utf-8") == text
        assert without_clients(cache.describe()) == told
        now = cache.stats()
        assert [*now] == [*counts]
        assert now["disk"]["capacity"] == counts["disk"]["capacity"]
        assert now["disk"]["blocks"] == counts["disk"]["blocks"]
        assert not [name for name in (folder / "cold").rglob("*") if name.suffix == ".lock"]

    return check


BAD = {
    "a wrong value": ("when: commit", "when: comit", "tiers[1].when"),
    "a restart": ("size: 1 MiB}", "size: 2 MiB}", "arena.size: 1 MiB -> 2 MiB: the engine's"),
    "no YAML": ("tiers:", "tiers: [", "stack.yaml, line"),
    "no batch": ("capacity: 1 MiB", "capacity: 64 KiB", "64 KiB holds 8 blocks, less than one"),
}


def test_a_level_that_a_token_holder_attaches_is_logged_and_then_gets_blocks(
    cache: CacheManager, file: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(cache, *range(8))
    told = ask(folder / "kv.sock", {"command": "status"})["listens"]
    port = next(int(one.rstrip("/").rpartition(":")[2]) for one in told if "://" in one)
    theirs = COLD.format(folder).replace("name: cold", "name: theirs, when: commit")
    body = json.dumps({"stack": file.read_text() + theirs})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    with (
        caplog.at_level("WARNING", "kvladder"),
        closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as client,
    ):
        client.request("POST", "/change", body, headers)
        assert client.getresponse().status == 200
        until(lambda: len(caplog.records) == 2)
    attached, changed = (record.getMessage() for record in caplog.records)
    what = "levels were attached while serving, and may get all blocks: theirs (files)"
    assert (attached, changed.partition(": ")[0]) == (what, "the stack changed while serving")
    notices = ask(folder / "kv.sock", {"command": "status"})["notices"]
    assert {"attached", "changed"} <= {notice["kind"] for notice in notices}
    save(cache, *range(8, 16))
    assert cache.stats()["theirs"]["blocks"] >= 8
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("which", BAD)
def test_a_wrong_stack_is_refused_as_at_a_start_and_changes_nothing(
    which: str, cache: CacheManager, file: Path, folder: Path
) -> None:
    save(cache, 1, 2)
    check = unchanged(cache, file, folder)
    old, new, says = BAD[which]
    bad = file.read_text(encoding="utf-8").replace(old, new, 1)
    with pytest.raises(ConfigError) as refused:
        change(folder, stack=bad + COLD.format(folder), save=True)
    assert says in str(refused.value)
    check()


def test_a_level_that_does_not_open_undoes_all_that_was_done_before(
    cache: CacheManager, file: Path, folder: Path
) -> None:
    save(cache, *range(20))
    check = unchanged(cache, file, folder)
    text = file.read_text(encoding="utf-8").replace("capacity: 1 MiB", "capacity: 2 MiB")
    text += COLD.format(folder) + COLD.format(folder / "absent").replace("name: cold", "name: bad")
    with pytest.raises(ConfigError) as refused:
        change(folder, stack=text, save=True)
    assert "tiers[3].path" in str(refused.value)
    assert "leave out required" not in str(refused.value)
    check()
    cache._stack.host.forget(keys(3), "evicted")
    assert served(cache, 3) == ["disk"]
    done = change(folder, stack=text[: text.rindex("  - {name: bad")])
    assert len(done["changed"]) == 2, "what was undone can be done"


def test_a_file_that_cannot_be_written_undoes_the_change(
    cache: CacheManager, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(cache, 1, 2)
    check = unchanged(cache, file, folder)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvladder.changing.text.os.fsync", fails)
        with pytest.raises(ConfigError, match="No space left on device"):
            change(folder, stack=file.read_text(encoding="utf-8") + COLD.format(folder), save=True)
    check()


def test_slots_and_room_of_a_change_that_failed_are_given_back(
    cache: CacheManager, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(cache, 1, 2)
    check, free = unchanged(cache, file, folder), cache.arena.free
    (meta,) = (folder / "disk").glob("*/META")
    before = meta.read_bytes()
    prepared: list[bool] = []

    def fails(*_: object) -> None:
        prepared.append(cache.arena.free < free and meta.read_bytes() != before)
        raise ConfigError("no space left on the device")

    coded = COLD.format(folder).replace("segment", "codecs: [zstd, checksum], segment")
    text = file.read_text(encoding="utf-8").replace("capacity: 1 MiB", "capacity: 2 MiB")
    with monkeypatch.context() as patch:
        patch.setattr("kvladder.changing.changer.replace_text", fails)
        with pytest.raises(ConfigError, match="no space left"):
            change(folder, stack=text + coded, save=True)
    assert prepared == [True], "it was larger, and the codecs had slots"
    check()
    assert (meta.read_bytes(), cache.arena.free) == (before, free)


def test_single_settings_are_changed_by_command_and_comments_stay(
    cache: CacheManager, file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = "tiers.disk.min_priority=50; fetch.deadline=3s"
    code, said = run(capsys, "change", file, "--set", setting, "--dry-run")
    assert (code, said.splitlines()) == (
        0,
        [
            "kv.sock: would change fetch.deadline: 2 s -> 3 s",
            "kv.sock: would change tiers.disk.min_priority: 35 -> 50",
        ],
    )
    assert cache.fetch_deadline_s == 2.0
    assert run(capsys, "change", file, "--set", setting, "--save")[0] == 0
    assert cache.fetch_deadline_s == 3.0
    text = file.read_text(encoding="utf-8")
    assert "# the cache of these tests" in text
    assert "name: disk   # the fast one" in text
    assert "min_priority: 50" in text
    assert run(capsys, "change", file) == (0, "kv.sock: nothing differs\n")
    file.write_text(text.replace("commit", "evict"), encoding="utf-8")
    code, said = run(capsys, "change", file, "--set", "fetch.deadline=4s")
    assert code == 0, "an earlier change is the base, not the file"
    assert run(capsys, "change", file, "--dry-run")[1].splitlines() == [
        "kv.sock: would change fetch.deadline: 4 s -> 3 s",
        "kv.sock: would change tiers.disk.when: commit -> evict",
    ]
    code, said = run(capsys, "change", file, "--set", "tiers.disc.when=evict")
    assert code == 2
    assert "no tier is named 'disc' (expected one of host, disk)" in said


def test_settings_need_a_file_that_is_the_stack_that_runs(
    cache: CacheManager, file: Path, folder: Path
) -> None:
    del cache
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("commit", "evict"), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        change(folder, set={"fetch.deadline": "3s"})
    assert "it is not the stack that runs: tiers.disk.when: commit -> evict" in str(refused.value)


def test_a_cache_without_a_file_changes_but_cannot_save(folder: Path) -> None:
    tiers = [{"type": "host"}, {"type": "memory", "capacity": "1 MiB"}]
    stack = {"arena": {"size": "1 MiB"}, "control": str(folder / "kv.sock"), "tiers": tiers}
    with open_cache(stack, layout=LAYOUT) as cache:
        done = change(folder, set={"tiers.memory.capacity": "2 MiB"})
        assert done["changed"] == ["tiers.memory.capacity: 1 MiB -> 2 MiB"]
        assert cache.stats()["memory"]["capacity"] == 512
        with pytest.raises(ConfigError, match="there is no file to save to"):
            change(folder, set={"tiers.memory.capacity": "3 MiB"}, save=True)


def test_the_port_changes_nothing_without_the_token(
    cache: CacheManager, file: Path, folder: Path
) -> None:
    told = ask(folder / "kv.sock", {"command": "status"})["listens"]
    port = next(int(one.rstrip("/").rpartition(":")[2]) for one in told if "://" in one)
    check = unchanged(cache, file, folder)

    def post(path: str, body: dict[str, Any], token: str) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as client:
            client.request("POST", path, json.dumps(body), headers)
            answer = client.getresponse()
            return answer.status, json.loads(answer.read())

    for path in ("/change", "/drain", "/warm", "/hottest"):
        assert post(path, {}, "wrong")[0] == 401
    check()
    body = {"set": {"tiers.disk.timeout": "9s"}}
    assert post("/change", body, TOKEN)[1]["changed"] == ["tiers.disk.timeout: 5 s -> 9 s"]
    for path, wrong in (
        ("/change", {"stak": "x"}),
        ("/drain", {"wait_s": -1}),
        ("/warm", {"blocks": ["00"]}),
        ("/hottest", {"count": 0}),
        ("/drain", {"to": "nowhere"}),
    ):
        status, said = post(path, wrong, TOKEN)
        assert status == 400, said


def test_two_changes_at_once_and_an_end_in_the_middle(
    cache: CacheManager, folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = Event(), Event()

    def slow(*_: object) -> None:
        begun.set()
        goes_on.wait(PATIENCE_S)
        raise ConfigError("in vain")

    monkeypatch.setattr("kvladder.changing.changer.replace_text", slow)
    text = file.read_text(encoding="utf-8") + COLD.format(folder)

    def changing() -> None:
        with pytest.raises(ConfigError):
            change(folder, stack=text, save=True)

    thread = Thread(target=changing)
    thread.start()
    assert begun.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match="another change is in progress"):
        change(folder, set={"fetch.deadline": "3s"})
    closing_thread = Thread(target=cache.close)
    closing_thread.start()
    goes_on.set()
    thread.join(PATIENCE_S)
    closing_thread.join(PATIENCE_S)
    assert not closing_thread.is_alive()
    with open_cache(file, layout=LAYOUT) as again:
        assert "cold" not in again.stats()


def test_a_change_that_was_checked_for_another_stack_is_refused(
    cache: CacheManager, folder: Path
) -> None:
    (changes,) = [one for one in cache.guests._all if isinstance(one, ChangeAnswers)]
    changer = changes._changer
    plan = changer.plan(settings={"fetch.deadline": "3s"}, save=False)
    change(folder, set={"tiers.disk.timeout": "9s"})
    with pytest.raises(ConfigError, match="the stack has changed since"):
        changer._runtime.call(changer.carry_out(plan))
    assert cache.fetch_deadline_s == 2.0


# ---- drain and warm


def test_a_drain_writes_what_only_this_engine_has_and_takes_no_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "stack.yaml"
    text = STACK.format(folder, TOKEN).replace("    when: commit\n", "    min_priority: 40\n")
    file.write_text(text, encoding="utf-8")
    with open_cache(file, layout=LAYOUT) as cache:
        save(cache, *range(20), priorities=[50])
        save(cache, 90, 91, priorities=[36])
        assert cache.stats()["disk"]["blocks"] == 0
        code, said = run(capsys, "drain", file)
        assert code == 0
        assert said.splitlines() == [
            "kv.sock: done; 22 blocks to write",
            "kv.sock: left: 2 because the level's rules exclude them",
        ]
        assert cache.stats()["disk"]["blocks"] == 20
        assert cache.save(keys(200)).slots == []
        assert served(cache, 5) == ["host"]
        assert "takes blocks again" in run(capsys, "drain", file, "--stop")[1]
        save(cache, 200)
        assert served(cache, 200) == ["host"]


def test_a_drain_brings_private_levels_to_a_named_one(folder: Path) -> None:
    file = folder / "stack.yaml"
    text = STACK.format(folder, TOKEN) + COLD.format(folder)
    file.write_text(text, encoding="utf-8")
    with open_cache(file, layout=LAYOUT) as cache:
        save(cache, *range(20))
        cache._stack.host.forget(keys(*range(10)), "evicted")
        done = ask(folder / "kv.sock", {"command": "drain", "to": "cold", "wait_s": PATIENCE_S})
        assert done == {
            "state": "done",
            "to": "cold",
            "blocks": 20,
            "looked_at": 0,
            "left": {},
            "lost": 0,
        }
        assert cache.stats()["cold"]["blocks"] == 20
        with pytest.raises(ConfigError, match=r"'host' is no level to drain to"):
            ask(folder / "kv.sock", {"command": "drain", "to": "host"})


@pytest.mark.slow
def test_another_engine_has_what_was_drained_to_a_server_that_came_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    with Server(folder / "server", block="8 KiB") as server:
        stack = yaml.safe_load(STACK.format(folder, TOKEN))
        stack["tiers"].append(far := server.level(when="evict"))
        file, other = folder / "stack.yaml", folder / "other.yaml"
        file.write_text(yaml.safe_dump(stack))
        with open_cache(file, layout=LAYOUT) as cache:
            save(cache, *range(20))
            cache._stack.host.forget(keys(*range(10)), "evicted")
            server.kill()
            code, said = run(capsys, "drain", file, "--to", "far")
            assert (code, cache.stats()["far"]["blocks"]) == (3, 0)
            assert "kv.sock: left: 20 because " in said
            assert "20 blocks could not be written: drain again before the engine ends" in said
            server.again()
            until(lambda: run(capsys, "drain", file, "--to", "far")[0] == 0)
        other.write_text(
            yaml.safe_dump({"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, far]})
        )
        with open_cache(other, layout=LAYOUT) as cache:
            assert served(cache, *range(20)) == ["far"] * 20


def test_a_warm_start_brings_a_peers_hottest_blocks(
    cache: CacheManager, file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(cache, *range(30), salt="me")
    told = ask(folder / "kv.sock", {"command": "hottest", "count": 10})
    salt = cache._digest("me").hex()
    assert told["blocks"] == [f"{keys(n)[0].hex()}:{salt}" for n in range(29, 19, -1)]
    cache._stack.host.forget(keys(*range(30)), "evicted")
    names = folder / "names.txt"
    names.write_text("\n".join([*told["blocks"], keys(777)[0].hex()]), encoding="utf-8")
    code, said = run(capsys, "warm", file, "--blocks", names)
    assert code == 0, said
    assert said == "kv.sock: 10 blocks brought up, 0 there before, 1 missing, 0 without room\n"
    assert served(cache, 20, 5) == ["host", "disk"]
    line = {"timestamp": 0, "input_length": 1, "hash_ids": [keys(3)[0].hex()]}
    trace = folder / "trace.jsonl"
    trace.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert "1 block brought up" in run(capsys, "warm", file, "--trace", trace)[1]
    trace.write_text(json.dumps({**line, "hash_ids": [3]}) + "\n", encoding="utf-8")
    code, said = run(capsys, "warm", file, "--trace", trace)
    assert code == 2
    assert "ids of a recording say nothing about blocks" in said
    listens = ask(folder / "kv.sock", {"command": "status"})["listens"]
    peer = next(one for one in listens if "://" in one)
    token = folder / "token"
    token.write_text(TOKEN, encoding="utf-8")
    code, said = run(capsys, "warm", file, "--peer", peer, "--token-file", token)
    assert code == 0, said
    assert "there before" in said
    assert run(capsys, "warm", file, "--peer", peer)[0] == 2


def test_a_warm_start_leaves_what_requests_brought(cache: CacheManager, folder: Path) -> None:
    change(folder, set={"tiers.disk.capacity": "4 MiB"})
    save(cache, *range(100))
    cache._stack.host.forget(keys(*range(100)), "evicted")
    save(cache, *range(1000, 1200))
    free = cache.arena.free
    names = [key.hex() for key in keys(*range(100))]
    done = ask(
        folder / "kv.sock", {"command": "warm", "blocks": names, "wait_s": PATIENCE_S},
        timeout_s=PATIENCE_S,
    )  # fmt: skip
    assert done["state"] == "done", done
    assert 0 < done["brought"] <= free
    assert done["no_room"] == 100 - done["brought"]
    assert cache.stats()["host"]["evicted"] == 100, "only those that the test took out"


def test_what_was_removed_while_a_level_was_detached_is_gone_after_a_change_that_failed(
    cache: CacheManager, file: Path, folder: Path
) -> None:
    text = file.read_text(encoding="utf-8")
    both = text + COLD.format(folder)
    change(folder, stack=both)
    save(cache, 1, 2)
    ask(folder / "kv.sock", {"command": "drain", "to": "cold", "wait_s": PATIENCE_S})
    ask(folder / "kv.sock", {"command": "drain", "stop": True})
    assert cache.stats()["cold"]["blocks"] == 2
    change(folder, stack=text)
    cache.remove(keys(1))
    bad = both + COLD.format(folder / "absent").replace("name: cold", "name: bad")
    with pytest.raises(ConfigError):
        change(folder, stack=bad)
    change(folder, stack=both)
    cache._stack.host.forget(keys(2), "evicted")
    assert served(cache, 1, 2) == ["", "disk"]
    assert cache.stats()["cold"]["blocks"] == 1
