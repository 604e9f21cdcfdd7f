"""Following engines: the index gets their messages, whatever is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.compose import open_cache
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.publishing.wire import END
from kvladder.routing import Index
from kvladder.testing.redisserver import free_ports
from kvladder.testing.stacks import SimCache

zmq = pytest.importorskip("zmq")
sockets = pytest.importorskip("zmq.asyncio")

from kvladder.publishing.clients import REPLAYS_MAX  # noqa: E402
from kvladder.routing.feed import EngineEvent, Feed  # noqa: E402

pytestmark = pytest.mark.real


def stored(number: int, **more: Any) -> dict[str, Any]:
    """A block of two tokens, the first of a prompt."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number, 0],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", **more}


class Engine:
    """Publishes as vLLM does; drops messages on request."""

    def __init__(self, ports: list[int] | None = None, *, kept: int = 1000) -> None:
        self.ports = ports or free_ports(2)
        self.publish, self.replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        self.kept = kept
        self.sent: list[bytes] = []
        self.asked = 0
        self.answer_first: list[bytes] = []
        """Frames that each replay begins with."""
        self.clock = 0.0

    async def __aenter__(self) -> Engine:
        self.context = sockets.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.router = self.context.socket(zmq.ROUTER)
        for socket, address in ((self.pub, self.publish), (self.router, self.replay)):
            socket.linger = 0
            socket.bind(address)
        self.answering = asyncio.create_task(self.answer())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.answering.cancel()
        self.context.destroy(linger=0)

    async def heard(self) -> None:
        """Wait until there is a listener."""
        await self.pub.recv()

    async def tell(self, *events: dict[str, Any], lost: bool = False) -> None:
        """Publish a message; a ``lost`` one can only be replayed."""
        self.clock += 1.0
        await self.send(msgspec.msgpack.encode([self.clock, events, 0]), lost=lost)

    async def send(self, payload: bytes, *, lost: bool = False) -> None:
        number = len(self.sent)
        self.sent.append(payload)
        if not lost:
            await self.pub.send_multipart([b"", number.to_bytes(8), payload])

    async def answer(self) -> None:
        while True:
            client, empty, first = await self.router.recv_multipart()
            self.asked += 1
            if self.answer_first:
                await self.router.send_multipart([client, *self.answer_first])
            for number, payload in list(enumerate(self.sent))[-self.kept :]:
                if number >= int.from_bytes(first):
                    frames = [client, empty, b"", number.to_bytes(8), payload]
                    await self.router.send_multipart(frames)
            await self.router.send_multipart([client, empty, b"", END, b""])


@asynccontextmanager
async def following(engine: Any, index: Index, **more: Any) -> AsyncIterator[Feed]:
    more = {"replay": engine.replay, **more}
    feed = Feed(index, "a", engine.publish, **more)
    task = asyncio.create_task(feed.run())
    try:
        await feed.connected.wait()
        yield feed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - of what another task does
        await asyncio.sleep(0.01)


def held(index: Index, *numbers: int) -> list[int]:
    """Return which of these blocks the engine holds."""
    return [number for number in numbers if index.match([number, 0])]


async def test_a_feed_applies_replayed_and_new_messages() -> None:
    index = Index()
    async with Engine() as engine:
        await engine.tell(stored(1), stored(2))
        await engine.tell(removed(2))
        async with following(engine, index) as feed:
            await engine.heard()
            assert held(index, 1, 2) == [1]
            await engine.tell(stored(3))
            await until(lambda: held(index, 3))
            await engine.tell({"type": "AllBlocksCleared"}, stored(4))
            await until(lambda: held(index, 4))
            assert held(index, 1, 2, 3, 4) == [4]
            assert feed.counts == {"batches": 4}
        assert held(index, 4) == []


@pytest.mark.parametrize("replayed", [True, False])
async def test_a_gap_is_filled_by_a_replay_or_clears_the_engine(replayed: bool) -> None:
    index = Index()
    async with Engine(kept=1000 if replayed else 1) as engine, following(engine, index) as feed:
        await engine.heard()
        await engine.tell(stored(1), stored(2))
        await until(lambda: held(index, 1))
        await engine.tell(removed(1), stored(3), lost=True)
        await engine.tell(stored(4))
        await until(lambda: held(index, 4))
        assert held(index, 1, 2, 3, 4) == ([2, 3, 4] if replayed else [4])
        assert (feed.counts["gaps"], feed.counts["lost"]) == (1, 0 if replayed else 1)


async def test_without_a_replay_address_a_gap_clears_the_engine() -> None:
    index = Index()
    async with Engine() as engine:
        await engine.tell(stored(0))
        async with following(engine, index, replay=None) as feed:
            await engine.heard()
            await engine.tell(stored(1))
            await until(lambda: held(index, 1))
            assert feed.counts["lost"] == 0  # of the messages before it listened
            await engine.tell(removed(1), lost=True)
            await engine.tell(stored(2))
            await until(lambda: held(index, 2))
            assert held(index, 1, 2) == [2]


