"""A recorded run of a real vLLM on CPU, beside its replay; and a plan's promise beside a run.

A small model serves conversations that grow by answers and questions, over one system prompt. The
stack has host memory and files, both too small for all blocks, and so has vLLM's own KV cache. The
first rows have what the run counted (peer) and what ``kvladder replay`` counts over the recording,
with the same stack (ours). Then vLLM serves the same conversations with memory and a disk of sizes
that ``kvladder plan`` gives: its promise is the peer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bench_vllm_engine import Engine, Prompts, kvladder_with, make_model
from benchmarks.row import Row
from kvladder.cli.plan import plan
from kvladder.config.stack import load_config
from kvladder.replay.engine import ReplaySettings, replay
from kvladder.traces.reader import read_trace

BLOCK_BYTES = 128 << 10
"""Bytes of a block of the model."""
HOST, FILES, OWN = 24 << 20, 80 << 20, 16 << 20
"""Bytes of host memory, of files, and of vLLM's own KV cache."""
REQUESTS = 120
TALKS = 24
"""Conversations that are open at a time."""
PROMPT_MAX = 1500
ANSWER = 48
CLOSE = "ratio 0.98 to 1.02"


def rows() -> Iterator[Row]:
    """Record and replay with one request at a time, then with four; then plan and run."""
    with tempfile.TemporaryDirectory(prefix="kvladder-bench-") as name:
        folder = Path(name)
        model = make_model(folder / "tiny")
        for at_once in (1, 4):
            trace = folder / f"trace-{at_once}.jsonl"
            stack = stack_of(folder / f"kv-{at_once}", HOST, FILES) | {"record": str(trace)}
            stats = served(model, stack, at_once)
            yield from compared(stats, stack, trace, f"{at_once} at once")
        yield from promised(model, folder, folder / "trace-1.jsonl")


def stack_of(folder: Path, host: int, files: int) -> dict[str, Any]:
    """Return a stack of memory, and of a disk unless ``files`` is 0; sizes are in bytes."""
    tiers: list[dict[str, Any]] = [{"type": "host"}]
    if files:
        disk = {"type": "files", "path": str(folder), "capacity": files}
        tiers.append({**disk, "when": "commit", "segment": "8 MiB"})
    fetch = {"when": "always", "deadline": "1 m"}
    return {"arena": {"size": host}, "fetch": fetch, "tiers": tiers}


def served(model: Path, stack: dict[str, Any], at_once: int) -> dict[str, Any]:
    """Serve the conversations with a new engine; return what its cache counted."""
    log = model.with_name("engine.log")
    limits = {"kv_cache_memory_bytes": OWN, "max_model_len": 2048}
    engine = Engine(model, kvladder_with(stack), log, engine=limits)
    assert engine.answer() == "ready"
    draw = Random(at_once)
    system = draw.choices(range(3, 1000), k=200)
    talks: Prompts = []
    for _ in range(REQUESTS // at_once):
        chosen: Prompts = []
        for _ in range(at_once):
            old = draw.randrange(TALKS) < len(talks)
            talk = talks.pop(draw.randrange(len(talks))) if old else [*system]
            chosen.append([*talk, *draw.choices(range(3, 1000), k=draw.randint(40, 200))])
        answers = engine.run(chosen, ANSWER)["tokens"]
        whole = [[*one, *answer] for one, answer in zip(chosen, answers, strict=True)]
        talks += [one for one in whole if len(one) < PROMPT_MAX]
    stats: dict[str, Any] = engine.tell("stats")
    engine.end()
    return stats


def missed_of(counts: dict[str, dict[str, int]]) -> int:
    """Return the blocks that were asked for and not found, of all levels and reasons."""
    return sum(sum(each.values()) for each in counts.values())


def compared(stats: dict[str, Any], stack: dict[str, Any], path: Path, how: str) -> Iterator[Row]:
    """Replay a recording; yield what the run and the replay counted."""
    trace = read_trace(path)
    result = replay(trace, load_config(stack, env={}), ReplaySettings(BLOCK_BYTES))
    pairs: dict[str, tuple[int, int]] = {}
    for level in result.hits:
        # blocks on their way to host for another request are host's
        counted = stats[level]["hits"] + stats[level]["joined"]
        pairs[f"hits of {level}"] = counted, result.hits[level]
        pairs[f"writes to {level}"] = stats[level]["stored"], result.written[level]
        pairs[f"evictions of {level}"] = stats[level]["evicted"], result.evicted[level]
    pairs["misses"] = missed_of(stats["misses"]["blocks"]), missed_of(result.missed)
    again = stats["host"]["queries"] - result.asked  # by requests that were searched for again
    note = (
        f"{result.requests} requests, {trace.own} blocks in vLLM itself, {result.asked} asked for"
    )
    note += f", {again} asked for again"
    for what, (counted, replayed) in pairs.items():
        yield Row(
            name=f"replay, {how}, {what}",
            unit="blocks",
            peer=counted,
            ours=replayed,
            goal=CLOSE,
            note=note,
        )


def promised(model: Path, folder: Path, path: Path) -> Iterator[Row]:
    """Run vLLM with sizes of a plan; yield the hits that the plan promises and those of the run."""
    found: Any = plan(path, block_bytes=str(BLOCK_BYTES)).data
    for medium in ("memory", "disk"):
        point = found[f"{medium}_knee"]
        host, files = point["memory_bytes"], point["disk_bytes"]
        stats = served(model, stack_of(folder / f"planned-{medium}", host, files), 1)
        levels = [stats[name] for name in ("host", "files") if name in stats]
        hits = sum(counts["hits"] + counts["joined"] for counts in levels)
        yield Row(
            name=f"plan, the knee of {medium}",
            unit="hits by blocks asked for",
            peer=point["ratio"],
            ours=hits / (hits + missed_of(stats["misses"]["blocks"])),
            goal=CLOSE,
            note=f"memory {host >> 20} MiB, disk {files >> 20} MiB; peer: promised, ours: run",
        )
