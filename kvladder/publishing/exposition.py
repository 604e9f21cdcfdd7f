"""What statistics mean to somebody who watches: names, kinds, units and labels of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from kvladder.metrics import AGES_S, DISTANCES, SECTIONS, Stats

PREFIX: Final = "kvladder_"


@dataclass(frozen=True)
class Metric:
    """One metric; counters end in ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    fields: Mapping[str, tuple[str, ...]]
    """From which statistics it comes, and what labels of its own each of them has."""
    labels: tuple[str, ...] = ("tier",)
    section: str = "tier"
    le: tuple[float, ...] = ()
    """Of a histogram: the inclusive upper bounds of its buckets."""


class Sample(NamedTuple):
    """One value of a metric under some labels; a histogram's is its plain data."""

    metric: Metric
    labels: tuple[str, ...]
    value: Any


def _tier(name: str, kind: Literal["counter", "gauge"], help_: str, field_: str) -> Metric:
    return Metric(PREFIX + name, kind, help_, {field_: ()})


_BOTH_WAYS = ("tier", "direction")
METRICS: Final = (
    _tier(
        "tier_queried_blocks_total",
        "counter",
        "Blocks that fetches asked for and no hotter tier had",
        "queries",
    ),
    _tier("tier_hit_blocks_total", "counter", "Blocks served from the tier", "hits"),
    _tier(
        "tier_joined_blocks_total",
        "counter",
        "Blocks that were on their way to host already, for another fetch",
        "joined",
    ),
    _tier(
        "tier_throttled_blocks_total",
        "counter",
        "Blocks not fetched because of the fetch budget or for want of slots",
        "throttled",
    ),
    _tier(
        "tier_late_blocks_total",
        "counter",
        "Blocks that had not arrived when their fetch was over",
        "late",
    ),
    _tier(
        "tier_slower_blocks_total",
        "counter",
        "Blocks not fetched since computing them is faster",
        "slower",
    ),
    Metric(
        PREFIX + "tier_transferred_blocks_total",
        "counter",
        "Blocks written to and read from the tier",
        {"stored": ("store",), "loaded": ("load",)},
        _BOTH_WAYS,
    ),
    Metric(
        PREFIX + "tier_transferred_bytes_total",
        "counter",
        "Bytes written to and read from the tier",
        {"stored_bytes": ("store",), "loaded_bytes": ("load",)},
        _BOTH_WAYS,
    ),
    Metric(
        PREFIX + "tier_transfer_seconds_total",
        "counter",
        "Seconds of calls that write to and read from the tier",
        {"stored_s": ("store",), "loaded_s": ("load",)},
        _BOTH_WAYS,
    ),
    _tier("tier_blocks", "gauge", "Blocks that the tier holds", "blocks"),
    _tier("tier_capacity_blocks", "gauge", "Blocks that the tier can hold", "capacity"),
    _tier(
        "tier_recovered_blocks_total",
        "counter",
        "Blocks of an earlier process found at start",
        "recovered",
    ),
    _tier("tier_server_used_bytes", "gauge", "Memory that its servers use", "server_used_bytes"),
    _tier("tier_server_max_bytes", "gauge", "Memory that they may use", "server_max_bytes"),
    _tier(
        "tier_namespace_bytes",
        "gauge",
        "Bytes of this namespace's blocks on its servers, whoever put them",
        "namespace_bytes",
    ),
    _tier(
        "tier_server_evicted_blocks_total",
        "counter",
        "Values that its servers evicted, whoever put them",
        "server_evicted",
    ),
    _tier(
        "tier_probed_blocks_total",
        "counter",
        "Blocks that a shared tier was asked for",
        "probed",
    ),
    _tier(
        "tier_found_blocks_total",
        "counter",
        "Blocks of which it turned out that others had put them into a shared tier",
        "found",
    ),
    Metric(
        PREFIX + "tier_removed_blocks_total",
        "counter",
        "Blocks that left the tier",
        {
            "evicted": ("evicted",),
            "expired": ("expired",),
            "removed": ("removed",),
            "misses": ("lost",),
        },
        ("tier", "reason"),
    ),
    _tier(
        "tier_purged_blocks_total",
        "counter",
        "Blocks that purges removed from a shared tier, or overwrote",
        "purged",
    ),
    _tier(
        "tier_removal_blocks",
        "gauge",
        "Blocks that the tier has still to forget, and purges that are not over",
        "removals",
    ),
    Metric(
        PREFIX + "tier_dropped_blocks_total",
        "counter",
        "Blocks that could have been kept and were not",
        {"dropped": ()},
        ("tier", "reason", "priority"),
    ),
    _tier(
        "tier_corrupt_blocks_total", "counter", "Blocks whose bytes failed their check", "corrupt"
    ),
    _tier(
        "tier_unreadable_blocks_total",
        "counter",
        "Blocks whose codecs or keys are not here",
        "unreadable",
    ),
    _tier(
        "tier_encoded_bytes_total",
        "counter",
        "What the blocks came to that codecs made smaller, or could not",
        "encoded_bytes",
    ),
    _tier(
        "tier_errors_total", "counter", "Calls to the tier that failed, time-outs too", "errors"
    ),
    _tier("tier_timeouts_total", "counter", "Calls to the tier that took too long", "timeouts"),
    _tier("tier_queue_blocks", "gauge", "Blocks that wait to be written", "queued"),
    _tier(
        "tier_queue_age_seconds",
        "gauge",
        "How long the oldest of them has waited",
        "queue_age_s",
    ),
    Metric(
        PREFIX + "tier_breaker_state",
        "gauge",
        "Circuit breaker of a kind of call: 0 closed, 1 one call is tried, 2 none is made",
        {"breakers": ()},
        ("tier", "call"),
    ),
    Metric(
        PREFIX + "tier_breaker_openings_total",
        "counter",
        "How often the circuit breaker of a kind of call has opened",
        {"breakers_opened": ()},
        ("tier", "call"),
    ),
    _tier(
        "tier_left_behind_calls",
        "gauge",
        "Calls to the tier that were given up and have not ended",
        "calls_behind",
    ),
    _tier(
        "tier_left_out_state",
        "gauge",
        "Whether the tier has not opened, and the cache goes on without it",
        "left_out",
    ),
    _tier(
        "tier_task_failures_total",
        "counter",
        "Tasks of the tier's level that died of an error",
        "task_failures",
    ),
    Metric(
        PREFIX + "tier_eviction_age_seconds",
        "histogram",
        "Seconds between the last use of a block and its eviction",
        {"eviction_age_s": ()},
        le=AGES_S,
    ),
    Metric(
        PREFIX + "tier_reuse_distance_blocks",
        "histogram",
        "How many blocks the tier stored or served between two uses of one block",
        {"reuse_distance": ()},
        le=DISTANCES,
    ),
    Metric(
        PREFIX + "loop_faults_total",
        "counter",
        "Errors that reached the event loop and would have ended it or were nobody's",
        {"faults": ()},
        (),
        "loop",
    ),
    Metric(PREFIX + "arena_slots", "gauge", "Host slots for blocks", {"slots": ()}, (), "arena"),
    Metric(
        PREFIX + "arena_free_slots", "gauge", "Host slots not in use", {"free": ()}, (), "arena"
    ),
    Metric(
        PREFIX + "copied_bytes_total",
        "counter",
        "Bytes copied out of (offload) and into (onboard) the engine's KV cache",
        {"offload_bytes": ("offload",), "onboard_bytes": ("onboard",)},
        ("direction",),
        "copies",
    ),
    Metric(
        PREFIX + "copy_seconds_total",
        "counter",
        "Seconds of those copies",
        {"offload_s": ("offload",), "onboard_s": ("onboard",)},
        ("direction",),
        "copies",
    ),
)  # fmt: skip


def samples(stats: Stats) -> Iterator[Sample]:
    """The values of all metrics in some statistics."""
    for name, values in stats.items():
        section = name if name in SECTIONS else "tier"
        first = (name,) if section == "tier" else ()
        for metric in METRICS:
            if metric.section == section:
                for key, own in metric.fields.items():
                    if key in values:
                        yield from _samples(metric, (*first, *own), values[key])


def _samples(metric: Metric, labels: tuple[str, ...], value: Any) -> Iterator[Sample]:
    """One sample, or one per label that ``value`` has as its keys."""
    if len(labels) == len(metric.labels):
        yield Sample(metric, labels, value)
        return
    for label, inner in value.items():
        yield from _samples(metric, (*labels, label), inner)