async def test_a_replay_that_never_ends_is_given_up() -> None:
    index = Index()
    async with Engine() as engine:
        engine.answering.cancel()
        async with following(engine, index, replay_s=0.05) as feed:
            await engine.heard()
            await engine.tell(stored(1))
            await until(lambda: held(index, 1))
            await engine.tell(lost=True)
            await engine.tell(stored(2))
            await until(lambda: held(index, 2))
            assert (held(index, 1, 2), feed.counts["lost"]) == ([2], 1)


async def test_an_unreachable_engine_is_forgotten_after_a_while() -> None:
    index = Index()
    async with Engine() as engine, following(engine, index, forget_s=0.05) as feed:
        await engine.tell(stored(1))
        await until(lambda: held(index, 1))
        await engine.__aexit__()
        await until(lambda: not feed.connected.is_set())
        await until(lambda: not held(index, 1))
        async with engine:  # the same one, as if the network had been away
            await feed.connected.wait()
            assert held(index, 1) == [1]


async def test_an_engine_that_reconnects_in_time_keeps_its_blocks() -> None:
    index = Index()
    async with Engine() as engine, following(engine, index) as feed:
        await engine.heard()
        await engine.tell(stored(1))
        await until(lambda: held(index, 1))
        await engine.__aexit__()
        await until(lambda: not feed.connected.is_set())
        await engine.tell(stored(2), lost=True)
        assert held(index, 1) == [1]
        async with engine:
            await feed.connected.wait()
            assert held(index, 1, 2) == [1, 2]
            assert feed.counts["restarts"] == 0


@pytest.mark.parametrize("count", [1, 5])
async def test_a_new_process_at_an_engines_address_starts_without_blocks(count: int) -> None:
    index = Index()
    async with Engine() as engine, following(engine, index) as feed:
        await engine.heard()
        await engine.tell(stored(1))
        await engine.tell(stored(2))
        await until(lambda: held(index, 2))
        await engine.__aexit__()
        await until(lambda: not feed.connected.is_set())
        other = Engine(engine.ports)
        other.clock = 100.0
        async with other:
            for number in range(count):
                await other.tell(stored(10 + number))
            await feed.connected.wait()
            await until(lambda: held(index, 10 + count - 1))
            assert held(index, 1, 2) == []
            assert feed.counts["restarts"] == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x92\x00\x91" + b"\x91" * 5000 + b"\x90",
        b"\x92\x00\x91\x82\xa4type\xabBlockStored\xaaextra_keys" + b"\x91" * 5000 + b"\x90",
    ],
)
async def test_unknown_messages_are_counted_and_the_rest_is_applied(payload: bytes) -> None:
    index = Index()
    async with Engine() as engine, following(engine, index) as feed:
        await engine.heard()
        later = {"type": "BlockMoved", "block_hashes": [1]}
        wrong = stored(2, token_ids="many")
        await engine.tell(later, wrong, stored(3, token_ids=[1]), stored(4))
        await until(lambda: held(index, 4))
        assert feed.counts["refused"] == 3
        await engine.send(payload)
        await engine.tell(stored(5))
        await until(lambda: held(index, 5))
        assert feed.counts["refused"] == 4


@pytest.mark.parametrize(
    "frames",
    [
        [b"one"],
        [b"", b"two"],
        [b"", b"\0\0\1", b"number of three bytes"],
        [b"", b"\xff" * 7 + b"\xfe", b"a negative number"],
        [b"", b"\x7f" + b"\xff" * 7, b"the highest number"],
        [b"", END, b"the end of a replay that nobody asked for"],
    ],
)  # fmt: skip
async def test_malformed_frames_are_ignored(frames: list[bytes]) -> None:
    index = Index()
    async with Engine() as engine, following(engine, index) as feed:
        await engine.heard()
        await engine.tell(stored(1))
        await until(lambda: held(index, 1))
        await engine.pub.send_multipart(frames)
        if END not in frames:  # it ends a replay in any case
            engine.answer_first = [b"", *frames]
        await engine.tell(stored(2), lost=True)
        await engine.tell(stored(3))
        await until(lambda: held(index, 3))
        assert held(index, 1, 2, 3) == [1, 2, 3]
        assert feed.counts["gaps"] == 1


@pytest.mark.slow
async def test_a_message_that_is_too_large_costs_this_engine_its_blocks() -> None:
    index = Index()
    async with (
        Engine() as engine,
        following(engine, index, message_max=10_000, replay_s=0.2, forget_s=0.1) as feed,
    ):
        await engine.heard()
        await engine.tell(stored(1))
        await until(lambda: held(index, 1))
        await engine.tell(stored(2, token_ids=[2, 0] * 10_000))
        await until(lambda: engine.asked == 2 and feed.connected.is_set())  # it was dropped
        await engine.tell(stored(3))
        await until(lambda: held(index, 3))
        assert held(index, 2) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*(field.encode_name for field in msgspec.structs.fields(EngineEvent)), "of a later version"]
)
EVENTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "else"])}
).flatmap(lambda event: st.dictionaries(NAMES, VALUES, max_size=6).map(lambda more: more | event))


