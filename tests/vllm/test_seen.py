"""vLLM's reports on a cache: Prometheus metrics, and KV events over ZeroMQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HITS, PROMPTS, connector, stack, together

ALL = len(PROMPTS) * HITS
NUDGE = ["generate", {"prompts": [PROMPTS[0][:7]], "tokens": 2}]
"""A few steps that store nothing, so that pending reports are sent."""


def scraped(text: str) -> dict[tuple[str, str], float]:
    """Return the metrics by name and by the values of kvladder's own labels, in order."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, ",".join(v for k, v in sample.labels.items() if k in OWN)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("le") in (None, "+Inf")
    }


OWN = {"tier", "reason", "direction", "source"}


def replayed(batches: list[Any]) -> dict[tuple[str, str | None], dict[Any, Any]]:
    """Return the events that stored the held blocks, by medium and ownership, by hash."""
    found: dict[tuple[str, str | None], dict[Any, Any]] = {}
    for _time_s, events, rank in batches:
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                found.clear()
                continue
            level = found.setdefault((event["medium"], event.get("ownership")), {})
            if event["type"] == "BlockStored":
                level.update(dict.fromkeys(event["block_hashes"], event))
            else:
                for block_hash in event["block_hashes"]:
                    level.pop(block_hash, None)
    return found


def require_metrics(seen: dict[tuple[str, str], float], stats: Any) -> None:
    """Check that vLLM's metrics equal the counters of the cache."""
    for tier in ("host", "files"):
        for metric, field in {
            "tier_hit_blocks_total": "hits",
            "tier_queried_blocks_total": "queries",
            "tier_blocks": "blocks",
            "tier_capacity_blocks": "capacity",
        }.items():
            assert seen[f"vllm:kvladder_{metric}", tier] == stats[tier][field], (tier, metric)
    assert seen["vllm:kvladder_tier_hit_blocks_total", "files"] * BLOCK == ALL
    assert seen["vllm:kvladder_tier_hit_blocks_total", "host"] * BLOCK == ALL
    assert seen["vllm:kvladder_tier_reuse_distance_blocks_count", "host"] * BLOCK == ALL
    assert seen["vllm:kvladder_copied_bytes_total", "onboard"] == 2 * ALL // BLOCK * (128 << 10)
    assert seen["vllm:kvladder_tier_transferred_bytes_total", "load,files"] > 0
    by_source = {k: v for (name, k), v in seen.items() if "cached_by_source_total" in name}
    assert (by_source["disk"], by_source["host"]) == (ALL, ALL)


def require_tokens(host: dict[Any, Any], heads: set[tuple[int, ...]]) -> None:
    """Check that each host block was announced with tokens and, except a head, its parent."""
    tokens = {tuple(PROMPTS[0][i : i + BLOCK]) for i in range(0, HITS, BLOCK)}
    for event in host.values():
        size, hashes = event["block_size"], event["block_hashes"]
        assert (size, event["group_idx"]) == (BLOCK, 0)
        assert event["kv_cache_spec_kind"] == "full_attention"
        assert len(event["token_ids"]) == size * len(hashes)
        parts = [tuple(event["token_ids"][i * size :][:size]) for i in range(len(hashes))]
        tokens -= set(parts)
        parent = event["parent_block_hash"]
        assert (parent is None) == (parts[0] in heads)
        assert parent is None or parent in host
    assert not tokens, "every block of the first prompt was told with its tokens"


def test_metrics_and_events_match_the_work_of_the_cache(start: Start, files: Path) -> None:
    more = [prompt[::-1] for prompt in PROMPTS[:1]]
    run = start(
        stack(files),
        NUDGE,
        ["each", {"prompts": PROMPTS}],
        ["reset"],
        ["each", {"prompts": PROMPTS + more}],
        ["stats"],
        NUDGE,
        ["stats"],
        ["levels"],
        ["scrape"],
        ["events"],
        events=True,
    )
    _, cold, _, warm, _, _, stats, levels, text, events = run.finish()
    assert (cold["external"], warm["external"]) == (ALL, ALL)
    require_metrics(scraped(text), stats)
    batches = [events["again"][str(number)] for number in range(len(events["again"]))]
    assert len(events["heard"]) > 5
    for number, batch in events["heard"].items():  # except for events before they found each other
        assert batch == batches[int(number)]
    told = replayed(batches)
    host, below = told["CPU", None], told["STORAGE", "files"]
    assert sorted(host) == levels["host"]
    assert sorted(below) == levels["files"]
    recovered = [event for event in batches[0][1] if event.get("ownership") == "files"]
    assert sum(len(event["block_hashes"]) for event in recovered) >= ALL // BLOCK
    assert not any(event["token_ids"] for event in recovered), "nobody has asked for them yet"
    require_tokens(host, {tuple(prompt[:BLOCK]) for prompt in PROMPTS + more})


def test_metrics_cross_processes_and_a_multi_connector(start: Start, files: Path) -> None:
    run = start(
        None,
        ["each", {"prompts": PROMPTS}],
        ["scrape"],
        ["shutdown"],
        transfer=together(connector(stack(files))),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    warm, text, _ = run.finish()
    assert warm["external"] == ALL
    seen = scraped(text)
    assert seen["vllm:kvladder_tier_hit_blocks_total", "files"] * BLOCK == ALL
    assert seen["vllm:kvladder_tier_blocks", "files"] >= ALL // BLOCK
    assert seen["vllm:kvladder_arena_slots", ""] == (64 << 20) // (128 << 10)
