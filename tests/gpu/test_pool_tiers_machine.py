"""A pool over a tier whose copies end in any order, or fail: no wrong byte, no slot lost."""

from __future__ import annotations

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvladder.errors import OutOfBlocks
from kvladder.gpu.sequence import KVSequence
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine, Indexed, replay

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(1, 8),
        host=st.integers(1, 6),
        partial=st.sampled_from(["off", "take", "copy"]),
        threshold=st.sampled_from([0, 35, 50]),
        delayed=st.booleans(),
        inclusive=st.booleans(),
    )
    def start(
        self,
        blocks: int,
        host: int,
        partial: str,
        threshold: int,
        delayed: bool,
        inclusive: bool,
    ) -> None:
        self.engine = Engine(
            blocks,
            host=host,
            partial=partial,  # type: ignore[arg-type]
            rule=OffloadRule(min_priority=threshold),
            events_max=10_000,
            delayed=delayed,
            inclusive=inclusive,
        )
        self.pool, self.host = self.engine.pool, self.engine.host
        self.live: list[KVSequence] = []
        self.index: Indexed = {}

    @rule(
        tokens=TOKENS,
        priority=st.none() | st.sampled_from([0, 35, 60]),
        duration=st.none() | st.just(1.0),
    )
    def begin(self, tokens: list[int], priority: int | None, duration: float | None) -> None:
        retention = None
        if priority is not None:
            retention = Retention((RetentionRange(0, None, priority, duration),))
        before = self.pool.used
        try:
            self.live.append(self.engine.sequences.begin(tokens, retention=retention))
        except OutOfBlocks:
            assert self.pool.used >= before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if not sequence.waits and not sequence.lost:
            self.engine.compute(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.ready:
            length = len(sequence.tokens)
            try:
                self.engine.sequences.append(sequence, tokens)
            except OutOfBlocks:
                assert len(sequence.tokens) == length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.ready and len(self.live) < 5:
            self.live += self.engine.sequences.fork(sequence, 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.engine.sequences.release(sequence)
        self.live.remove(sequence)
        if sequence.copies:
            self.engine.sequences.copied(sequence)

    @precondition(lambda self: self.host.flights)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def land(self, data: st.DataObject, ok: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.host.flights)))
        self.host.complete(ticket, ok=ok)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        self.pool.evict(count)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        loose = sorted(k for k, b in self.host.blocks.items() if not b.claims and not b.flying)
        if loose:
            key = data.draw(st.sampled_from(loose))
            self.host.remove([key])
            self.pool.forgotten([key])

    @rule(tokens=TOKENS)
    def remove(self, tokens: list[int]) -> None:
        self.pool.remove(self.engine.keys(tokens)[-1:])

    @rule(by=st.sampled_from([0.5, 1.0]))
    def wait(self, by: float) -> None:
        self.engine.clock.now_s += by

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.engine.check()
        index = self.pool.ledger.index
        colder = {index.nodes.key[node] for node in index.colder}
        assert colder <= self.host.blocks.keys()
        replay(self.engine.events.take(), self.index)
        now: Indexed = {}
        replay(list(self.pool.snapshot()), now)
        assert now == self.index
        for sequence in self.live:
            if sequence.ready:
                self.engine.verify(sequence)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.host.flights:
            self.host.complete(min(self.host.flights))
        for sequence in self.live:
            self.engine.sequences.release(sequence)
            self.engine.sequences.copied(sequence)
        self.sound()
        assert self.pool.free == self.pool.blocks
        self.pool.reset()
        assert len(self.pool.ledger.index) == 0
        self.engine.check()


TestTiersMachine = pytest.mark.slow(TiersMachine.TestCase)
TestTiersMachine.settings = profile(max_examples=200, stateful_step_count=40, deadline=None)
