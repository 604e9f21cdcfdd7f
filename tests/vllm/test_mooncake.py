"""Two engines that share only a Mooncake Store share computed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.mooncake import PROGRAM, Mooncake
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the extra mooncake is not installed")

ALL = len(PROMPTS) * HITS
Tokens = list[list[int]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Mooncake]:
    with Mooncake(tmp_path) as store:
        yield store


def over(store: Mooncake) -> dict[str, Any]:
    level = {
        "name": "far",
        "type": "mooncake",
        "master": store.master,
        "capacity": "64 MiB",
        "when": "commit",
        "codecs": ["zstd", "checksum"],
    }
    fetch = {"deadline": "1 m"}
    return {"arena": {"size": "64 MiB"}, "fetch": fetch, "tiers": [{"type": "host"}, level]}


def test_two_engines_share_prefixes_through_mooncake_only(
    start: Start, store: Mooncake, reference: Tokens
) -> None:
    """The second finds all that the first stored; when its node dies, nothing but that is lost."""
    steps = [["each", {"prompts": PROMPTS}], ["stats"], ["shutdown"]]
    cold, first, _ = start(over(store), *steps).finish()
    assert cold["tokens"] == reference
    assert cold["external"] == 0
    assert first["far"]["stored"] * BLOCK == ALL

    reading = start(over(store), *steps)
    warm, second, _ = reading.finish()
    assert warm["tokens"] == reference
    assert warm["external"] == ALL
    assert second["far"]["found"] == second["far"]["hits"] == ALL // BLOCK
    assert second["far"]["process"] > 0
    assert reading.log.read_text().count("BatchGet failed") <= HITS // BLOCK, "for each prompt"

    store.nodes[0].kill()
    store.add()
    again, third, _ = start(over(store), *steps).finish()
    assert again["tokens"] == reference
    assert again["external"] == 0
    assert third["far"]["corrupt"] == 0
