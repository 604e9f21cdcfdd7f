"""Makes the live shadow of a cache from its configuration, and joins it to the levels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from kvladder.config.stack import StackConfig
from kvladder.layout import Layout
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.shadow.level import ShadowSpec
from kvladder.shadow.live import STEP_BLOCKS, LiveShadow, ShadowClocks
from kvladder.shadow.worth import Priced, WorthSource
from kvladder.tiers.blocking import SystemClock
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.stack import TierStack

PRICED: Final[dict[str, Priced]] = {"files": "disk", "memory": "memory"}
"""Price of a tier's medium, by type; those of others are not known."""
LONG_STEP: Final = 64
"""Blocks of a step whose speed counts as that of computing."""


def make_shadow(
    config: StackConfig, layout: Layout, clock: SystemClock, *, post: Callable[..., object]
) -> LiveShadow | None:
    """Return the live shadow of the levels; None if none is configured."""
    if not config.shadow.enabled:
        return None
    return LiveShadow(
        shadow_specs(config, layout),
        arena_bytes=config.arena_bytes,
        prices=config.shadow.prices.given,
        clocks=ShadowClocks(clock.now, clock.cpu),
        post=post,
    )


def shadow_specs(config: StackConfig, layout: Layout) -> list[ShadowSpec]:
    """Return the levels that are followed, hottest first.

    Those with ``when: never``, with a priority threshold above the default, or with ``min_hits``
    are left out: the shadow does not know which blocks they take.
    """
    host, slots = config.host, max(1, config.arena_slots(layout))
    specs = [ShadowSpec(host.name, slots, host.make_policy, is_written_through=True)]
    for level in config.levels:
        takes_all = level.min_priority <= PRIORITY_DEFAULT and not level.min_hits
        if takes_all and level.when != "never":
            blocks, through = level.capacity_blocks(layout), level.when == "commit"
            specs.append(ShadowSpec(level.name, blocks, level.make_policy, through))
    return specs


def begin_shadow(shadow: LiveShadow, config: StackConfig, layout: Layout, stack: TierStack) -> None:
    """Tell the shadow what hits are worth, and which blocks the levels recovered."""
    prefill, tokens = config.shadow.prefill, layout.block_tokens

    def block_s() -> float | None:
        if prefill is not None:
            return tokens / prefill
        with stack.lock:
            long_s = stack.worth.seconds(LONG_STEP * tokens)
        return None if long_s is None else long_s / LONG_STEP

    sources = {config.host.name: WorthSource(layout.slot_bytes, "memory", lambda: 0.0)}
    for settings, level in zip(config.levels, stack.levels, strict=True):
        priced = PRICED.get(settings.type, "")
        size = settings.block_bytes(layout)
        sources[level.name] = WorthSource(size, priced, partial(_load_s, level))
    shadow.value(block_s, sources)
    followed = {one.name for one in shadow.levels}
    for level in stack.levels:
        for start in range(0, level.index.places if level.name in followed else 0, STEP_BLOCKS):
            with stack.lock:
                held = level.index.held(start, start + STEP_BLOCKS)
            shadow.fill(level.name, held)


def _load_s(level: Level) -> float:
    """Return the seconds that a level has taken to load a block, on average; 0 if it has not."""
    stats = level.stats
    return stats.loaded_call_s.sum / stats.loaded if stats.loaded else 0.0
