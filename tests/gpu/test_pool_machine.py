"""The pool against a reference model: cached blocks, order of eviction, served blocks."""

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
from kvladder.gpu.requests.sequence import KVSequence
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.keys import BlockKey
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine, Indexed, priority_of, replay
from tests.gpu.model import Name, PoolModel, Private, Run

TOKENS = st.integers(1, 14).map(lambda n: [0] * n) | st.lists(
    st.integers(0, 1), min_size=1, max_size=14
)
PRIORITIES = st.sampled_from([0, 10, 35, 60, 100])
DURATIONS = st.none() | st.integers(0, 3).map(float)


@st.composite
def retentions(draw: st.DrawFn) -> Retention:
    cuts = sorted(draw(st.sets(st.integers(0, 14), max_size=4)))
    ranges = tuple(
        RetentionRange(start, end, draw(PRIORITIES), draw(DURATIONS))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )
    return Retention(ranges, draw(PRIORITIES), draw(DURATIONS), draw(PRIORITIES))


class PoolMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 10), partial=st.sampled_from(["off", "take", "copy"]))
    def start(self, blocks: int, partial: str) -> None:
        self.engine = Engine(blocks, partial=partial, events_max=10_000)  # type: ignore[arg-type]
        self.pool = self.engine.pool
        self.model = PoolModel(blocks, 4, partial)
        self.live: list[tuple[KVSequence, Run]] = []
        self.pinned: list[tuple[list[DeviceSlot], list[Name | Private]]] = []
        self.index: Indexed = {}

    def key(self, name: Name) -> BlockKey:
        whole = len(name) // 4 * 4
        keys = self.engine.keys(name[:whole])
        if len(name) == whole:
            return keys[-1]
        parent = keys[-1] if keys else self.engine.scheme.root()
        return self.engine.scheme.tail(name[whole:], parent=parent)

    def slot(self, name: Name) -> DeviceSlot:
        node = self.pool._ledger.index.find(self.key(name))
        assert node is not None
        return self.pool._ledger.nodes.slot[node]

    # ---- rules

    @rule(tokens=TOKENS, retention=st.none() | retentions())
    def begin(self, tokens: list[int], retention: Retention | None) -> None:
        model = self.model
        model.expire()
        names = model.prefix(tokens[:-1])
        shared, parts = model.parts(tokens[:-1], len(names))
        slots = {self.slot(name): name for name in parts}
        try:
            sequence = self.engine.sequences.begin(tokens, retention=retention)
        except OutOfBlocks:
            assert model.room_for(tokens, names, None) > 0
            return
        part, taken = None, False
        if sequence.copies:
            part = slots[sequence.copies[0].source]
        elif sequence.cached > len(names) * 4:
            part, taken = slots[sequence.table[len(names)]], True
        assert sequence.cached == len(names) * 4 + (0 if part is None else shared)
        assert model.room_for(tokens, names, part, taken=taken) <= 0
        run = model.begin(list(tokens), retention, part, taken=taken)
        self.live.append((sequence, run))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        sequence, run = data.draw(st.sampled_from(self.live))
        for copy in sequence.copies:
            source, target = (self.engine.device.kv[s] for s in (copy.source, copy.target))
            target[: copy.tokens] = source[: copy.tokens]
        self.engine.sequences.copied(sequence)
        self.model.copied(run)
        self.engine.compute(sequence)
        self.model.store(run, len(run.tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        ready = [pair for pair in self.live if pair[0].ready]
        if not ready:
            return
        sequence, run = data.draw(st.sampled_from(ready))
        full = self.model.append(run, len(tokens)) > 0
        if full:
            with pytest.raises(OutOfBlocks):
                self.engine.sequences.append(sequence, tokens)
        else:
            self.engine.sequences.append(sequence, tokens)
            self.model.appended(run, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def rewind(self, data: st.DataObject, count: int) -> None:
        ready = [pair for pair in self.live if pair[0].ready and len(pair[1].tokens) >= count]
        if ready:
            sequence, run = data.draw(st.sampled_from(ready))
            self.engine.sequences.rewind(sequence, count)
            self.model.rewind(run, count)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        ready = [pair for pair in self.live if pair[0].ready]
        if ready and len(self.live) < 6:
            sequence, run = data.draw(st.sampled_from(ready))
            [other] = self.engine.sequences.fork(sequence, 1)
            self.live.append((other, self.model.fork(run)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence, run = data.draw(st.sampled_from(self.live))
        if sequence.ready:
            self.live.remove((sequence, run))
            self.engine.sequences.release(sequence)
            self.model.release(run)

    @rule(by=st.sampled_from([0.5, 1.0, 2.0]))
    def wait(self, by: float) -> None:
        self.engine.clock.now_s += by
        self.model.now += by

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        assert self.pool.evict(count) == self.model.evict(count)

    @rule(tokens=TOKENS)
    def acquire(self, tokens: list[int]) -> None:
        slots = self.pool.acquire(self.engine.keys(tokens))
        names = self.model.prefix(tokens)
        assert len(slots) == len(names)
        if names:
            self.model.pins += names
            self.pinned.append((slots, list(names)))

    @precondition(lambda self: self.pinned)
    @rule()
    def give_back(self) -> None:
        slots, _ = self.pinned.pop()
        self.pool.release(slots)
        held = self.model.pins[-len(slots) :]
        del self.model.pins[-len(slots) :]
        self.model.use(held)

    @rule(tokens=TOKENS)
    def remove(self, tokens: list[int]) -> None:
        keys = self.engine.keys(tokens)
        self.pool.remove(keys[-1:])
        self.model.forget([tuple(tokens[: len(keys) * 4])] if keys else [])

    # ---- invariants

    @invariant()
    def same_blocks(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.engine.check()
        self.model.expire()
        names = {self.key(name): name for name in self.model.cached}
        index = self.pool._ledger.index
        assert {index.nodes.key[node] for node in index.known()} == names.keys()
        for key, name in names.items():
            assert priority_of(self.pool, key) == self.model.cached[name].priority
            refs = self.pool._ledger.refs[self.slot(name)]
            assert refs == self.model.refs(name)
        assert self.pool.free == self.model.free()

    @invariant()
    def same_victims(self) -> None:
        if not hasattr(self, "pool"):
            return
        victims = self.pool._ledger.order.select(2)
        keys = [self.pool._ledger.nodes.key[node] for node in victims]
        self.pool._ledger.order.unselect(victims)
        kept = dict(self.model.cached)
        names: list[Name] = []
        while len(names) < 2 and (name := self.model.next_victim()) is not None:
            names.append(name)
            del self.model.cached[name]
        self.model.cached = kept
        assert keys == [self.key(name) for name in names]

    @invariant()
    def same_bytes(self) -> None:
        for sequence, run in getattr(self, "live", ()):
            assert list(sequence.tokens) == run.tokens
            assert sequence.computed == run.computed
            if sequence.ready:
                self.engine.verify(sequence)

    @invariant()
    def events_make_the_index(self) -> None:
        if not hasattr(self, "pool"):
            return
        replay(self.engine.events.take(), self.index)
        now: Indexed = {}
        replay(list(self.pool.snapshot()), now)
        assert now == self.index


TestPoolMachine = pytest.mark.slow(PoolMachine.TestCase)
TestPoolMachine.settings = profile(max_examples=100, stateful_step_count=30, deadline=None)
