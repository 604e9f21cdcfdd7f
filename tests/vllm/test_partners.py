"""kvladder beside other connectors of vLLM, in a MultiConnector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, connector, stack, together

ALL = len(PROMPTS) * HITS
EACH = ["each", {"prompts": PROMPTS}]
AGAIN = [["reset"], EACH, ["stats"]]
DAMAGED = [["reset"], ["damage"], EACH, ["shutdown"]]
NATIVE: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CPUSpec",
        "spec_module_path": "benchmarks.vllm_native",
        "cpu_bytes_to_use": 64 << 20,
    },
}
"""vLLM's own offloading; it loads and saves between steps."""
Tokens = list[list[int]]


def loaded(stats: dict[str, Any]) -> int:
    """Return how many tokens kvladder has copied into vLLM's blocks."""
    return int(stats["copies"]["onboard_bytes"]) // (128 << 10) * BLOCK


def test_a_partner_asked_first_serves_its_blocks_and_kvladder_the_rest(
    start: Start, files: Path, reference: Tokens
) -> None:
    run = start(
        None,
        EACH,
        ["stats"],
        *AGAIN,
        *DAMAGED,
        transfer=together(NATIVE, connector(stack(files))),
    )
    from_us, before, _, from_partner, after, _, damaged, unharmed, _ = run.finish()
    served = [from_us, from_partner, unharmed]
    assert [one["external"] for one in served] == [ALL] * 3
    assert [one["tokens"] for one in served] == [reference] * 3
    assert loaded(before) == loaded(after) == ALL
    assert damaged * BLOCK == ALL


def test_a_partner_asked_second_serves_the_blocks_that_kvladder_lost(
    start: Start, tmp_path: Path, reference: Tokens
) -> None:
    run = start(
        None,
        EACH,
        *AGAIN,
        ["call", {"function": "tests.vllm.life:forget"}],
        *AGAIN,
        *DAMAGED,
        transfer=together(connector(stack(tmp_path / "kv")), NATIVE),
    )
    cold, _, from_us, before, _, _, from_partner, after, _, _, wrong, _ = run.finish()
    assert [one["external"] for one in (cold, from_us, from_partner, wrong)] == [0, ALL, ALL, ALL]
    assert [one["tokens"] for one in (cold, from_us, from_partner)] == [reference] * 3
    assert loaded(before) == loaded(after) == ALL
    assert after["host"]["blocks"] * BLOCK == ALL, "what the partner loaded is kept again"
    assert all(a != b for a, b in zip(wrong["tokens"], reference, strict=True))


def test_a_partner_that_loads_in_the_step_and_knows_one_group_is_served(
    start: Start, files: Path, tmp_path: Path, reference: Tokens
) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    run = start(
        None,
        EACH,
        ["stats"],
        *AGAIN,
        ["shutdown"],
        transfer=together(example, connector(stack(files))),
    )
    from_us, before, _, from_partner, after, _ = run.finish()
    assert [from_us["external"], from_partner["external"]] == [ALL, ALL]
    assert [from_us["tokens"], from_partner["tokens"]] == [reference] * 2
    assert loaded(before) == loaded(after) == ALL
    assert after["arena"]["free"] + after["host"]["blocks"] == after["arena"]["slots"]
