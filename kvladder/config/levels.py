"""Turns settings into what the ladder is made of: definitions of levels, and names of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvladder.arena import Slot
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig
from kvladder.layout import Layout
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.ladder.calling.breaker import BreakerSettings, CallSettings
from kvladder.tiers.ladder.definition import LevelDefinition, LevelSettings


def named_layout(config: StackConfig, layout: Layout) -> Layout:
    """Return the layout with the fields that the configuration adds to its namespace."""
    given = config.model.fingerprint
    fields = {} if given == "auto" else {"model.fingerprint": given}
    # blocks move between levels, so caches with a lossy codec share only among themselves
    lossy = [
        codec.identity for level in config.levels for codec in level.codecs if codec.make.lossy
    ]
    if lossy:
        fields["codecs"] = ", ".join(sorted(set(lossy)))
    return replace(layout, fields={**layout.fields, **fields})


def call_settings(config: LevelConfig) -> CallSettings:
    """Return the timeout and the breaker of a level."""
    breaker = config.breaker
    return CallSettings(
        timeout_s=config.timeout_s,
        breaker=BreakerSettings(breaker.failures, breaker.retry_s, breaker.retry_max_s),
    )


def level_definition(
    whole: StackConfig,
    config: LevelConfig,
    layout: Layout,
    slots: int,
    pipeline: PipelineSettings,
    scratch: Sequence[Slot],
    tier: Tier,
) -> LevelDefinition:
    """Return the definition of a level below host; its tier is not opened yet.

    ``slots`` is the number of slots in the arena.
    """
    calls, queue = call_settings(config), max(1, config.queue.of(slots))
    blocks = config.capacity_blocks(layout)
    return LevelDefinition(
        name=config.name,
        tier=tier,
        rule=config.rule,
        capacity_blocks=blocks,
        policy=config.make_policy(),
        settings=LevelSettings(calls, queue_blocks=queue, pipeline=pipeline),
        required=config.required,
        verify=any(codec.checks for codec in config.make_codecs()),
        scratch=scratch,
        shares=whole.shares(config, blocks, config.block_bytes(layout)),
        endurance_bytes=config.endurance_bytes,
    )
