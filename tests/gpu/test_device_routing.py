"""Routers that follow block pools know the blocks on a device, and claim no others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvladder.gpu.pool.events import PoolEvents
from kvladder.gpu.pool.pool import BlockPool, Partial
from kvladder.gpu.sizing.groups import Group
from kvladder.keys import BlockKey
from kvladder.publishing.device import OnDevice
from kvladder.publishing.messages import Messages
from kvladder.publishing.wire import Batch
from kvladder.routing import Index
from tests.gpu.test_device_machine import BROAD, FULL, NEAR, SIZE, STATE, DeviceMachine

pytest.importorskip("zmq")

from kvladder.routing.feed import Feed

MODELS: list[tuple[tuple[Group, ...], Partial]] = [
    ((FULL,), "take"),
    ((FULL,), "off"),
    ((NEAR, FULL), "copy"),
    ((BROAD, NEAR, STATE), "take"),
    ((NEAR,), "off"),
]
PROMPTS = [[0] * 13, [0] * 9 + [1] * 4, [0] * 8, [0] * 5 + [1] * 8, [1] * 9]


def leading(flags: Sequence[bool]) -> int:
    """Return how many of the first are set."""
    return flags.index(False) if False in flags else len(flags)


class RoutedMachine(DeviceMachine):
    """A router gets its messages over the wire, all after each step, with small buffers too."""

    append = rewind = fork = suspend = resume = None  # type: ignore[assignment]

    @initialize(
        model=st.sampled_from(MODELS),
        blocks=st.integers(6, 10),
        slots=st.integers(6, 14),
        buffer=st.sampled_from([1, 3, 1000]),
        below=st.booleans(),
    )
    def start(
        self,
        model: tuple[tuple[Group, ...], Partial],
        blocks: int,
        slots: int,
        buffer: int,
        below: bool,
    ) -> None:
        self.buffer = buffer
        super().start(model, blocks, slots=slots, thresholds=(0, 0), below=below, seed=0)

    def follow(self, events: PoolEvents) -> OnDevice | None:
        """Make the router follow the published events."""
        self.router = Index()
        self.feed = Feed(self.router, "it", "tcp://127.0.0.1:1")
        ladder = self.sim.manager.ladder
        ladder.events._max = self.buffer
        full = [number for number, group in enumerate(self.groups) if group.kind == "full"]
        self.told = OnDevice(full[0], self.groups[full[0]].block_tokens) if full else None
        if self.told is not None:
            self.told.begin(ladder)
            events.listen(self.told.group, self.told.hear)
        self.messages = Messages(ladder, SIZE, self.told)
        self.sent = 0
        return self.told

    def publish(self) -> None:
        """Send all pending events to the router."""
        while True:
            if events := self.messages.take():
                batch = Batch(float(self.sent), [*events])
                self.feed._apply(self.sent, msgspec.msgpack.encode(batch))
                self.sent += 1
            elif not self.messages.pending:
                return

    # ---- rules

    @rule(
        tokens=st.sampled_from(PROMPTS),
        salt=st.sampled_from(["", "", "a"]),
        image=st.sampled_from([None, None, 5]),
    )
    def serve(self, tokens: list[int], salt: str, image: int | None) -> None:
        """Answer a prompt from begin to end, if there is room."""
        running = len(self.live)
        self.begin(tokens=tokens, priority=None, salt=salt, most=None, image=image)
        self.settle()
        for request in self.live[running:]:
            self.run(request)
            self.requests.release(request)
            self.requests.copied(request)
        del self.live[running:]

    @rule()
    def settle(self) -> None:
        """Let all copies end, and the tiers execute their calls."""
        for _ in range(3):
            self.copier.drain()
            self.cache.poll()
            self.wait(by=0.2)

    @rule(count=st.integers(1, 6))
    def leave(self, count: int) -> None:
        """Have blocks leave the device."""
        for pool in self.cache.pools:
            pool.evict(count)
        self.settle()

    @rule()
    def cleared(self) -> None:
        """Send the full state to the router, as after a gap that no replay fills."""
        self.router.forget("it")
        self.messages.repeat()

    # ---- invariants

    @invariant()
    def routed(self) -> None:
        """The router knows the blocks on the device, and claims none that is nowhere."""
        if not hasattr(self, "cache"):
            return
        self.publish()
        assert not self.feed.counts["refused"]
        self.router.check()
        for tokens, salt, extra in self.asked:
            if self.told is None:
                assert not self.router.match(tokens, salt=salt or None)
            else:
                self.compare(self.told, tokens, salt, extra)

    def compare(
        self, told: OnDevice, tokens: Sequence[int], salt: str, extra: Sequence[tuple[int, bytes]]
    ) -> None:
        """Compare the router's knowledge of a prompt with the real state."""
        size, images = told.block_tokens, dict[int, list[tuple[bytes, int]]]()
        for offset, content in extra:
            images.setdefault(offset // size, []).append((content, offset % size))
        found = self.router.match(tokens, salt=salt or None, extra=images)
        one = self.requests.sequences[told.group]
        keys = one.scheme.chain(tokens, parent=one.scheme.root(salt=salt), extra=extra)
        device, indexes = on_device(one.pool), self.sim.manager.ladder.indexes.values()
        held = [key in device or any(key in index for index in indexes) for key in keys]
        known = [here and one.pool.knows(key) for here, key in zip(held, keys, strict=True)]
        blocks = found[0].tokens // size if found else 0
        assert leading(known) <= blocks <= leading(held)
        on_gpu = sum(key in device for key in keys[:blocks])
        assert not found or found[0].levels.get("GPU", 0) == on_gpu


def on_device(pool: BlockPool) -> set[BlockKey]:
    """Return the blocks that a pool has in slots."""
    levels = {block.key: event.level for event in pool.snapshot() for block in event.blocks}
    return {key for key, level in levels.items() if level == pool.settings.level}


TestRoutedMachine = pytest.mark.slow(RoutedMachine.TestCase)
TestRoutedMachine.settings = profile(max_examples=100, stateful_step_count=30, deadline=None)
