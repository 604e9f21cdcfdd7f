"""The calls of an exporter's client, without the network between the two."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvladder.arena import Slot
from kvladder.export.cache import CacheOffers, EngineOffers
from kvladder.export.offers import HAVE, LATER, Offers
from kvladder.export.sealed import server_layout
from kvladder.export.server import ServerOffers
from kvladder.keys import BlockKey, Namespace
from kvladder.testing.fakes import FakeTier
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.label import NO_FACTS, Facts, Labels

SIZE = 4000
"""The size of a client's whole block; with label and length it exceeds a page."""
SERVER = server_layout(SIZE)
SPACE = LAYOUT.namespace()


def keys_of(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def payload(key: bytes, length: int = SIZE) -> bytes:
    return (hashlib.sha512(key).digest() * (length // 64 + 1))[:length]


@dataclass
class Client:
    """One session over the namespace ``space``."""

    offers: Offers
    session: int = 1
    space: bytes = SPACE
    op: int = 0
    name: str = "a client"
    pieces: int = 0
    """The number of pieces of all gets."""

    async def hello(self, block_bytes: int = SIZE) -> str:
        return await self.offers.hello(self.session, self.space, block_bytes, self.name)

    def label(self, key: bytes, data: bytes, facts: Facts = NO_FACTS, **said: Any) -> bytes:
        labels = Labels(Namespace(self.space), len(data), verify=said.get("verify", True))
        return labels.pack(BlockKey(key), data, facts)

    async def granted(
        self, keys: Sequence[bytes], facts: Facts = NO_FACTS, *, length: int = SIZE
    ) -> list[int]:
        """Ask for slots; ``op`` becomes the operation."""
        self.op += 1
        lengths, said = [length] * len(keys), [facts] * len(keys)
        return [*await self.offers.grant(self.session, self.op, keys, lengths, said)]

    def write(self, slot: int, data: bytes) -> None:
        self.offers.arena.view(Slot(slot))[: len(data)] = data

    async def put(
        self, keys: Sequence[bytes], facts: Facts = NO_FACTS, *, length: int = SIZE
    ) -> list[bool]:
        """Put blocks as a client does, in as many pieces as needed; return which are stored."""
        slots = await self.granted(keys, facts, length=length)
        labels = [b""] * len(keys)
        for at, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            if slot >= 0:
                self.write(slot, payload(key, length))
                labels[at] = self.label(key, payload(key, length), facts)
        done = await self.offers.commit(self.session, self.op, labels)
        stored = [ok or slot == HAVE for ok, slot in zip(done, slots, strict=True)]
        if later := [at for at, slot in enumerate(slots) if slot == LATER]:
            again = await self.put([keys[at] for at in later], facts, length=length)
            for at, ok in zip(later, again, strict=True):
                stored[at] = ok
        return stored

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the bytes of these blocks piece by piece, with checked labels."""
        found: list[bytes | None] = []
        while len(found) < len(keys):
            found += await self._piece(keys[len(found) :])
            self.pieces += 1
        return found

    async def _piece(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.op += 1
        found: list[bytes | None] = []
        labels = Labels(Namespace(self.space), SIZE, verify=True)
        pinned = await self.offers.pin(self.session, self.op, keys)
        assert pinned
        for key, one in zip(keys, pinned, strict=False):
            if one is None:
                found.append(None)
                continue
            view = self.offers.arena.view(one.slot)
            outcome, _ = labels.check(BlockKey(key), one.label, view[: one.length])
            assert outcome == 0 or one.length < SIZE
            found.append(bytes(view[: one.length]))
        await self.offers.release(self.session, self.op)
        return found

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [*map(bool, await self.offers.have(self.session, keys))]


@asynccontextmanager
async def server(
    *levels: LevelSpec, slots: int = 16, **options: Any
) -> AsyncIterator[tuple[SimCache, ServerOffers]]:
    """Open a cache without an engine and its offers; assert that nothing is left at the end."""
    cache = await SimCache.open(*levels, slots=slots, layout=SERVER, **options)
    offers = ServerOffers(cache.manager, inline_blocking)
    try:
        yield cache, offers
        cache.manager.check()
    finally:
        await closed(cache, offers, levels)


@asynccontextmanager
async def engine(
    *levels: LevelSpec, names: list[str] | None = None, slots: int = 16
) -> AsyncIterator[tuple[SimCache, EngineOffers]]:
    """Open an engine's cache and its offers."""
    cache = await SimCache.open(*levels, slots=slots)
    offers = EngineOffers(cache.manager, inline_blocking, levels=names)
    try:
        yield cache, offers
        cache.manager.check()
    finally:
        await closed(cache, offers, levels)


async def closed(cache: SimCache, offers: CacheOffers, levels: Sequence[LevelSpec]) -> None:
    for level in levels:
        if isinstance(level.tier, FakeTier):
            level.tier.heal()
    await offers.all_gone()
    await cache.aclose()
    for level in levels:
        if isinstance(level.tier, FakeTier):
            assert level.tier.violations == []
