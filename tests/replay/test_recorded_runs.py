"""A run that was recorded, then replayed, hits as much as the run counted."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvladder import Layout, open_cache
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_files", [False, True])
def test_a_replay_hits_what_the_run_counted(tmp_path: Path, has_files: bool, seed: int) -> None:
    kv = torch.randn(BLOCKS, 2, TOKENS, 32)  # 4 KiB a block
    layout = Layout(TOKENS, kv[0].nbytes, {"model": "recorded"})
    source: dict[str, Any] = {
        "arena": {"size": "256 KiB"},  # 64 blocks
        "fetch": {"when": "always"},
        "record": {"path": str(tmp_path / "trace.jsonl"), "size": "1 MiB"},
        "tiers": [{"type": "host"}],
    }
    if has_files:
        files = {"type": "files", "path": str(tmp_path / "kv"), "capacity": "1 MiB"}
        source["tiers"].append({**files, "when": "commit", "segment": "256 KiB"})
    random = Random(seed)
    words: dict[int, list[int]] = {}
    hits = 0
    with open_cache(source, layout=layout) as manager:
        connector = InlineConnector(manager, kv)
        for request in chats(seed, 250).requests:
            for block in request.blocks:
                words.setdefault(block, random.choices(range(50_000), k=TOKENS))
            hits += served(manager, connector, [t for b in request.blocks for t in words[b]])
        stats = manager.stats()
        connector.close()
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
