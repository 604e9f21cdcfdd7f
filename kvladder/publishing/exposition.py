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

    short: str
    """Its name without what all begin with."""
    help: str
    fields: Mapping[str, tuple[str, ...]]
    """From which statistics it comes, and what labels of its own each of them has."""
    labels: tuple[str, ...] = ("tier",)
    section: str = "tier"
    le: tuple[float, ...] = ()
    """Of a histogram: the inclusive upper bounds of its buckets."""

    @property
    def name(self) -> str:
        """As it is exposed."""
        return PREFIX + self.short

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """What its values are."""
        if self.le:
            return "histogram"
        return "counter" if self.short.endswith("_total") else "gauge"


class Sample(NamedTuple):
    """One value of a metric under some labels; a histogram's is its plain data."""

    metric: Metric
    labels: tuple[str, ...]
    value: Any


def _tier(name: str, field: str, says: str) -> Metric:
    return Metric(f"tier_{name}", says, {field: ()})


_BOTH_WAYS = ("tier", "direction")
METRICS: Final = (
    _tier("queried_blocks_total", "queries",
        "Blocks that fetches asked for and no hotter tier had"),
    _tier("hit_blocks_total", "hits", "Blocks served from the tier"),
    _tier("joined_blocks_total", "joined",
        "Blocks that were on their way to host already, for another fetch"),
    _tier("throttled_blocks_total", "throttled",
        "Blocks not fetched because of the fetch budget or for want of slots"),
    _tier("late_blocks_total", "late", "Blocks that had not arrived when their fetch was over"),
    _tier("slower_blocks_total", "slower", "Blocks not fetched since computing them is faster"),
    Metric(
        "tier_transferred_blocks_total", "Blocks written to and read from the tier",
        {"stored": ("store",), "loaded": ("load",)}, _BOTH_WAYS,
    ),
    Metric(
        "tier_transferred_bytes_total", "Bytes written to and read from the tier",
        {"stored_bytes": ("store",), "loaded_bytes": ("load",)}, _BOTH_WAYS,
    ),
    Metric(
        "tier_transfer_seconds_total", "Seconds of calls that write to and read from the tier",
        {"stored_s": ("store",), "loaded_s": ("load",)}, _BOTH_WAYS,
    ),
    _tier("blocks", "blocks", "Blocks that the tier holds"),
    _tier("capacity_blocks", "capacity", "Blocks that the tier can hold"),
    _tier("recovered_blocks_total", "recovered", "Blocks of an earlier process found at start"),
    _tier("server_used_bytes", "server_used_bytes", "Memory that its servers use"),
    _tier("server_max_bytes", "server_max_bytes", "Memory that they may use"),
    _tier("namespace_bytes", "namespace_bytes",
        "Bytes of this namespace's blocks on its servers, whoever put them"),
    _tier("server_evicted_blocks_total", "server_evicted",
        "Values that its servers evicted, whoever put them"),
    _tier("probed_blocks_total", "probed", "Blocks that a shared tier was asked for"),
    _tier("found_blocks_total", "found",
        "Blocks of which it turned out that others had put them into a shared tier"),
    Metric(
        "tier_removed_blocks_total", "Blocks that left the tier",
        {"evicted": ("evicted",), "expired": ("expired",), "removed": ("removed",),
         "misses": ("lost",)},
        ("tier", "reason"),
    ),
    _tier("purged_blocks_total", "purged",
        "Blocks that purges removed from a shared tier, or overwrote"),
    _tier("removal_blocks", "removals",
        "Blocks that the tier has still to forget, and purges that are not over"),
    Metric(
        "tier_dropped_blocks_total", "Blocks that could have been kept and were not",
        {"dropped": ()}, ("tier", "reason", "priority"),
    ),
    _tier("corrupt_blocks_total", "corrupt", "Blocks whose bytes failed their check"),
    _tier("unreadable_blocks_total", "unreadable", "Blocks whose codecs or keys are not here"),
    _tier("encoded_bytes_total", "encoded_bytes",
        "What the blocks came to that codecs made smaller, or could not"),
    _tier("errors_total", "errors", "Calls to the tier that failed, time-outs too"),
    _tier("timeouts_total", "timeouts", "Calls to the tier that took too long"),
    _tier("queue_blocks", "queued", "Blocks that wait to be written"),
    _tier("queue_age_seconds", "queue_age_s", "How long the oldest of them has waited"),
    Metric(
        "tier_breaker_state",
        "Circuit breaker of a kind of call: 0 closed, 1 one call is tried, 2 none is made",
        {"breakers": ()}, ("tier", "call"),
    ),
    Metric(
        "tier_breaker_openings_total", "How often the circuit breaker of a kind of call has opened",
        {"breakers_opened": ()}, ("tier", "call"),
    ),
    _tier("left_behind_calls", "calls_behind",
        "Calls to the tier that were given up and have not ended"),
    _tier("left_out_state", "left_out",
        "Whether the tier has not opened, and the cache goes on without it"),
    _tier(
        "task_failures_total", "task_failures", "Tasks of the tier's level that died of an error",
    ),
    Metric(
        "tier_eviction_age_seconds", "Seconds between the last use of a block and its eviction",
        {"eviction_age_s": ()}, le=AGES_S,
    ),
    Metric(
        "tier_reuse_distance_blocks",
        "How many blocks the tier stored or served between two uses of one block",
        {"reuse_distance": ()}, le=DISTANCES,
    ),
    Metric(
        "loop_faults_total",
        "Errors that reached the event loop and would have ended it or were nobody's",
        {"faults": ()}, (), section="loop",
    ),
    Metric("arena_slots", "Host slots for blocks", {"slots": ()}, (), section="arena"),
    Metric("arena_free_slots", "Host slots not in use", {"free": ()}, (), section="arena"),
    Metric(
        "copied_bytes_total",
        "Bytes copied out of (offload) and into (onboard) the engine's KV cache",
        {"offload_bytes": ("offload",), "onboard_bytes": ("onboard",)},
        ("direction",), section="copies",
    ),
    Metric(
        "copy_seconds_total", "Seconds of those copies",
        {"offload_s": ("offload",), "onboard_s": ("onboard",)},
        ("direction",), section="copies",
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
