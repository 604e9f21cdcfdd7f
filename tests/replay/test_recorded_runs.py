"""A replay counts what the recorded run counted, and a run hits what a plan promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvladder import Layout, open_cache
from kvladder.cli.plan import plan
from kvladder.config.stack import load_config
from kvladder.connectors.inline import InlineConnector
from kvladder.manager import CacheManager
from kvladder.replay.engine import ReplaySettings, replay
from kvladder.traces.reader import read_trace
from tests.patience import PATIENCE_S, until
from tests.replay.test_replay import chats

TOKENS = 16
BLOCKS = 16


def served(manager: CacheManager, connector: InlineConnector, tokens: list[int]) -> int:
    """Serve a prompt as an engine does; return how many of its blocks were found."""
    keys = connector.keys(tokens)
    match = connector.match(keys)
    assert match.wait(PATIENCE_S)
    found = match.blocks
    if found:
        connector.wait(connector.load(match, range(found)))
    else:
        match.release()
    connector.wait(connector.save(keys, range(len(keys))))
    manager.touch(keys)
    until(manager.idle)  # as with computing that takes longer than writing
    return found


Prompts = Sequence[Sequence[int]]
"""Numbers of the blocks of each prompt."""


def returning(seed: int) -> Prompts:
    """Return prompts of conversations of which some come again soon and others late."""
    random = Random(seed)
    chosen = [int(60 * random.random() ** 2) for _ in range(250)]
    turns = Counter[int]()
    prompts: list[list[int]] = []
    for talk in chosen:
        turns[talk] += 1
        prompts.append([100 * talk + n for n in range(min(12, 2 + 2 * turns[talk]))])
    return prompts


def run(manager: CacheManager, kv: torch.Tensor, prompts: Prompts) -> tuple[int, dict[str, Any]]:
    """Serve prompts, and close the cache; return the blocks that were found, and counters."""
    random, hits = Random(0), 0
    words: dict[int, list[int]] = {}
    with manager:
        connector = InlineConnector(manager, kv)
        for blocks in prompts:
            for block in blocks:
                words.setdefault(block, random.choices(range(50_000), k=TOKENS))
            hits += served(manager, connector, [t for b in blocks for t in words[b]])
        stats = manager.stats()
        connector.close()
    return hits, stats


def stack(folder: Path, memory: int, disk: int = 0) -> dict[str, Any]:
    """Return a stack with memory and, unless ``disk`` is 0, files of so many bytes."""
    tiers: list[dict[str, Any]] = [{"type": "host"}]
    if disk:
        files = {"type": "files", "path": str(folder / "kv"), "capacity": disk}
        tiers.append({**files, "when": "commit", "segment": "256 KiB"})
    return {"arena": {"size": memory}, "fetch": {"when": "always"}, "tiers": tiers}


@pytest.fixture
def kv() -> torch.Tensor:
    return torch.randn(BLOCKS, 2, TOKENS, 32)  # 4 KiB a block


@pytest.fixture
def layout(kv: torch.Tensor) -> Layout:
    return Layout(TOKENS, kv[0].nbytes, {"model": "recorded"})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_files", [False, True])
def test_a_replay_hits_what_the_run_counted(
    tmp_path: Path, kv: torch.Tensor, layout: Layout, has_files: bool, seed: int
) -> None:
    source = stack(tmp_path, 64 * 4096, (1 << 20) * has_files)
    source["record"] = {"path": str(tmp_path / "trace.jsonl"), "size": "1 MiB"}
    prompts = [one.blocks for one in chats(seed, 250).requests]
    hits, stats = run(open_cache(source, layout=layout), kv, prompts)
    trace = read_trace(tmp_path / "trace.jsonl")
    assert (len(trace.requests), trace.block_tokens, trace.warnings) == (250, TOKENS, ())
    levels = [one for one in ("host", "files") if one in stats]
    assert len(levels) == 1 + has_files
    result = replay(trace, load_config(source, env={}), ReplaySettings(layout.block_bytes))
    assert result.asked == trace.blocks == stats["host"]["queries"]
    assert hits > 0.3 * trace.blocks
    print(f"run {hits}, replay {sum(result.hits.values())}, of {trace.blocks}")
    assert sum(result.hits.values()) == pytest.approx(hits, rel=0.02)
    for name in levels:
        assert result.hits[name] == pytest.approx(stats[name]["hits"], rel=0.02)
        assert result.written[name] == pytest.approx(stats[name]["stored"], rel=0.02)
        assert result.evicted[name] == pytest.approx(stats[name]["evicted"], rel=0.02)


@pytest.mark.slow
def test_a_run_hits_what_a_plan_promises_of_its_size(
    tmp_path: Path, kv: torch.Tensor, layout: Layout
) -> None:
    path = tmp_path / "trace.jsonl"
    source = stack(tmp_path, 64 * 4096) | {"record": str(path)}
    run(open_cache(source, layout=layout), kv, returning(3))
    found: Any = plan(path, block_bytes=str(layout.block_bytes)).data
    trace = read_trace(path)
    for point in (found["memory_knee"], found["disk_knee"]):
        sizes = point["memory_bytes"], point["disk_bytes"]
        hits, _ = run(open_cache(stack(tmp_path, *sizes), layout=layout), kv, returning(3))
        print(f"{sizes}: promised {point['ratio']:.4f}, hit {hits / trace.blocks:.4f}")
        assert hits / trace.blocks == pytest.approx(point["ratio"], rel=0.02)
    assert 0.2 < found["memory_knee"]["ratio"] < 0.95 * found["memory"][-1]["ratio"]
