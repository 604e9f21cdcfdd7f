"""Fixtures of the tests of pools and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvladder.arena import Arena
from kvladder.gpu.copy.pages import BlockPages, RankShare
from kvladder.gpu.copy.streams import StreamCopier
from tests.gpu.simulated import BLOCKS, SLOT_BYTES, SLOTS, Engine, Start, Tensors, lbhnc
from tests.kit.gpu import FakeDevice


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines on a device, and ends them."""
    engines: list[Engine] = []

    def begin(
        layout: Callable[[], list[Tensors]] = lbhnc,
        device: FakeDevice | None = None,
        *,
        seed: int = 0,
        copies: type[StreamCopier] = StreamCopier,
        ready: bool = True,
        **options: Any,
    ) -> Engine:
        fake = FakeDevice() if device is None else device
        arena = Arena.create(SLOTS, SLOT_BYTES)
        parts = {
            group: RankShare(BlockPages.of(tensors, blocks=BLOCKS), 64 * group)
            for group, tensors in enumerate(layout())
        }
        for part in parts.values():
            for page in part.pages.pages:
                fake.own(page.view)
        copier = copies(parts, arena, fake, **options)
        if ready:
            fake.work_in_background()
        engines.append(Engine(Random(seed), fake, copier, arena, parts))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.device.failing = engine.device.pending = ""
        engine.copier.close()
        engine.arena.check()
        engine.arena.close()
