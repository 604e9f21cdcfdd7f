"""A pool over a tier with copies that end in any order, or fail: no wrong byte, no slot lost."""

from __future__ import annotations

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvladder.errors import BlocksBusy, OutOfBlocks
from kvladder.gpu.requests.sequence import KVSequence
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine, Indexed, replay

ACTIONS = [
    "begin", "begin", "begin", "run", "compute", "compute", "compute", "append", "append",
    "rewind", "fork", "release", "release", "land", "land", "evict", "forget", "remove", "wait",
]  # fmt: skip
LENGTHS = (9, 5, 8, 13, 1, 3, 4, 6, 14)


@st.composite
def prompts(draw: st.DrawFn, longest: int = 14) -> list[int]:
    """Return prompts, mostly beginnings of one text, so that requests share blocks."""
    tokens = [0] * draw(st.sampled_from([n for n in LENGTHS if n <= longest]))
    if draw(st.integers(0, 5)) == 5:
        tokens[draw(st.integers(0, len(tokens) - 1))] = 1
    return tokens


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(1, 8),
        host=st.integers(1, 6),
        partial=st.sampled_from(["off", "take", "copy"]),
        threshold=st.sampled_from([0, 35, 50]),
        delayed=st.sampled_from([True, True, False]),
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

    # One rule, which draws the event: with many rules most runs would leave most out, and faults
    # between requests take several of them.

    @rule(data=st.data(), what=st.sampled_from(ACTIONS))
    def step(self, data: st.DataObject, what: str) -> None:
        getattr(self, what)(data)

    def begin(self, data: st.DataObject) -> None:
        """Begin a request for a text, with a bound on the served tokens."""
        tokens, most = data.draw(prompts()), data.draw(st.sampled_from([None, None, 0, 5]))
        priority = data.draw(st.sampled_from([None, None, None, 0, 35, 60]))
        retention = None
        if priority is not None:
            lasts_s = data.draw(st.sampled_from([None, 1.0]))
            retention = Retention((RetentionRange(0, None, priority, lasts_s),))
        before = self.pool.used
        try:
            sequence = self.engine.sequences.begin(tokens, retention=retention, cached_max=most)
        except OutOfBlocks as error:
            assert self.pool.used >= before
            self.may_refuse(error, len(tokens), [])
        else:
            self.live.append(sequence)

    def may_refuse(self, error: OutOfBlocks, tokens: int, running: list[KVSequence]) -> None:
        """A prompt that fits a pool in which only ``running`` is active must be admitted."""
        fits = -(-tokens // self.engine.block_tokens) <= self.pool.blocks
        alone = self.live == running and not self.host.flights
        assert not (fits and alone), f"refused by an idle pool: {error}"
        assert self.host.flights or not isinstance(error, BlocksBusy)

    def run(self, data: st.DataObject) -> None:
        """Run a request as far as possible at once; idle blocks leave the device."""
        tokens = data.draw(prompts())
        try:
            sequence = self.engine.sequences.begin(tokens)
        except OutOfBlocks as error:
            self.may_refuse(error, len(tokens), [])
        else:
            if not sequence.waits:
                self.engine.compute(sequence)
            self.engine.sequences.release(sequence)
            self.engine.sequences.copied(sequence)
        self.pool.evict(self.pool.blocks)
        while self.host.flights:
            self.host.complete(min(self.host.flights))

    def pick(self, data: st.DataObject, *, ready: bool = True) -> KVSequence | None:
        able = [one for one in self.live if one.ready or not ready]
        return data.draw(st.sampled_from(able)) if able else None

    def compute(self, data: st.DataObject) -> None:
        able = [one for one in self.live if not (one.waits or one.lost)]
        if able:
            sequence = data.draw(st.sampled_from(able))
            part = data.draw(st.sampled_from([None, None, 1, 4, 6]))
            self.engine.compute(sequence, None if part is None else sequence.computed + part)

    def append(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            tokens, length = data.draw(prompts(longest=6)), len(sequence.tokens)
            try:
                self.engine.sequences.append(sequence, tokens)
            except OutOfBlocks as error:
                assert len(sequence.tokens) == length
                self.may_refuse(error, length + len(tokens), [sequence])

    def rewind(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None and len(sequence.tokens) > 1:
            count = data.draw(st.integers(1, len(sequence.tokens) - 1))
            self.engine.sequences.rewind(sequence, count)

    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None and len(self.live) < 5:
            self.live += self.engine.sequences.fork(sequence, 1)

    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data, ready=False)
        if sequence is not None:
            self.engine.sequences.release(sequence)
            self.live.remove(sequence)
            self.engine.sequences.copied(sequence)

    def land(self, data: st.DataObject) -> None:
        if self.host.flights:
            ticket = data.draw(st.sampled_from(sorted(self.host.flights)))
            self.host.complete(ticket, ok=data.draw(st.sampled_from([True, True, True, False])))

    def evict(self, data: st.DataObject) -> None:
        self.pool.evict(data.draw(st.integers(1, 3)))

    def forget(self, data: st.DataObject) -> None:
        loose = sorted(k for k, b in self.host.blocks.items() if not b.claims and not b.flying)
        if loose:
            key = data.draw(st.sampled_from(loose))
            self.host.remove([key])
            self.pool.forgotten([key])

    def remove(self, data: st.DataObject) -> None:
        self.pool.remove(self.engine.keys(data.draw(prompts()))[-1:])

    def wait(self, data: st.DataObject) -> None:
        self.engine.clock.now_s += data.draw(st.sampled_from([0.5, 1.0]))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.engine.check()
        self.engine.poison()
        index = self.pool._ledger.index
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
        assert len(self.pool._ledger.index) == 0
        self.engine.check()


TestTiersMachine = pytest.mark.slow(TiersMachine.TestCase)
TestTiersMachine.settings = profile(max_examples=100, stateful_step_count=50, deadline=None)
