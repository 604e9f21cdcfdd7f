"""What a running cache does, at a glance: rates, percentiles and losses from its statistics.

The page of a cache, ``kvladder/control/page.html``, shows the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvladder.metrics import SECTIONS
from kvladder.schema import is_mapping
from kvladder.shadow.worth import as_text
from kvladder.tiers.ladder.calling.breaker import BREAKER_STATES

RATE_S: Final = 5.0
"""Rates are means of so many seconds."""
WINDOW_S: Final = 60.0
"""Percentiles are those of the calls of so many seconds."""
LOSSES: Final = (
    "misses", "late", "slower", "sampled", "throttled", "errors", "timeouts", "corrupt", "foreign",
    "unreadable", "task_failures", "clipped", "denied",
)  # fmt: skip
"""Counters of a level that tell of lost blocks, or of calls that failed or were denied."""
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NOT_LOSSES: Final = {"breakers", "breakers_opened", "tenants"}


class LevelGlance(NamedTuple):
    """One level, at a glance."""

    name: str
    type: str
    blocks: int
    capacity: int
    held_bytes: int
    queried: int
    hits: int
    hits_per_s: float
    read_per_s: float
    """Bytes read per second."""
    written_per_s: float
    """Bytes written per second."""
    read_s: tuple[float, float] | None
    """Upper bounds of half, and of 99 %, of the durations of reads; None without any."""
    write_s: tuple[float, float] | None
    queued: int
    queue_age_s: float
    pinned: int
    evicted: int
    removals: int
    opened: int
    """Number of times that a breaker opened."""
    trouble: str
    """Breakers that are not closed, or that the level is left out; empty if all is well."""

    @property
    def filled(self) -> float:
        """Share of the capacity that blocks take."""
        return min(1.0, self.blocks / self.capacity) if self.capacity else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the queried blocks that the level served; None if there were none."""
        return self.hits / self.queried if self.queried else None


class Glance(NamedTuple):
    """One cache, at a glance."""

    name: str
    """Where it was asked."""
    version: str
    process: int
    namespace: str
    block_bytes: int
    open_s: float
    hit_rate: float | None
    served: int
    """Blocks served by all levels."""
    read_per_s: float
    written_per_s: float
    free: int
    slots: int
    sessions: int
    pinned: int
    levels: list[LevelGlance]
    losses: dict[str, dict[str, int]]
    """Drops, misses and failed calls by reason, then by level."""
    shadow: list[str]
    """What each level would bring at other sizes, a line for each; empty without ``shadow``."""
    notices: list[dict[str, Any]]
    """The last notices with their age in seconds, newest first."""


