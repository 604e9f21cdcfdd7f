"""The control socket of a real engine: one of two tenants is purged while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS

ALL = len(PROMPTS) * HITS
BLOCKS = ALL // BLOCK
CALL = "tests.vllm.operate:"
TOKEN = "0123456789abcdef0123"  # of this test alone


def each(salt: str, **more: Any) -> list[Any]:
    return ["each", {"prompts": PROMPTS, "salt": salt, **more}]


def write_other(folder: Path, files: Path, socket: Path) -> Path:
    """Write the stack that the engine gets while it serves: a new level, and a larger one."""
    tiers = [
        {"type": "host"},
        {"name": "middle", "type": "memory", "capacity": "64 MiB", "when": "commit"},
        {"type": "files", "path": str(files), "capacity": "192 MiB", "when": "commit"},
    ]
    path = folder / "other.yaml"
    whole = {"arena": {"size": "64 MiB"}, "tiers": tiers, "control": str(socket)}
    whole |= {"forget": {"path": str(folder / "purges"), "key": TOKEN}}
    whole |= {"http": {"listen": "127.0.0.1:0", "token": TOKEN}}
    path.write_text(yaml.safe_dump(whole))
    return path


def check_changed(answers: list[Any], blue: Any, before: Any) -> None:
    """Check that requests before and after the change are served from the new stack."""
    change, _, after, green, _, green_again, now = answers
    assert change["out"].splitlines() == [
        "kv.sock: tiers.files.capacity: 128 MiB -> 192 MiB",
        "kv.sock: tiers.middle: memory, attached below host",
    ]
    assert (after["external"], after["tokens"]) == (ALL, blue["tokens"])
    assert (green_again["external"], green_again["tokens"]) == (ALL, green["tokens"])
    assert now["middle"]["stored"] >= BLOCKS
    assert now["files"]["capacity"] > before["files"]["capacity"]


def telling(*arguments: str) -> list[Any]:
    return ["call", {"function": f"{CALL}told", "arguments": arguments}]


def forgetting(config: Path, socket: Path, receipt: Path) -> list[list[Any]]:
    """Return steps that purge over HTTP, then all by age, and check the receipt.

    They purge what descends from a prefix of the first prompt, by its tokens, and then a session.
    """
    over_http = {"control": str(socket), "token": TOKEN, "scope": {"session": "agent"}}
    prefix = {"tokens": PROMPTS[0][: 5 * BLOCK + 3], "salt": "indigo"}
    return [
        each("indigo"),
        ["reset"],
        ["call", {"function": f"{CALL}forgotten", **over_http, "scope": prefix}],
        each("indigo"),
        ["reset"],
        each("violet", session="agent"),
        ["reset"],
        ["call", {"function": f"{CALL}forgotten", **over_http}],
        each("violet", tokens=1),
        ["reset"],
        each("blue"),
        telling("purge", str(config), "--older-than", "1 ms", "--receipt", str(receipt)),
        ["reset"],
        each("blue", tokens=1),
        telling("purge", str(config), "--verify", str(receipt)),
    ]


def require_forgotten(results: list[Any], blue: dict[str, Any]) -> None:
    indigo, _, forgotten, without, _, *results = results
    done = forgotten["receipt"]
    assert (done["complete"], done["scope"]["kind"], done["unknown"]) == (True, "prefix", 0)
    assert done["scope"]["tokens"] == 5 * BLOCK + 3
    assert done["keys"] == HITS // BLOCK, "its five blocks, and all that descend from the last one"
    assert {level["blocks"] for level in done["levels"]} == {HITS // BLOCK}
    assert (indigo["external"], without["external"]) == (0, ALL - HITS), "other prompts stay"
    assert without["tokens"] == indigo["tokens"]
    violet, _, forgotten, gone, _, still, by_age, _, none, verified = results
    assert violet["external"] == 0
    done = forgotten["receipt"]
    assert (done["complete"], done["scope"]) == (True, {"kind": "session", "session": "agent"})
    assert done["keys"] >= BLOCKS
    removed = {level["name"]: level["blocks"] for level in done["levels"]}
    assert removed.keys() == {"host", "middle", "files"}
    assert min(removed.values()) >= BLOCKS
    assert gone["external"] == 0, "nothing of the session is found"
    assert (still["external"], still["tokens"]) == (ALL, blue["tokens"])
    assert (by_age["code"], none["external"]) == (0, 0), by_age
    assert (verified["code"], verified["err"]) == (0, "")
    assert "files: clean" in verified["out"]


def test_one_tenant_is_purged_while_the_engine_serves_another(start: Start, tmp_path: Path) -> None:
    config, files = tmp_path / "stack.yaml", tmp_path / "kv"
    socket = tmp_path / "kv.sock"
    stack: dict[str, Any] = {
        "host": "64 MiB",
        "files": str(files),
        "capacity": "128 MiB",
        "control": str(socket),
    }
    stack |= {"forget": {"path": str(tmp_path / "purges"), "key": TOKEN}}
    stack |= {"http": {"listen": "127.0.0.1:0", "token": TOKEN}}
    config.write_text(yaml.safe_dump(stack))
    other = write_other(tmp_path, files, socket)
    both = {"config": str(config), "salt": "red", "files": str(files)}
    run = start(
        {"config": str(config)},
        each("red"),
        each("blue"),
        ["reset"],
        each("red"),
        ["reset"],
        ["stats"],
        [
            "call",
            {"function": f"{CALL}purged", **both, "serves": {"prompts": PROMPTS, "salt": "blue"}},
        ],
        ["reset"],
        each("red", tokens=1),
        ["reset"],
        each("blue"),
        ["reset"],
        each("red"),
        telling("stats", str(config), "--json"),
        telling("describe", str(socket)),
        ["stats"],
        ["call", {"function": f"{CALL}told", "arguments": ["change", str(other)]}],
        ["reset"],
        each("blue"),
        each("green"),
        ["reset"],
        each("green"),
        ["stats"],
        *forgetting(config, socket, tmp_path / "receipt.json"),
        ["shutdown"],
    )
    red, blue, _, warm, _, _, purge, _, cold, _, kept, _, again, told, described, stats, *more = (
        run.finish()
    )
    assert (red["external"], blue["external"], warm["external"]) == (0, 0, ALL)
    assert warm["tokens"] == red["tokens"]
    done = purge["purge"]
    assert (done["code"], done["err"]) == (0, "")
    for served in purge["served"]:
        assert (served["external"], served["tokens"]) == (ALL, blue["tokens"])
    assert f"kv.sock: files: {purge['before'] - purge['after']} blocks removed" in done["out"]
    assert purge["before"] - purge["after"] >= BLOCKS
    assert purge["after"] >= BLOCKS
    assert cold["external"] == 0, "nothing of the purged tenant is found"
    assert (kept["external"], kept["tokens"]) == (ALL, blue["tokens"])
    assert (again["external"], again["tokens"]) == (ALL, red["tokens"]), "saved again since"
    seen = json.loads(told["out"])[str(socket)]
    for level in ("host", "files"):
        for name in ("removed", "purged", "hits", "blocks"):
            assert seen[level][name] == stats[level][name], (level, name)
    assert "level 1: files (files)" in described["out"]
    changed, forgotten = more[:7], more[7:-1]
    check_changed(changed, blue, stats)
    assert not socket.exists(), "it is gone with the engine"
    require_forgotten(forgotten, blue)