@pytest.mark.slow
@given(st.lists(st.binary() | VALUES | st.tuples(st.floats(), st.lists(EVENTS, max_size=3))))
def test_no_message_ends_a_feed(messages: list[Any]) -> None:
    index = Index(blocks_max=50)
    feed = Feed(index, "a", "tcp://127.0.0.1:1")
    for number, message in enumerate(messages):
        whole = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        feed._sent_s(whole)
        feed._apply(number, whole)
        index.match([1, 2, 3, 4])
    index.check()
    assert feed.counts["batches"] == len(messages)


def test_a_salt_is_bound_into_the_first_block_of_a_prompt_alone() -> None:
    assert EngineEvent("BlockStored", cache_salt="s").extra == {0: ["s"]}
    assert EngineEvent("BlockStored", cache_salt="s", parent_block_hash=7).extra == {}


async def test_groups_of_windows_and_states_do_not_count() -> None:
    index = Index()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    async with Engine() as engine, following(engine, index):
        await engine.heard()
        whole = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        await engine.tell(stored(1, **whole), stored(2, **window), removed(1, group_idx=1))
        await until(lambda: held(index, 1))
        assert held(index, 1, 2) == [1]


@pytest.mark.parametrize(
    ("event", "asked"),
    [
        ({"extra_keys": [["salt"]]}, {"salt": "salt"}),
        ({"cache_salt": "salt"}, {"salt": "salt"}),
        ({"extra_keys": [["adapter", "salt"]], "lora_name": "adapter"},
         {"salt": "salt", "lora": "adapter"}),
        ({"extra_keys": [["adapter"]], "lora_name": "adapter"}, {"lora": "adapter"}),
        ({"extra_keys": [[["image", 0]]]}, {"extra": {0: [["image", 0]]}}),
    ],
)  # fmt: skip
async def test_salts_and_adapters_of_both_engines_are_understood(
    event: dict[str, Any], asked: dict[str, Any]
) -> None:
    index = Index()
    async with Engine() as engine, following(engine, index):
        await engine.heard()
        await engine.tell(stored(1, **event))
        await until(lambda: index.rows)
        assert [match.tokens for match in index.match([1, 0], **asked)] == [2]
        assert index.match([1, 0]) == []


async def test_levels_of_a_cache_are_kept_apart() -> None:
    index = Index()
    async with Engine() as engine, following(engine, index):
        await engine.heard()
        files = {"medium": "STORAGE", "ownership": "files"}
        redis = {"medium": "STORAGE", "ownership": "redis"}
        await engine.tell(stored(1), stored(1, **files), stored(1, **redis), removed(1, **redis))
        await until(lambda: held(index, 1))
        assert index.match([1, 0])[0].levels == {"GPU": 1}
        await engine.tell(removed(1))
        await until(lambda: index.match([1, 0])[0].levels == {"STORAGE/files": 1})


async def test_a_feed_follows_kvladders_own_publisher(tmp_path: Any) -> None:
    index, ports = Index(), free_ports(2)
    publish, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    source = {
        "arena": {"size": "64 KiB"},
        "events": {"publish": publish, "replay": replay, "buffer": 4},
        "tiers": [{"type": "host"}],
    }
    layout = Layout(block_tokens=4, block_bytes=4096)
    with await asyncio.to_thread(open_cache, source, layout=layout) as cache:
        keys: list[BlockKey] = [SimCache.keys(number)[0] for number in range(9)]
        for key in keys:  # more messages than it keeps
            cache.save([key]).commit()
        engine = type("Addresses", (), {"publish": publish, "replay": replay})()
        async with following(engine, index):
            await until(lambda: index.rows == 9)
            cache.remove(keys[:3])
            await until(lambda: index.rows == 6)
            assert index.unplaced >= 9


@pytest.mark.slow
async def test_feeds_of_one_address_take_turns_to_be_replayed() -> None:
    publish, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    source = {
        "arena": {"size": "64 KiB"},
        "events": {"publish": publish, "replay": replay},
        "tiers": [{"type": "host"}],
    }
    layout = Layout(block_tokens=4, block_bytes=4096)
    with await asyncio.to_thread(open_cache, source, layout=layout) as cache:
        cache.save(SimCache.keys(1, 2, 3)).commit()
        engine = type("Addresses", (), {"publish": publish, "replay": replay})()
        async with AsyncExitStack() as ends:
            indexes = [Index() for _ in range(REPLAYS_MAX + 2)]
            opened = [ends.enter_async_context(following(engine, index)) for index in indexes]
            feeds = await asyncio.gather(*opened)
            assert [index.rows for index in indexes] == [3] * len(indexes)
            waited = sum(feed.counts["postponed"] for feed in feeds)
            assert waited == cache.stats()["events"]["refused"] > 0
