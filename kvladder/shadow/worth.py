"""What hits at a size are worth: seconds of computing, and money, with the names of ``plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvladder.policy.prices import GIB, MONTH_S, Prices
from kvladder.shadow.level import FACTORS, LevelShadow

LABELS: Final = tuple(f"{factor:g}" for factor in FACTORS)
"""Sizes as labels: factors of the level's size."""
HOUR_S: Final = 3600.0
SMALLEST_WINDOW_S: Final = 1.0
"""Shortest window from which an hour and a month are told."""

Priced = Literal["memory", "disk", ""]


@dataclass(frozen=True, slots=True)
class WorthSource:
    """Where a level's seconds and prices come from."""

    block_bytes: int
    """Bytes of the medium that a block takes."""
    priced: Priced
    """Price that is the medium's; empty if none is known."""
    load_s: Callable[[], float]
    """Returns the seconds that loading a block takes, as measured; 0 for host."""


def worth(
    level: LevelShadow,
    source: WorthSource,
    prices: Prices,
    block_s: float | None,
    now_s: float,
) -> dict[str, dict[str, float]]:
    """Return what each size of a level brings in an hour or a month, by name and size.

    ``block_s`` are the seconds to compute a block, None if unknown.
    """
    found: dict[str, dict[str, float]] = {"hit_ratio": _by_size(level.ratios())}
    counts = level.counts()
    lasted_s = now_s - counts.began_s
    cost = _cost(level, source, prices)
    if cost is not None:
        found["cost_a_month"] = _by_size(cost)
    if block_s is None or lasted_s < SMALLEST_WINDOW_S:
        return found
    each_s = max(0.0, block_s - source.load_s())
    saved = [ratio * counts.asked * each_s / lasted_s for ratio in level.ratios()]
    found["saved_s_an_hour"] = _by_size([HOUR_S * one for one in saved])
    if prices.gpu is not None:
        value = [one / HOUR_S * prices.gpu * MONTH_S for one in saved]
        found["value_a_month"] = _by_size(value)
        if cost is not None:
            found["net_a_month"] = _by_size([a - b for a, b in zip(value, cost, strict=True)])
    return found


def _by_size(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(LABELS, values, strict=True))


def _cost(level: LevelShadow, source: WorthSource, prices: Prices) -> list[float] | None:
    price = getattr(prices, source.priced) if source.priced else None
    if price is None:
        return None
    each = source.block_bytes / GIB * price
    return [level.spec.blocks * factor * each for factor in FACTORS]


def as_text(name: str, figures: dict[str, Any]) -> str:
    """Return one level's figures in a line: hits by size, the optimum, what its size brings."""
    ratios: dict[str, float] = figures["hit_ratio"][name]
    told = [" ".join(f"{size}x {ratio:.3f}" for size, ratio in ratios.items())]
    if name in figures["optimum_ratio"]:
        reached, best = figures["reached_ratio"][name], figures["optimum_ratio"][name]
        told.append(f"reached {reached:.3f} of Belady's {best:.3f}")
    for key, what in (
        ("saved_s_an_hour", "{:,.0f} s saved an hour"),
        ("value_a_month", "{:,.0f} saved a month"),
        ("cost_a_month", "{:,.0f} paid a month"),
    ):
        if name in figures.get(key, {}):
            told.append(what.format(figures[key][name]["1"]))
    return f"{name} {', '.join(told)}"