class Watch:
    """Turns the statuses of one cache, each later than the one before, into glances."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._past: list[Mapping[str, Any]] = []

    def look(self, status: Mapping[str, Any]) -> Glance:
        """Return a glance at this status; rates need an earlier one."""
        if self._past and status["time_s"] < self._past[-1]["time_s"]:
            self._past.clear()  # another process answers there now
        types = {one["name"]: one["type"] for one in status.get("levels", ())}
        stats: Mapping[str, Mapping[str, Any]] = status["stats"]
        names = [name for name, one in stats.items() if name not in SECTIONS and "queries" in one]
        levels = [self._level(status, name, types.get(name, "")) for name in names]
        served = sum(stats[name]["hits"] + stats[name].get("joined", 0) for name in names)
        asked = stats[names[0]]["queries"] if names else 0
        arena, shadow = stats.get("arena", {}), stats.get("shadow", {})
        self._past.append(status)
        while status["time_s"] - self._past[0]["time_s"] > WINDOW_S + RATE_S:
            del self._past[0]
        return Glance(
            self._name,
            status["version"],
            status["process"],
            status["namespace"],
            status.get("block_bytes") or 0,
            status["open_s"],
            served / asked if asked else None,
            served,
            sum(one.read_per_s for one in levels[1:]),
            sum(one.written_per_s for one in levels[1:]),
            arena.get("free", 0),
            arena.get("slots", 0),
            status["sessions"],
            sum(one.pinned for one in levels),
            levels,
            _losses({name: stats[name] for name in names}),
            [as_text(name, dict(shadow)) for name in shadow.get("hit_ratio", ())],
            status["notices"],
        )

    def _level(self, status: Mapping[str, Any], name: str, kind: str) -> LevelGlance:
        one: Mapping[str, Any] = status["stats"][name]
        return LevelGlance(
            name,
            kind,
            one["blocks"],
            one["capacity"],
            one["blocks"] * (status.get("block_bytes") or 0),
            one["queries"],
            one["hits"],
            self._rate(status, name, "hits"),
            self._rate(status, name, "loaded_bytes"),
            self._rate(status, name, "stored_bytes"),
            self._spread(status, name, "loaded_call_s"),
            self._spread(status, name, "stored_call_s"),
            one.get("queued", 0),
            one.get("queue_age_s", 0.0),
            one.get("pinned", 0),
            one["evicted"],
            one.get("removals", 0),
            _whole(one.get("breakers_opened", {})),
            _trouble(one),
        )

    def _before(self, status: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """Return the earliest status within so many seconds; the given one without any."""
        now = status["time_s"]
        return next((one for one in self._past if now - one["time_s"] <= seconds + 0.5), status)

    def _rate(self, status: Mapping[str, Any], name: str, counter: str) -> float:
        before = self._before(status, RATE_S)
        took = status["time_s"] - before["time_s"]
        if took <= 0 or name not in before["stats"]:
            return 0.0
        grown = status["stats"][name].get(counter, 0) - before["stats"][name].get(counter, 0)
        return max(0.0, float(grown / took))

    def _spread(
        self, status: Mapping[str, Any], name: str, histogram: str
    ) -> tuple[float, float] | None:
        now = status["stats"][name].get(histogram)
        was = self._before(status, WINDOW_S)["stats"].get(name, {}).get(histogram)
        if now is None:
            return None
        counts = [a - b for a, b in zip(now["counts"], was["counts"], strict=True)] if was else []
        if sum(counts) <= 0:
            counts = now["counts"]  # no calls of late: those since the start
        if not sum(counts):
            return None
        return _bound(now["le"], counts, 0.5), _bound(now["le"], counts, 0.99)


def _bound(bounds: Sequence[float], counts: Sequence[int], part: float) -> float:
    """Return the upper bound of the bucket with this part of the values; inf above all bounds."""
    seen, total = 0, sum(counts)
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        seen += count
        if seen >= part * total:
            return bound
    raise AssertionError("the counts have a sum")


def _trouble(one: Mapping[str, Any]) -> str:
    if one.get("left_out"):
        return "left out"
    states: Mapping[str, int] = one.get("breakers", {})
    return ", ".join(f"{BREAKER_STATES[n]}: {call}" for call, n in states.items() if n)


def _whole(value: Any) -> int:
    """Return the sum of all numbers in nested mappings."""
    return sum(map(_whole, value.values())) if is_mapping(value) else int(value)


def _losses(levels: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, one in levels.items():
        for reason, count in _lost(one):
            if count:
                by_level = found.setdefault(reason, {})
                by_level[name] = by_level.get(name, 0) + count
    return dict(sorted(found.items()))


def _lost(one: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the reasons and the numbers of what one level lost."""
    for name in LOSSES:
        if isinstance(one.get(name), int):
            yield name, one[name]
    for name, counts in one.items():
        if is_mapping(counts) and "le" not in counts and name not in _NOT_LOSSES:
            for reason, count in counts.items():
                yield f"{name}: {reason}", _whole(count)


def time_text(seconds: float) -> str:
    """Return a duration for tables: ``3 ms``, ``12 s``, ``5 min``."""
    if seconds == float("inf"):
        return "longer"
    for limit, scale, unit in (
        *((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")),
        *((7200.0, 1 / 60, "min"), (172800.0, 1 / 3600, "h")),
    ):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}" if seconds > 0 else "0 s"
    return f"{seconds / 86400:.0f} d"


def rate_text(bytes_per_s: float) -> str:
    """Return bytes per second for tables."""
    return f"{bytes_text(bytes_per_s)}/s"


def bytes_text(count: float) -> str:
    """Return bytes for tables, with two digits or more: ``1.5 MiB``, ``73 MiB``, ``1000 MiB``."""
    power = max(0, min((int(count).bit_length() - 1) // 10, len(UNITS) - 1))
    scaled = count / 1024**power
    return f"{scaled:.{1 if 0 < scaled < 10 and power else 0}f} {UNITS[power]}"


def share_text(share: float | None) -> str:
    """Return a share for tables, in percent."""
    return "-" if share is None else f"{share:.1%}"


def spread_text(bounds: tuple[float, float] | None) -> str:
    """Return the bounds of half and of 99 % of durations."""
    return "-" if bounds is None else " / ".join(map(time_text, bounds))
