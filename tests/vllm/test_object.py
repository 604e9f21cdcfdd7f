"""Two engines that share only a bucket share computed blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit.objectserver import BUCKET, ObjectServer
from tests.vllm.conftest import Start
from tests.vllm.harness import PROMPT_TOKENS, PROMPTS

BLOCK = 64
"""Tokens, of 4 KiB each: smaller blocks are refused."""
HITS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
LARGE = {"block_size": BLOCK}


def over(server: ObjectServer) -> dict[str, Any]:
    """Host memory, and a bucket below it."""
    level = {
        "type": "object",
        "url": f"s3://{BUCKET}/kv",
        "options": server.options,
        "capacity": "64 MiB",
        "when": "commit",
        "codecs": ["zstd", "checksum"],
    }
    fetch = {"deadline": "1 m"}
    return {"arena": {"size": "64 MiB"}, "fetch": fetch, "tiers": [{"type": "host"}, level]}


def test_two_engines_share_prefixes_through_a_bucket_and_serve_without_it(
    start: Start, tmp_path: Path, reference: list[list[int]]
) -> None:
    """The server dies once the second engine has looked up all prompts but the last."""
    known = [["each", {"prompts": PROMPTS[:-1]}], ["stats"]]
    with ObjectServer(tmp_path) as server:
        steps = [["each", {"prompts": PROMPTS}], ["stats"], ["shutdown"]]
        cold, first, _ = start(over(server), *steps, engine=LARGE).finish()
        assert cold["tokens"] == reference
        assert cold["external"] == 0
        assert first["object"]["stored"] * BLOCK == len(PROMPTS) * HITS

        killing = ["call", {"function": "tests.vllm.operate:kill", "pid": server.pid}]
        run = start(over(server), *known, killing, *steps, engine=LARGE)
        warm, second, _, after, third, _ = run.finish()
    assert warm["tokens"] == reference[:-1]
    assert warm["external"] == len(PROMPTS[:-1]) * HITS
    assert second["object"]["hits"] == second["object"]["found"] > 0
    assert second["object"]["corrupt"] == 0
    assert after["tokens"] == reference
    assert after["external"] == 0, "the last prompt is computed, the others are vLLM's own"
    assert third["object"]["errors"]
