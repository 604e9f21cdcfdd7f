"""What the conformance suite for tiers works with: blocks, an arena, tiers on one medium."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from random import Random
from types import NoneType

import pytest
import pytest_asyncio

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.runtime import BlockingPool, SystemClock
from kvladder.testing.sim import SimClock, inline_blocking
from kvladder.tiers.base import NO_SLOT, Item, Tier, TierContext

MakeTier = Callable[[], Tier]
POISON = 0xA5
SETTLE_S = 0.02
"""How long a real tier is given to do what it must not do any more."""


class Blocks:
    """Blocks to put into a tier under test: number n has place n and a slot of its own.

    Holds a claim on every slot while the test lasts, as a level does while a call lasts.
    """

    def __init__(self, arena: Arena, layout: Layout, count: int) -> None:
        self.count = count
        self._arena = arena
        self._size = layout.block_bytes
        leased = arena.lease(count)
        assert leased is not None
        self.slots = leased

    @staticmethod
    def key(number: int) -> BlockKey:
        """The key of a block."""
        return BlockKey(hashlib.sha256(b"block %d" % number).digest())

    def data(self, item: Item) -> bytes:
        """The bytes that belong to a key."""
        return Random(item.key).randbytes(self._size)

    def batch(self, tier: Tier) -> list[Item]:
        """A batch of two blocks, if the tier takes that many."""
        return self.items(*range(min(2, tier.batch_max)))

    def items(self, *numbers: int) -> list[Item]:
        """Blocks, each at its own place with its own slot."""
        return [Item(self.key(n), n, self.slots[n]) for n in numbers]

    def fill(self, items: Sequence[Item]) -> None:
        """Write into each slot what belongs to its key; what follows it in the slot is poison."""
        self.poison(items)
        for item in items:
            self._arena.view(item.slot)[: self._size] = self.data(item)

    def poison(self, items: Sequence[Item]) -> None:
        """Overwrite the slots, as their next owner would."""
        for item in items:
            self._arena.view(item.slot)[:] = bytes([POISON]) * self._arena.slot_bytes

    def bytes_in(self, slot: Slot) -> bytes:
        """A slot's bytes, those after the block too."""
        return bytes(self._arena.view(slot))

    def right(self, item: Item) -> bool:
        """Whether the slot holds what belongs to the key."""
        return self.bytes_in(item.slot)[: self._size] == self.data(item)

    async def put(self, tier: Tier, *numbers: int) -> list[Item]:
        """Have the tier store blocks, in batches that it takes."""
        return await self.store(tier, self.items(*numbers))

    async def store(self, tier: Tier, items: list[Item]) -> list[Item]:
        """Fill the slots of ``items`` and have the tier store them."""
        self.fill(items)
        for batch in batched(tier, items):
            assert list(await tier.put(batch)) == [True] * len(batch)
        return items

    async def get(self, tier: Tier, items: Sequence[Item]) -> list[bool | None]:
        """What the tier answers; fails if it delivers anything but the right bytes."""
        self.poison(items)
        found: list[bool | None] = []
        for batch in batched(tier, items):
            answers = list(await tier.get(batch))
            assert len(answers) == len(batch)
            found += answers
        assert set(map(type, found)) <= {bool, NoneType}
        for item, ok in zip(items, found, strict=True):
            assert not ok or self.right(item), f"wrong bytes for the block of place {item.place}"
        return found

    async def contains(self, tier: Tier, items: Sequence[Item]) -> list[bool]:
        """What the tier says it has; it gets no slots to look into."""
        found: list[bool] = []
        for batch in batched(tier, [item._replace(slot=NO_SLOT) for item in items]):
            found += await tier.contains(batch)
        assert len(found) == len(items)
        return found

    async def remove(self, tier: Tier, items: Sequence[Item]) -> None:
        """Have the tier forget blocks; it gets no slots."""
        for batch in batched(tier, [item._replace(slot=NO_SLOT) for item in items]):
            await tier.remove(batch)

    def close(self) -> None:
        """Check that the tier left the claims alone, and give them up."""
        assert [self._arena.claims(slot) for slot in self.slots] == [1] * self.count
        self._arena.release(self.slots)


