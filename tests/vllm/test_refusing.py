"""Blocks that must not be served: other salts and weights, damage, dead tiers, wrong settings."""

from __future__ import annotations

from pathlib import Path

from tests.patience import RUN_S
from tests.vllm.conftest import Start
from tests.vllm.harness import HITS, PROMPTS, flip, stack, stored_payloads

ALL = len(PROMPTS) * HITS
Tokens = list[list[int]]


def test_another_salt_finds_nothing(start: Start, files: Path, reference: Tokens) -> None:
    run = start(
        stack(files, block={"salt": "another deployment"}),
        ["each", {"prompts": PROMPTS}],
        ["each", {"prompts": PROMPTS, "salt": "a tenant"}],
        ["reset"],
        ["each", {"prompts": PROMPTS, "salt": "a tenant"}],
        ["each", {"prompts": PROMPTS, "salt": "another tenant"}],
    )
    deployment, tenant, _, same_tenant, other_tenant = run.finish()
    found = [deployment, tenant, same_tenant, other_tenant]
    assert [one["external"] for one in found] == [0, 0, ALL, 0]
    assert [one["tokens"] for one in found] == [reference] * 4


def test_other_weights_under_the_same_path_find_nothing(
    start: Start, files: Path, model: Path, models: list[Path], reference: Tokens
) -> None:
    model.unlink()
    model.symlink_to(models[1])
    try:
        run = start(
            stack(files),
            ["each", {"prompts": PROMPTS}],
            ["each", {"prompts": PROMPTS, "recompute": True}],
        )
        cold, computed = run.finish()
    finally:
        model.unlink()
        model.symlink_to(models[0])
    assert cold["external"] == 0
    assert cold["tokens"] == computed["tokens"] != reference


def test_one_flipped_byte_is_found_and_computed_again(
    start: Start, files: Path, reference: Tokens
) -> None:
    path, offset = stored_payloads(files)[5]
    flip(path, offset + 70_000)
    run = start(stack(files), ["each", {"prompts": PROMPTS}], ["stats"])
    warm, stats = run.finish()
    assert warm["tokens"] == reference
    assert stats["files"]["corrupt"] == 1
    assert 0 < warm["external"] < ALL


def test_without_checks_damage_is_served_and_changes_the_answer(
    start: Start, tmp_path: Path, reference: Tokens
) -> None:
    """The negative control: the engine computes with the loaded bytes."""
    extra = {
        "arena": {"size": "64 MiB"},
        "tiers": [
            {"type": "host"},
            {
                "type": "files",
                "path": str(tmp_path / "kv"),
                "capacity": "64 MiB",
                "when": "commit",
                "codecs": [],
            },
        ],
    }
    steps = [["each", {"prompts": PROMPTS}], ["shutdown"]]
    start(extra, *steps).finish()
    for path, offset in stored_payloads(tmp_path / "kv"):
        flip(path, offset + 3, count=(128 << 10) // 4, step=4)
    warm, _ = start(extra, *steps).finish()
    assert warm["external"] == ALL
    assert all(one != true for one, true in zip(warm["tokens"], reference, strict=True))


def test_a_truncated_file_is_a_miss(start: Start, files: Path, reference: Tokens) -> None:
    path, offset = stored_payloads(files)[40]
    with path.open("r+b") as stream:
        stream.truncate(offset + 1000)
    run = start(
        stack(files),
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["each", {"prompts": PROMPTS}],
        ["stats"],
    )
    torn, _, healed, stats = run.finish()
    assert [torn["tokens"], healed["tokens"]] == [reference] * 2
    assert 0 < torn["external"] < ALL
    assert healed["external"] == ALL
    assert stats["host"]["errors"] == 0


def test_tiers_that_hang_for_ever_fail_no_request(start: Start, reference: Tokens) -> None:
    small = 40 * (128 << 10)  # one prompt and a bit
    extra = {
        "arena": {"size": f"{small} B"},
        "fetch": {"deadline": "300 ms"},
        "tiers": [
            {"type": "host"},
            {"type": "hanging-get", "capacity": "64 MiB", "timeout": "2 s"},
            {"type": "hanging-put", "capacity": "64 MiB", "timeout": "2 s", "when": "commit"},
        ],
    }
    run = start(
        extra,
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["generate", {"prompts": PROMPTS}],
        ["stats", {"wait_s": 10}],
        ["shutdown"],
    )
    cold, _, warm, _, together, stats, _ = run.finish()
    assert [one["tokens"] for one in (cold, warm, together)] == [reference] * 3
    assert stats["hanging-get"]["stored"] > 0
    assert stats["hanging-get"]["loaded"] == 0
    assert stats["hanging-put"]["timeouts"] > 0


def test_wrong_settings_are_refused_at_start(start: Start) -> None:
    run = start({"host": "64 MiB", "lod": "sync"}, ["each", {"prompts": PROMPTS}])
    assert run.process.wait(RUN_S) != 0
    text = "ConfigError: kv_connector_extra_config.lod: unknown key (did you mean 'load'?)"
    assert text in run.log.read_text()
    assert run.so_far() == []
