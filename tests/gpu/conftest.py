"""Fixtures of the tests of pools and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvladder.arena import Arena
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.gpu.copy.streams import StreamCopier
from tests.gpu.simulated import (
    BLOCKS,
    SLOT_BYTES,
    SLOTS,
    Engine,
    Start,
    Tensors,
    forget,
    lbhnc,
)
from tests.kit.played import PlayedDevice


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines on a device, and ends them."""
    engines: list[Engine] = []

    def begin(
        layout: Callable[[], list[Tensors]] = lbhnc,
        device: PlayedDevice | None = None,
        *,
        seed: int = 0,
        copies: type[StreamCopier] = StreamCopier,
        ready: bool = True,
        **options: Any,
    ) -> Engine:
        fake = PlayedDevice() if device is None else device
        arena = Arena.create(SLOTS, SLOT_BYTES)
        parts: dict[int, RankShare] = {}
        with fake.played:
            for group, tensors in enumerate(layout()):
                there = {name: fake.own(tensor) for name, tensor in tensors.items()}
                parts[group] = RankShare(BlockPages.of(there, blocks=BLOCKS), 64 * group)
        copier = copies(parts, arena, fake, **options)
        if ready:
            fake.work_in_background()
        engines.append(Engine(Random(seed), fake, copier, arena, parts))
        return engines[-1]

    yield begin
    for engine in engines:
        if engine.device.machine.failing:
            engine.device.machine.reset()
            forget(engine)
        engine.copier.close()
        engine.arena.check()
        engine.arena.close()
