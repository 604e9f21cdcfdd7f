"""A real vLLM gets other weights while it runs, and sleeps: names follow the weights in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvladder.testing.redisserver import RedisServer
from tests.vllm.conftest import Start
from tests.vllm.harness import HITS, PROMPTS, stack

ONE = ["each", {"prompts": PROMPTS[:1]}]
COMPUTED = ["each", {"prompts": PROMPTS[:1], "recompute": True}]
RESET = ["reset"]
TOLD = ["reset", {"connector": True}]
Tokens = list[list[int]]


def test_other_weights_are_noticed_named_apart_and_old_names_return(
    start: Start, tmp_path: Path, models: list[Path], reference: Tokens
) -> None:
    """Files replaced under the model's path after vLLM has read it do not name its blocks."""
    extra = stack(tmp_path / "kv", on_reset="keep")
    link = tmp_path / "model"
    link.symlink_to(models[0])
    replaced, restored = (["point", {"link": str(link), "target": str(m)}] for m in models[::-1])
    old, new = (["reload", {"weights": str(one)}] for one in models)
    first = [replaced, ONE, new, RESET, ONE, RESET, ONE, RESET, ONE, TOLD, ONE, COMPUTED]
    back = [old, TOLD, ONE, new, TOLD, ONE, ["stats"], restored, ["shutdown"]]
    found = start(extra, *first, *back, model=str(link)).finish()
    _, cold, _, _, unseen, _, saved, _, warm, _, kept, computed, *rest = found
    _, _, again, _, _, other, stats, *_ = rest
    assert cold["tokens"] == again["tokens"] == reference[:1] != computed["tokens"]
    assert computed["tokens"] == unseen["tokens"] == saved["tokens"] == warm["tokens"]
    assert computed["tokens"] == kept["tokens"] == other["tokens"]
    assert (cold["external"], saved["external"]) == (0, 0)
    assert [one["external"] for one in (warm, kept, again, other)] == [HITS] * 4
    assert stats["files"]["corrupt"] == 0
    later = start(extra, ONE, ["shutdown"], model=str(link)).finish()[0]
    assert later["tokens"] == reference[:1], "a process with the weights before"
    assert later["external"] == HITS


def test_two_ranks_agree_on_the_loaded_weights(
    start: Start, tmp_path: Path, models: list[Path]
) -> None:
    run = start(
        stack(tmp_path / "kv", on_reset="keep"),
        *[ONE, RESET, ONE, ["reload", {"weights": str(models[1])}], TOLD, ONE, RESET, ONE],
        *[COMPUTED, ["reload", {"weights": str(models[0])}], TOLD, ONE, ["shutdown"]],
        engine={"tensor_parallel_size": 2},
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    cold, _, warm, _, _, new, _, again, computed, _, _, old, _ = run.finish()
    assert cold["tokens"] == warm["tokens"] == old["tokens"] != computed["tokens"]
    assert new["tokens"] == again["tokens"] == computed["tokens"]
    found = [one["external"] for one in (cold, warm, new, again, old)]
    assert found == [0, HITS, 0, HITS, HITS]


def test_a_sleeping_engine_removes_no_blocks_of_others(
    start: Start, tmp_path: Path, reference: Tokens
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        shared = {"type": "redis", "url": server.url, "capacity": "64 MiB", "when": "commit"}
        tiers = [{"type": "host"}, shared]
        extra: dict[str, Any] = {"arena": {"size": "64 MiB"}, "tiers": tiers}
        extra["fetch"] = {"deadline": "1 m"}
        each = ["each", {"prompts": PROMPTS}]
        run = start(extra, each, ["stats"], ["nap"], ["stats"], each, ["shutdown"])
        cold, before, _, after, warm, _ = run.finish()
        client = server.client()
        keys = len(client.keys("kvladder:*"))
        client.close()
        other = start(extra, each, ["nap"], each, ["shutdown"]).finish()
    assert [one["tokens"] for one in (cold, warm, other[0], other[2])] == [reference] * 4
    assert cold["external"] == 0
    everything = len(PROMPTS) * HITS
    assert [one["external"] for one in (warm, other[0], other[2])] == [everything] * 3
    assert (before["host"]["blocks"] > 0, after["host"]["blocks"]) == (True, 0)
    assert keys >= before["redis"]["stored"] > 0