def batched(tier: Tier, items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items in batches that the tier takes; no batch if there are none."""
    step = tier.batch_max
    return [items[start : start + step] for start in range(0, len(items), step)]


class Opener:
    """Opens a tier on the medium of this test; the one before it is closed first."""

    def __init__(self, make: MakeTier, context: TierContext) -> None:
        self._make = make
        self._context = context
        self._tier: Tier | None = None
        self.recovered: list[Item] = []
        """What the tier opened last said that it has."""

    async def __call__(self, context: TierContext | None = None) -> Tier:
        await self.close()
        tier = self._make()
        await tier.open(context or self._context)
        self._tier = tier
        self.recovered = []
        async for batch in tier.recover():
            self.recovered += batch
        return tier

    async def close(self) -> None:
        """Close the tier that is open."""
        if self._tier is not None:
            await self._tier.aclose()
            self._tier = None


class TierFixtures:
    """The fixtures of ``TierTests``, and what a subclass may declare."""

    pytestmark = pytest.mark.sim_loop

    real = False
    """Whether to run on a real loop with threads: for tiers that really wait for something."""
    survives = False
    """Whether a tier finds again what an earlier one on its medium stored."""

    async def raw_get(self, tier: Tier, item: Item) -> bytes | None:
        """Read a block behind the tier's back; override it to have ``put`` checked by it."""
        pytest.skip("there is no raw_get")

    async def raw_put(self, tier: Tier, item: Item, data: bytes) -> None:
        """Store a block behind the tier's back; override it to have ``get`` checked by it."""
        pytest.skip("there is no raw_put")

    async def raw_corrupt(self, tier: Tier, item: Item) -> None:
        """Damage a stored block on its medium; override it to have checks checked."""
        pytest.skip("there is no raw_corrupt")

    # ---- fixtures

    @pytest.fixture
    def make(self) -> MakeTier:
        """A function that makes a tier on the medium of this test; must be overridden."""
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def block_bytes(self) -> int:
        """Bytes of a block: by default they do not fill its slot."""
        return 6000

    @pytest.fixture
    def layout(self, block_bytes: int) -> Layout:
        """What the blocks are."""
        return Layout(block_tokens=16, block_bytes=block_bytes)

    @pytest.fixture
    def capacity(self, make: MakeTier) -> int:
        """How many blocks the tier is told to hold."""
        return max(8, 3 * make().batch_max)

    @pytest.fixture
    def arena(self, layout: Layout, capacity: int) -> Iterator[Arena]:
        """An arena with a slot for each block."""
        arena = Arena.create(capacity, layout.slot_bytes)
        yield arena
        free = arena.free
        arena.close()
        assert free == arena.slots, "somebody still claims a slot"

    @pytest_asyncio.fixture
    async def context(
        self, arena: Arena, layout: Layout, capacity: int
    ) -> AsyncIterator[TierContext]:
        """What the tier is opened with."""
        space = layout.namespace(salt="suite")
        if self.real:
            pool = BlockingPool(4, "kvladder-suite")
            yield TierContext(arena, layout, space, capacity, SystemClock(), pool.run)
            pool.close(timeout_s=5.0)
        else:
            clock = SimClock(asyncio.get_running_loop())
            yield TierContext(arena, layout, space, capacity, clock, inline_blocking)

    @pytest_asyncio.fixture
    async def opened(self, make: MakeTier, context: TierContext) -> AsyncIterator[Opener]:
        """Opens tiers one after the other on one medium."""
        opener = Opener(make, context)
        yield opener
        await opener.close()

    @pytest_asyncio.fixture
    async def tier(self, opened: Opener) -> Tier:
        """An opened, empty tier."""
        return await opened()

    @pytest.fixture
    def blocks(self, arena: Arena, layout: Layout, capacity: int) -> Iterator[Blocks]:
        """As many blocks as the tier has places."""
        blocks = Blocks(arena, layout, capacity)
        yield blocks
        blocks.close()

    async def settle(self) -> None:
        """Give the tier time to do what it must not do any more."""
        await asyncio.sleep(SETTLE_S if self.real else 1000.0)

    def only_if_it_survives(self, opened: Opener) -> None:
        """The rest of a test is for tiers that find what was stored; others find nothing."""
        if not self.survives:
            assert opened.recovered == []
            pytest.skip("it does not survive")
