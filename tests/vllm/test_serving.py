"""A real vLLM loads its KV blocks, and gives the same answers as without: the supported modes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvladder.config.stack import load_config
from kvladder.replay.engine import ReplaySettings, replay
from kvladder.traces.reader import read_trace
from tests.patience import PATIENCE_S
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, LAYERS, PROMPT_TOKENS, PROMPTS, Run, stack, told

ALL = len(PROMPTS) * HITS
BLOCK_BYTES = 128 << 10
Tokens = list[list[int]]


def test_the_same_process_after_a_reset_is_served_from_host(
    filled: tuple[Path, list[Any]], reference: Tokens
) -> None:
    cold, reset, warm, own, stats, _ = filled[1]
    assert reset
    assert [one["tokens"] for one in (cold, warm, own)] == [reference] * 3
    assert [one["external"] for one in (cold, warm, own)] == [0, ALL, 0]
    assert warm["cached"] == own["cached"] == [HITS] * len(PROMPTS)
    assert stats["host"]["hits"] * BLOCK == ALL
    assert stats["copies"]["onboard_bytes"] == stats["host"]["hits"] * (128 << 10)
    trace = read_trace(filled[0].with_name("trace.jsonl"))
    assert (trace.block_tokens, trace.warnings) == (BLOCK, ())
    told = [(one.input_tokens, one.output_tokens, len(one.blocks)) for one in trace.requests]
    assert told == [(PROMPT_TOKENS, 16, HITS // BLOCK)] * 3 * len(PROMPTS)
    own_blocks = [one.asked for one in trace.requests].count((HITS // BLOCK, HITS // BLOCK))
    assert own_blocks == len(PROMPTS)  # vLLM had those of the last round itself
    again = replay(trace, load_config({"host": "64 MiB"}, env={}), ReplaySettings(BLOCK_BYTES))
    assert again.hits["host"] * BLOCK == warm["external"]


@pytest.mark.versions
def test_a_new_process_is_served_from_files(start: Start, files: Path, reference: Tokens) -> None:
    other = [PROMPTS[0][: 2 * BLOCK] + PROMPTS[1][: 2 * BLOCK + 1]]
    run = start(
        stack(files),
        ["each", {"prompts": PROMPTS, "report": True}],
        ["stats"],
        ["each", {"prompts": other, "report": True}],
        ["shutdown"],
    )
    warm, stats, cold, _ = run.finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    assert stats["files"]["hits"] * BLOCK == ALL
    assert stats["files"]["corrupt"] == 0
    assert stats["misses"]["blocks"] == {}
    served = {"asked_tokens": HITS, "engine_tokens": 0, "served_tokens": HITS, "missed": []}
    assert told_of(warm) == [served | {"served_from": {"files": HITS}}] * len(PROMPTS)
    told = {"asked_tokens": 4 * BLOCK, "engine_tokens": 2 * BLOCK, "served_tokens": 0}
    missed = [{"reason": "never_seen", "level": None, "tokens": 2 * BLOCK}]
    assert told_of(cold) == [told | {"served_from": {}, "missed": missed}]


def told_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the reports in answers, without the times that they name."""
    reports: list[dict[str, Any]] = [answer["kvladder"] for answer in result["reports"]]
    assert all(0 <= report.pop("waited_s") < PATIENCE_S for report in reports)
    return reports


