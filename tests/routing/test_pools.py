"""Two engines on block pools publish the blocks on their devices: two feeds, one index."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from kvladder.gpu.pool.events import BELOW, PoolStored, StoredBlock
from kvladder.publishing.device import OnDevice
from kvladder.publishing.messages import Messages
from kvladder.publishing.wire import BlockStored
from kvladder.routing import Index, Match
from kvladder.testing.redisserver import free_ports
from tests.patience import PATIENCE_S
from tests.stack.caches import cache_of

pytest.importorskip("zmq")
transformers = pytest.importorskip("transformers")

from examples.transformers_engine import Engine, tiny_model  # noqa: E402
from kvladder.connectors.transformers import PooledModel  # noqa: E402
from kvladder.routing.feed import Feed  # noqa: E402

SIZE = 4
X, Y = list(range(3, 40)), [7, *range(60, 90)]


class Served:
    """An engine that publishes."""

    def __init__(self, index: Index, name: str) -> None:
        at = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        stack: dict[str, Any] = {
            "gpu": {"memory": "2 MiB"},
            "arena": {"size": "4 MiB"},
            "events": {"publish": at[0], "replay": at[1]},
            "tiers": [{"type": "host"}],
        }
        model = tiny_model().eval()
        self.pooled = PooledModel(model, stack, context=96, block_tokens=SIZE)
        self.feed = Feed(index, name, at[0], replay=at[1])

    def serve(self, prompt: list[int]) -> None:
        engine = Engine(self.pooled)
        engine.submit(prompt, 1)
        engine.run()

    def leave(self) -> None:
        """Have everything leave the device for host."""
        cache = self.pooled.cache
        for pool in cache.pools:
            pool.evict(pool.cached)
        while cache.port.busy:
            cache.wait(0.01)
            cache.poll()


def best(index: Index, prompt: list[int]) -> tuple[str, int, tuple[str, ...]] | None:
    found: list[Match] = index.match(prompt)
    return (found[0].engine, found[0].tokens, tuple(found[0].levels)) if found else None


async def comes(
    index: Index, prompt: list[int], what: tuple[str, int, tuple[str, ...]] | None
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while best(index, prompt) != what:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


@pytest.mark.real
@pytest.mark.slow
async def test_an_engine_is_found_at_whichever_level_it_holds_a_prompt() -> None:
    index = Index()
    a, b = Served(index, "a"), Served(index, "b")
    feeds = [asyncio.create_task(one.feed.run()) for one in (a, b)]
    whole = len(X) // SIZE * SIZE, len(Y) // SIZE * SIZE
    try:
        await asyncio.to_thread(a.serve, X)
        await asyncio.to_thread(b.serve, Y)
        await comes(index, X, ("a", whole[0], ("GPU",)))
        await comes(index, Y, ("b", whole[1], ("GPU",)))
        await asyncio.to_thread(a.leave)
        await comes(index, X, ("a", whole[0], ("CPU",)))
        await asyncio.to_thread(a.serve, X)
        await comes(index, X, ("a", whole[0], ("GPU",)))
        a.pooled.cache.rename("other weights")
        await comes(index, X, None)
        await asyncio.to_thread(a.serve, X)
        await comes(index, X, ("a", whole[0], ("GPU",)))
        a.pooled.cache.reset()
        await comes(index, X, None)
        assert best(index, Y) == ("b", whole[1], ("GPU",))
        assert not any(one.feed.counts["refused"] for one in (a, b))
    finally:
        for feed in feeds:
            feed.cancel()
        for one in (a, b):
            one.pooled.close()


async def test_blocks_in_tiers_are_announced_again_once_a_pool_knows_their_tokens() -> None:
    told = OnDevice(0, 2)
    async with cache_of() as cache:
        messages = Messages(cache.stack, 2, told)
        told.begin(cache.stack)
        keys = cache.keys(1, 2)
        cache.save(keys)
        [event] = messages.take()
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.token_ids) == ([*keys], [])
        blocks = tuple(StoredBlock(key, (n, n), 35) for n, key in enumerate(keys))
        told.hear(PoolStored(1, 0, BELOW, None, blocks, "salt", "adapter"))
        [event] = messages.take()
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.token_ids) == ([*keys], [0, 0, 1, 1])
        assert (event.medium, event.lora_name, event.parent_block_hash) == ("CPU", "adapter", None)
        assert event.extra_keys == [("adapter", "salt"), ("adapter",)]
        assert told.known[keys[1]].tokens == array("I", (1, 1))
        assert not messages.take()
        assert not messages.pending
