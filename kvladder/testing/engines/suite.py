"""The conformance suite for connectors, as tests to inherit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from threading import Event, Timer
from typing import Any

import pytest

from kvladder.config import registry
from kvladder.layout import align
from kvladder.testing.engines.engine import SampleEngine
from kvladder.testing.engines.faults import Cold, Copies

MakeEngine = Callable[[Mapping[str, Any], int], SampleEngine]
COLD = "suite-cold"
"""The type of the cold tier in a stack."""
BLOCKS = 32
SLOTS = 8
STEPS = 5
"""Number of steps in which something must not happen."""
EVERY_S = 0.001


class ConnectorFixtures:
    """Fixtures of ``ConnectorTests``, and the attributes that a subclass may override."""

    block_tokens = 16
    """Tokens of a block."""
    block_bytes = 8192
    """Bytes of a block, of all ranks together; at most that of a slot in the arena."""
    recovers = True
    """False if a failed load ends the engine, because it cannot compute the blocks again."""
    patience_s = 300.0
    """Time to wait for an event before the test fails."""

    # ---- fixtures

    @pytest.fixture
    def make(self) -> MakeEngine:
        """Return a function that makes an engine; must be overridden.

        It gets a stack, as ``kvladder.open_cache`` takes it, and the number of the engine's blocks.
        """
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def copies(self, monkeypatch: pytest.MonkeyPatch) -> Copies:
        """Return the control of all copies of tensors in main memory."""
        return Copies(monkeypatch)

    @pytest.fixture
    def cold(self, monkeypatch: pytest.MonkeyPatch) -> Cold:
        """Return the control of the cold tier."""
        cold = Cold()
        registered = registry._registered  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setitem(registered, ("tiers", COLD), cold.tier_class)
        return cold

    @pytest.fixture
    def opened(self, make: MakeEngine, copies: Copies, cold: Cold) -> Iterator[Opened]:
        """Yield what opens engines; close them after the test, and check what they leave."""
        opened = Opened(make, self, copies)
        yield opened
        copies.let_go()
        cold.heal()
        opened.close()

    @pytest.fixture
    def engine(self, opened: Opened) -> Driver:
        """Return an engine over host and the cold tier, which gets each block at once."""
        return opened.engine(cold=True)

    @pytest.fixture
    def alone(self, opened: Opened) -> Driver:
        """Return an engine over host alone."""
        return opened.engine(cold=False)


class Opened:
    """Opens engines of a test, and closes them."""

    def __init__(self, make: MakeEngine, limits: ConnectorFixtures, copies: Copies) -> None:
        self._make = make
        self._limits = limits
        self._copies = copies
        self._engines: list[SampleEngine] = []

    def engine(self, *, cold: bool, slots: int = SLOTS, min_priority: int = 0) -> Driver:
        """Open an engine; ``min_priority`` is that of the cold tier."""
        slot_bytes = align(self._limits.block_bytes)
        tiers: list[dict[str, Any]] = [{"name": "host", "type": "host", "min_priority": 0}]
        if cold:
            tiers.append(
                {
                    "name": "cold",
                    "type": COLD,
                    "capacity": f"{64 * slot_bytes * 2} B",
                    "when": "commit",
                    "min_priority": min_priority,
                    "timeout": "1 h",
                }
            )
        stack = {
            "model": {"fingerprint": "suite"},
            "arena": {"size": f"{slots * slot_bytes} B", "reserve": "0%"},
            "fetch": {"when": "always", "deadline": "1 h"},
            "tiers": tiers,
        }
        engine = self._make(stack, BLOCKS)
        assert engine.block_bytes == self._limits.block_bytes, "set block_bytes of the suite"
        self._engines.append(engine)
        return Driver(engine, self._limits)

    def close(self) -> None:
        """Close all engines, with what is still in flight."""
        while self._engines:
            engine = self._engines.pop()
            engine.manager.check()
            engine.close()
            assert not self._copies.unsafe, "the cache was closed while a copy was in flight"
            assert engine.manager.arena.free == engine.manager.arena.slots, (
                "a slot is still claimed"
            )


class Driver:
    """Runs an engine as a test needs it, and knows which bytes each block must have."""

    def __init__(self, engine: SampleEngine, limits: ConnectorFixtures) -> None:
        self.engine = engine
        self.block_tokens = limits.block_tokens
        self._patience_s = limits.patience_s

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Step the engine until ``holds`` is true."""
        end = time.monotonic() + self._patience_s
        while not holds():
            assert time.monotonic() < end, what
            self.engine.step()
            Event().wait(EVERY_S)

    def prompt(self, number: int, blocks: int) -> list[int]:
        """Return the tokens of a prompt; prompts of other numbers begin with other tokens."""
        return [1000 * number + n for n in range(blocks * self.block_tokens)]

    def data(self, tokens: Sequence[int], index: int, salt: str = "") -> bytes:
        """Return the bytes of one block of a prompt."""
        seed = repr((list(tokens[: (index + 1) * self.block_tokens]), salt))
        return Random(seed).randbytes(self.engine.block_bytes)

    def fill(self, tokens: Sequence[int], blocks: Sequence[int], *, salt: str = "") -> None:
        """Write the KV of a prompt into ``blocks``."""
        for index, block in enumerate(blocks):
            self.engine.write(block, self.data(tokens, index, salt))

    def wipe(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks, as another request does."""
        for block in blocks:
            self.engine.write(block, b"\xa5" * self.engine.block_bytes)

    def settle(self) -> None:
        """Step the engine until nothing is in flight."""
        manager = self.engine.manager
        self.until(lambda: not self.engine.busy and manager.idle(), "a copy or write never ended")

    def save(self, tokens: Sequence[int], blocks: Sequence[int], **options: Any) -> None:
        """Compute a prompt in ``blocks``, save it, wait for the end, and reuse the blocks."""
        self.fill(tokens, blocks, salt=options.get("salt", ""))
        self.engine.save(tokens, blocks, **options)
        self.settle()
        assert all(map(self.engine.reusable, blocks)), "blocks are still held after the save"
        self.wipe(blocks)

    def search(self, tokens: Sequence[int], *, salt: str = "") -> tuple[Any, int]:
        """Search for a prompt; return the search and the number of blocks found."""
        match = self.engine.match(tokens, salt=salt)
        self.until(lambda: self.engine.found(match) is not None, "a search never ended")
        found = self.engine.found(match)
        assert found is not None
        return match, found

    def found(self, tokens: Sequence[int], *, salt: str = "") -> int:
        """Return how many blocks of a prompt a search finds."""
        match, found = self.search(tokens, salt=salt)
        self.engine.drop(match)
        return found

    def expect(self, tokens: Sequence[int], blocks: Sequence[int], *, salt: str = "") -> None:
        """Load a prompt that must be there into ``blocks``, and check each byte.

        An engine may stop waiting for a cold tier, and find the blocks the next time.
        """
        tries: list[tuple[Any, int]] = []

        def is_there() -> bool:
            match, found = self.search(tokens, salt=salt)
            if found == len(blocks):
                tries.append((match, found))
                return True
            self.engine.drop(match)
            return False

        self.until(is_there, f"{len(blocks)} blocks were saved but are not found")
        self.load(tries[0][0], tokens, blocks, salt=salt)

    def load(
        self, match: Any, tokens: Sequence[int], blocks: Sequence[int], *, salt: str = ""
    ) -> None:
        """Load all found blocks into ``blocks``; check each byte of these and of all others."""
        others = [block for block in range(BLOCKS) if block not in blocks]
        self.wipe(blocks)
        before = [self.engine.read(block) for block in others]
        load = self.engine.load(match, blocks)
        self.until(lambda: self.engine.loaded(load) is not None, "a load never ended")
        assert self.engine.loaded(load) == len(blocks), "blocks that were found are not loaded"
        for index, block in enumerate(blocks):
            right = self.engine.read(block) == self.data(tokens, index, salt)
            assert right, f"wrong bytes in block {index} of the prompt"
        changed = [
            block
            for block, old in zip(others, before, strict=True)
            if self.engine.read(block) != old
        ]
        assert not changed, f"other blocks changed: {changed}"


class ConnectorTests(ConnectorFixtures):
    """Conformance tests. Inherit, name the class ``Test...`` and define a fixture ``make``.

    ``make`` returns a function of a stack and a number of blocks. The function opens the stack,
    and returns a :class:`SampleEngine` over KV tensors in main memory. For a subclass of
    ``Connector``, that is a :class:`ConnectorEngine`. The suite holds and fails copies of
    kvladder's copiers. A connector with a copier of its own overrides the fixture ``copies``.
    """

    # ---- round trips

    @pytest.mark.parametrize("blocks", [1, 2, 5, SLOTS])
    def test_what_was_saved_is_loaded_byte_for_byte(self, alone: Driver, blocks: int) -> None:
        tokens = alone.prompt(1, blocks)
        alone.save(tokens, [7, 3, 5, 2, 11, 1, 13, 0][:blocks])
        alone.expect(tokens, [19, 17, 20, 22, 14, 16, 23, 18][:blocks])

    def test_blocks_come_back_from_a_cold_tier(self, engine: Driver) -> None:
        first, second = engine.prompt(1, 6), engine.prompt(2, SLOTS)
        engine.save(first, range(6))
        engine.save(second, range(SLOTS))  # the arena has no room for both
        engine.expect(first, range(10, 16))
        engine.expect(second, range(16, 16 + SLOTS))

    def test_a_miss_is_a_miss(self, alone: Driver) -> None:
        known, head, size = alone.prompt(1, 4), alone.prompt(3, 1), alone.block_tokens
        alone.save(known, range(4))
        alone.save(head, [4])
        assert alone.found(alone.prompt(2, 4)) == 0
        assert alone.found([*head, *known[size:]]) == 1, "a block was found behind another prefix"
        other = [*known[: 2 * size], *alone.prompt(2, 2)]
        match, found = alone.search(other)
        assert found == 2, "expected exactly the shared blocks"
        alone.load(match, other, [9, 8])

    def test_saved_blocks_are_not_copied_again(self, alone: Driver, copies: Copies) -> None:
        tokens = alone.prompt(1, 4)
        alone.save(tokens[: 3 * alone.block_tokens], range(3))
        each = copies.count("offload") // 3  # every rank copies its part
        alone.save(tokens, range(4))
        alone.save(tokens, range(4))
        assert copies.count("offload") == 4 * each, "cached blocks were copied again"
        alone.expect(tokens, range(4, 8))

    def test_salts_share_nothing(self, alone: Driver) -> None:
        tokens = alone.prompt(1, 3)
        alone.save(tokens, range(3), salt="one")
        assert alone.found(tokens) == 0
        assert alone.found(tokens, salt="two") == 0
        alone.save(tokens, range(3))
        alone.expect(tokens, range(4, 7), salt="one")
        alone.expect(tokens, range(7, 10))

    # ---- priorities

    def test_low_priorities_are_evicted_first(self, alone: Driver) -> None:
        high, low, others = alone.prompt(1, 2), alone.prompt(2, 2), alone.prompt(3, SLOTS - 2)
        alone.save(high, range(2), priorities=[80, 80])
        alone.save(low, range(2), priorities=[20, 20])
        alone.save(others, range(SLOTS - 2))
        assert alone.found(low) == 0, "blocks of low priority were not evicted first"
        alone.expect(high, [10, 11])

    @pytest.mark.parametrize("pieces", [(4,), (1, 3), (3, 1), (1, 1, 1, 1)])
    def test_a_block_counts_no_more_than_its_prefix(
        self, opened: Opened, cold: Cold, pieces: tuple[int, ...]
    ) -> None:
        engine = opened.engine(cold=True, min_priority=50)
        engine.save(engine.prompt(1, 4), range(4), pieces=pieces, priorities=[80, 80, 40, 80])
        assert len(cold.keys) == 2, "the tier took a block below its min_priority"

    # ---- failures

    def test_a_damaged_block_ends_the_prefix(self, engine: Driver, cold: Cold) -> None:
        tokens = engine.prompt(1, 4)
        engine.save(tokens[: 2 * engine.block_tokens], range(2))
        good = cold.keys
        engine.save(tokens, range(4))
        cold.damage(cold.keys - good)
        engine.save(engine.prompt(2, SLOTS), range(SLOTS))  # host has room for these alone
        engine.expect(tokens[: 2 * engine.block_tokens], [9, 8])
        match, found = engine.search(tokens)
        assert found <= 2, "a damaged block is reported as found"
        engine.load(match, tokens, [20, 21][:found])
        engine.save(tokens, range(4))  # computed again
        engine.expect(tokens, range(4, 8))

    def test_a_failed_load_leaves_no_loaded_block(self, alone: Driver, copies: Copies) -> None:
        tokens = alone.prompt(1, 4)
        alone.save(tokens, range(4))
        match, found = alone.search(tokens)
        assert found == 4
        copies.failing = {"onboard"}
        load = alone.engine.load(match, range(8, 12))
        alone.until(lambda: alone.engine.loaded(load) is not None, "a failed load never ended")
        assert alone.engine.loaded(load) == 0, "blocks that failed to load count as loaded"
        copies.failing = set()
        if self.recovers:
            alone.save(tokens, range(4))
            alone.expect(tokens, range(12, 16))

    def test_a_failed_save_is_not_found(self, alone: Driver, copies: Copies) -> None:
        tokens = alone.prompt(1, 4)
        copies.failing = {"offload"}
        alone.save(tokens, range(4))
        assert alone.found(tokens) == 0, "blocks that were not copied are found"
        copies.failing = set()
        alone.save(tokens, range(4))
        alone.expect(tokens, range(4, 8))

    # ---- what is in use

    def test_a_save_in_flight_is_not_overwritten(self, alone: Driver, copies: Copies) -> None:
        first, second = alone.prompt(1, 4), alone.prompt(2, SLOTS)
        alone.fill(first, range(4))
        copies.hold_saves()
        alone.engine.save(first, range(4))
        for _ in range(STEPS):
            alone.engine.step()
            assert alone.found(first) == 0, "blocks are found before their copy has ended"
            assert not any(map(alone.engine.reusable, range(4))), "blocks can be reused too early"
        alone.fill(second, range(4, 4 + SLOTS))
        alone.engine.save(second, range(4, 4 + SLOTS))  # at most the other slots are free
        copies.let_go()
        alone.until(lambda: all(map(alone.engine.reusable, range(4))), "a save never ended")
        alone.wipe(range(4))
        alone.settle()
        match, found = alone.search(second)
        alone.load(match, second, range(16, 16 + found))
        alone.expect(first, range(24, 28))

    def test_released_blocks_can_be_evicted_and_found_ones_cannot(self, alone: Driver) -> None:
        first, second, third = (alone.prompt(n, SLOTS) for n in (1, 2, 3))
        alone.save(first, range(SLOTS))
        match, found = alone.search(first)
        assert found == SLOTS
        alone.save(second, range(SLOTS))
        assert alone.found(second) == 0, "pinned blocks were evicted"
        alone.load(match, first, range(16, 16 + SLOTS))
        alone.settle()  # a load is done when the copies are; its blocks are let go after that
        alone.save(second, range(SLOTS))
        alone.expect(second, range(16, 16 + SLOTS))
        match, found = alone.search(second)
        assert found == SLOTS
        alone.engine.drop(match)
        alone.settle()  # the blocks that were loaded are let go of, too
        alone.save(third, range(SLOTS))
        alone.expect(third, range(16, 16 + SLOTS))

    def test_a_hanging_tier_holds_up_no_call(self, engine: Driver, cold: Cold) -> None:
        first, others = engine.prompt(1, 4), engine.prompt(2, SLOTS)
        engine.save(first, range(4))
        engine.save(others, range(SLOTS))
        more = engine.prompt(3, 4)
        engine.fill(more, range(4))
        cold.hang()
        end = Timer(self.patience_s, cold.heal)
        end.start()
        try:
            match = engine.engine.match(first)
            assert not end.finished.is_set(), "the search waited for the tier"
            engine.until(lambda: cold.hangs, "the tier was never called")
            engine.engine.save(more, range(4))
            for _ in range(STEPS):
                engine.engine.step()
            engine.engine.found(match)
            engine.engine.drop(match)
            assert cold.hangs, "a call waited for the tier"
        finally:
            end.cancel()
            end.join()

    # ---- the end

    def test_the_copies_end_before_the_cache(self, opened: Opened, copies: Copies) -> None:
        engine = opened.engine(cold=True)
        kept, late = engine.prompt(1, 3), engine.prompt(2, 3)
        engine.save(kept, range(3))
        engine.fill(late, range(3))
        copies.hold_saves()
        engine.engine.save(late, range(3))
        engine.engine.step()
        opened.close()
        again = opened.engine(cold=True)
        again.expect(kept, range(4, 7))
        match, found = again.search(late)
        again.load(match, late, range(8, 8 + found))