def test_an_engine_of_several_processes_is_served_from_files_and_host(
    start: Start, files: Path, reference: Tokens
) -> None:
    socket = files.parent / "several.sock"
    run = start(
        stack(files, control=str(socket)),
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["generate", {"prompts": PROMPTS}],
        ["pids"],
        told(socket),
        ["shutdown"],
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    from_files, _, from_host, pids, counts, _ = run.finish()
    assert [from_files["tokens"], from_host["tokens"]] == [reference] * 2
    assert [from_files["external"], from_host["external"]] == [ALL, ALL]
    assert len(pids) > 2  # an engine core and a worker at least
    (stats,) = json.loads(counts["out"]).values()
    assert stats["files"]["hits"] * BLOCK == stats["host"]["hits"] * BLOCK == ALL


def talks() -> list[list[list[int]]]:
    """Return rounds of prompts, of which most continue earlier ones; no level has so much room."""
    random = Random(1)
    system = random.choices(range(3, 1000), k=3 * BLOCK + 5)
    open_: list[list[int]] = []
    rounds: list[list[list[int]]] = []
    for _ in range(12):
        chosen = [
            open_.pop(random.randrange(len(open_))) if len(open_) > 5 else [*system]
            for _ in range(2)
        ]
        rounds.append([[*one, *random.choices(range(3, 1000), k=200)] for one in chosen])
        open_ += rounds[-1]
    return rounds


def test_a_prompt_computed_in_parts_is_served_and_a_replay_counts_the_same(
    start: Start, tmp_path: Path, reference: Tokens
) -> None:
    trace_path = tmp_path / "trace.jsonl"
    files = {"type": "files", "path": str(tmp_path / "kv"), "capacity": "16 MiB", "when": "commit"}
    settings = {
        "arena": {"size": "12 MiB"},  # 96 blocks
        "fetch": {"deadline": "10 m"},
        "record": str(trace_path),
        "tiers": [{"type": "host"}, {**files, "segment": "4 MiB"}],
    }
    served: list[list[Any]] = []
    for prompts in talks():
        for prompt in prompts:  # "stats" waits until nothing is on its way down
            served += [["each", {"prompts": [prompt], "tokens": 40}], ["stats"]]
        served.append(["reset"])
    run = start(
        settings,
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["generate", {"prompts": PROMPTS}],
        ["stats"],
        ["generate", {"prompts": PROMPTS[:1], "tokens": 71}],
        ["stats"],
        *served,
        ["stats"],
        engine={"max_num_batched_tokens": 128, "max_num_seqs": 8, "enable_chunked_prefill": True},
    )
    cold, _, warm, stats, _, later, *_, last = run.finish()
    assert [cold["tokens"], warm["tokens"]] == [reference] * 2
    assert [cold["external"], warm["external"]] == [0, ALL]
    assert stats["host"]["stored"] * BLOCK == ALL
    generated = (PROMPT_TOKENS + 71 - 1) // BLOCK - HITS // BLOCK  # the last token has no KV yet
    assert later["host"]["stored"] - stats["host"]["stored"] == generated
    trace = read_trace(trace_path)
    again = replay(trace, load_config(settings, env={}), ReplaySettings(BLOCK_BYTES))
    for level in ("host", "files"):
        assert last[level]["evicted"] > 50
        assert again.hits[level] == pytest.approx(last[level]["hits"], rel=0.02)
        assert again.written[level] == pytest.approx(last[level]["stored"], rel=0.02)
        assert again.evicted[level] == pytest.approx(last[level]["evicted"], rel=0.02)
    both = again.missed, last["misses"]["blocks"]
    replayed, counted = (sum(sum(one.values()) for one in counts.values()) for counts in both)
    assert replayed == pytest.approx(counted, rel=0.02)
    assert trace.own > 0


def test_a_step_may_wait_for_its_loads(start: Start, files: Path, reference: Tokens) -> None:
    def load(way: str) -> list[Any]:
        return ["call", {"function": "tests.vllm.life:load", "way": way}]

    run = start(
        stack(files, load="layers"),
        load("layers"),
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        load("sync"),
        ["generate", {"prompts": PROMPTS}],
        load("layers"),
        ["reset"],
        ["generate", {"prompts": PROMPTS}],
        ["stats"],
    )
    _, from_files, _, waits, whole, none, _, from_host, stats = run.finish()
    assert [from_files["tokens"], whole["tokens"], from_host["tokens"]] == [reference] * 3
    assert [from_files["external"], whole["external"], from_host["external"]] == [ALL] * 3
    assert (waits, none) == (len(PROMPTS) * LAYERS, 0)
    assert stats["host"]["stored"] == 0


def test_a_reset_of_the_connector_forgets_everything(
    start: Start, files: Path, reference: Tokens
) -> None:
    run = start(
        stack(files),
        ["each", {"prompts": PROMPTS[:1]}],
        ["reset", {"connector": True}],
        ["stats"],
        ["each", {"prompts": PROMPTS}],
    )
    warm, reset, stats, cold = run.finish()
    assert reset
    assert (warm["external"], cold["external"]) == (HITS, 0)
    assert cold["tokens"] == reference
    assert (stats["host"]["blocks"], stats["files"]["blocks"]) == (0, 0)


def test_preempted_requests_give_the_same_answers(start: Start, files: Path) -> None:
    prompts = [prompt[: 300 + 40 * i] for i, prompt in enumerate(PROMPTS * 2)]
    run = start(
        stack(files),
        ["each", {"prompts": prompts, "tokens": 60, "recompute": True}],
        ["reset"],
        ["generate", {"prompts": prompts, "tokens": 60}],
        ["preemptions"],
        ["stats"],
        engine={
            "kv_cache_memory_bytes": 5 << 20,
            "max_num_batched_tokens": 256,
            "max_model_len": 1024,
        },
    )
    alone, _, crowded, preemptions, stats = run.finish()
    assert (alone["external"], preemptions > 0) == (0, True)
    assert crowded["tokens"] == alone["tokens"]
    assert crowded["external"] > 0
    assert stats["arena"]["free"] + stats["host"]["blocks"] == stats["arena"]["slots"]


def test_two_ranks_share_slots_and_nothing_with_one_rank(
    start: Start, files: Path, reference: Tokens
) -> None:
    run = start(
        stack(files),
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["generate", {"prompts": PROMPTS}],
        ["shutdown"],
        engine={"tensor_parallel_size": 2},
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    cold, _, warm, _ = run.finish()
    assert (cold["external"], warm["external"]) == (0, ALL)
    assert cold["tokens"] == warm["tokens"]
    assert [len(one) for one in cold["tokens"]] == [len(one) for one in reference]


def test_nothing_outlives_an_engine_that_is_killed_while_it_saves(
    start: Start, tmp_path: Path, reference: Tokens
) -> None:
    extra = stack(tmp_path / "kv")
    run = start(extra, ["each", {"prompts": PROMPTS}], *[["stats"]] * 3, ["generate", {
        "prompts": [[prompt[0], *prompt] for prompt in PROMPTS], "tokens": 2000}])  # fmt: skip
    committed = killed_while_saving(run)
    assert run.alive() == []  # the arena, which has no name, ends with its last process
    again = start(stack(tmp_path / "kv"), ["each", {"prompts": PROMPTS}], ["stats"])
    warm, stats = again.finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    assert stats["files"]["recovered"] >= committed >= ALL // BLOCK
    assert stats["files"]["corrupt"] == 0


def killed_while_saving(run: Run) -> int:
    """Kill -9 the engine in its last step; how many blocks were in files for certain."""
    import time

    end = time.monotonic() + PATIENCE_S
    while len(run.so_far()) < 4:
        assert run.process.poll() is None, run.log.read_text()[-4000:]
        assert time.monotonic() < end
        time.sleep(0.1)
    committed: int = run.so_far()[3]["files"]["stored"]
    time.sleep(0.5)  # it is in its last step, which takes much longer
    assert run.process.poll() is None
    run.kill()
    return committed
