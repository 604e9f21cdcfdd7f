"""Events of caches as they are on the wire: one event for each run of blocks."""

from __future__ import annotations

from typing import Any

from kvladder.gpu.pool.events import BELOW, PoolStored, StoredBlock
from kvladder.keys import BlockKey
from kvladder.publishing.device import OnDevice
from kvladder.publishing.messages import Messages
from kvladder.publishing.wire import BlockStored
from kvladder.testing.stacks import SimCache
from tests.stack.caches import cache_of

ONE, OTHER = SimCache.keys(1, 2), SimCache.keys(3, 4)


def told_of(keys: list[BlockKey], first: int, parent: BlockKey | None = None) -> PoolStored:
    blocks = tuple(StoredBlock(key, (first + n,) * 2, 35) for n, key in enumerate(keys))
    return PoolStored(1, 0, BELOW, parent, blocks, "", "")


async def test_each_run_of_blocks_that_follow_each_other_has_an_event() -> None:
    told = OnDevice(0, 2)
    async with cache_of() as cache:
        messages = Messages(cache.stack, 2, told)
        told.begin(cache.stack)
        told.hear(told_of(ONE, 1))
        told.hear(told_of(OTHER[:1], 3))
        told.hear(told_of(OTHER[1:], 4, OTHER[0]))
        cache.save([*ONE, *OTHER, *SimCache.keys(9)])
        events: list[Any] = messages.take()
        assert all(isinstance(event, BlockStored) for event in events)
        assert [(one.block_hashes, one.token_ids, one.parent_block_hash) for one in events] == [
            ([*ONE], [1, 1, 2, 2], None),
            ([*OTHER], [3, 3, 4, 4], None),
            ([*SimCache.keys(9)], [], None),
        ]
