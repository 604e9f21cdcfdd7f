"""vLLM's own offloading, kvladder's stack below it, prioritized LRU as its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.conftest import Start
from tests.vllm.harness import HITS, PROMPTS, flip, stored_payloads

ALL = len(PROMPTS) * HITS


def test_a_new_process_loads_undamaged_blocks_from_kvladders_files(
    start: Start, tmp_path: Path, reference: list[list[int]]
) -> None:
    transfer: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringCPUSpec",
            "spec_module_path": "benchmarks.vllm_native",
            "cpu_bytes_to_use": 64 << 20,
            "eviction_policy": "PrioritizedLRUPolicy",
            "cache_policy_module_path": "kvladder.connectors.vllm_native.policy",
            "secondary_tiers": [
                {
                    "type": "KVLadderTier",
                    "module_path": "kvladder.connectors.vllm_native.tier",
                    "host": "32 MiB",
                    "files": str(tmp_path / "kv"),
                    "capacity": "64 MiB",
                }
            ],
        },
    }
    steps = (["each", {"prompts": PROMPTS}], ["shutdown"])
    cold, _ = start(None, *steps, transfer=transfer).finish()
    assert (cold["external"], cold["tokens"]) == (0, reference)
    warm, _ = start(None, *steps, transfer=transfer).finish()
    assert (warm["external"], warm["tokens"]) == (ALL, reference)
    path, offset = stored_payloads(tmp_path / "kv")[7]
    flip(path, offset + 70_000)
    damaged, _ = start(None, *steps, transfer=transfer).finish()
    assert damaged["tokens"] == reference
    assert 0 < damaged["external"] < ALL
