"""Events over ZeroMQ: the bytes on the wire, gaps that are filled, addresses that cannot be had."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvladder.compose import open_cache
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from kvladder.publishing.wire import END, AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvladder.testing.redisserver import free_ports
from kvladder.testing.stacks import SimCache
from tests.patience import PATIENCE_S, until

zmq = pytest.importorskip("zmq")

from kvladder.publishing import clients, publisher  # noqa: E402

LAYOUT = Layout(block_tokens=4, block_bytes=4096)
GOLDEN = (
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0c"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a65"
    "02a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c083a474797065ac426c6f636b52"
    "656d6f766564ac626c6f636b5f686173686573910ba66d656469756da343505581a474797065b0416c6c426c6f"
    "636b73436c656172656400"
)


def test_event_bytes_match_those_of_vllm() -> None:
    stored = BlockStored([11, 12], None, [1, 2, 3, 4], 2, None, "CPU", None)
    batch = Batch(1.5, [stored, BlockRemoved([11], "CPU"), AllBlocksCleared()], 0)
    assert msgspec.msgpack.encode(batch).hex() == GOLDEN
    assert msgspec.msgpack.decode(bytes.fromhex(GOLDEN), type=Batch) == batch


def addresses() -> dict[str, str]:
    """Two that are free."""
    ports = zip(("publish", "replay"), free_ports(2), strict=True)
    return {name: f"tcp://127.0.0.1:{port}" for name, port in ports}


class Listener:
    """Follows a cache over the wire, and fills its gaps."""

    def __init__(self, events: dict[str, Any]) -> None:
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.connect(events["publish"])
        self.subscriber.subscribe("kv")
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(events["replay"])
        self.batches: dict[int, Batch] = {}

    def ask(self, first: int) -> None:
        """Have everything from this batch on sent again."""
        self.asking.send_multipart([b"", first.to_bytes(8)])
        while True:
            assert self.asking.poll(1000 * PATIENCE_S)
            empty, topic, number, payload = self.asking.recv_multipart()
            if number == END:
                assert (empty, topic, payload) == (b"", b"", b"")
                return
            assert (empty, topic) == (b"", b"kv.cache")
            self.batches[int.from_bytes(number)] = msgspec.msgpack.decode(payload, type=Batch)

    def listen(self, wait_ms: int = 20) -> None:
        """Take all messages that have arrived."""
        while self.subscriber.poll(wait_ms):
            topic, number, payload = self.subscriber.recv_multipart()
            assert topic == b"kv.cache"
            self.batches[int.from_bytes(number)] = msgspec.msgpack.decode(payload, type=Batch)

    def held(self) -> dict[str | None, set[Any]]:
        """Return the blocks of each level according to the batches."""
        found: dict[str | None, set[Any]] = {}
        for number in sorted(self.batches):
            for event in self.batches[number].events:
                if isinstance(event, AllBlocksCleared):
                    found.clear()
                elif isinstance(event, BlockStored):
                    assert (event.token_ids, event.block_size) == ([], 4)
                    found.setdefault(event.ownership, set()).update(event.block_hashes)
                else:
                    found.setdefault(event.ownership, set()).difference_update(event.block_hashes)
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.batches
            self.listen()


@pytest.fixture
def events(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**addresses(), "topic": "kv.cache", **getattr(request, "param", {})}


@pytest.fixture
def cache(events: dict[str, Any], tmp_path: Path) -> Iterator[CacheManager]:
    with open_cache(source(events, tmp_path), layout=LAYOUT) as cache:
        yield cache


def source(events: dict[str, Any], path: Path) -> dict[str, Any]:
    files = {"type": "files", "path": str(path), "capacity": "4 MiB", "when": "commit"}
    return {"arena": {"size": "64 KiB"}, "events": events, "tiers": [{"type": "host"}, files]}


@pytest.fixture
def listener(events: dict[str, Any], cache: CacheManager) -> Iterator[Listener]:
    listener = Listener(events)
    yield listener
    listener.context.destroy(linger=0)


def save(cache: CacheManager, *numbers: int) -> list[BlockKey]:
    keys = [SimCache.keys(number)[0] for number in numbers]
    cache.save(keys).commit()
    return keys


def settled(cache: CacheManager) -> None:
    until(cache.idle)


def heard(cache: CacheManager, listener: Listener, batches: int) -> None:
    """Save blocks until this many batches arrived: earlier ones than the subscription are lost."""
    for number in range(1000, 1200):
        save(cache, number)
        settled(cache)
        listener.listen()
        if number >= 1000 + 2 * batches and len(listener.batches) >= batches:
            return
    raise AssertionError("nothing is heard")


def indexes(cache: CacheManager) -> dict[str | None, set[Any]]:
    with cache.ladder.lock:
        host, files = map(set, cache.ladder.indexes.values())
        return {None: host, "files": files}


@pytest.mark.slow
def test_a_listener_follows_the_blocks_of_each_level(
    cache: CacheManager, listener: Listener
) -> None:
    first = save(cache, 1, 2, 3)
    heard(cache, listener, 1)
    listener.ask(0)
    for number in range(10, 40):  # more than the host level holds
        save(cache, number)
        settled(cache)
    cache.remove(first[:1])
    settled(cache)
    listener.until(lambda: listener.held() == indexes(cache))
    stored = [e for b in listener.batches.values() for e in b.events if isinstance(e, BlockStored)]
    assert {event.medium for event in stored} == {"CPU", "STORAGE"}
    numbers = sorted(listener.batches)
    assert numbers == list(range(len(numbers)))
    for lost in numbers[3:9]:
        del listener.batches[lost]
    listener.ask(3)
    assert listener.held() == indexes(cache)


@pytest.mark.slow
@pytest.mark.parametrize("events", [{"buffer": 2}], indirect=True)
def test_a_listener_too_late_for_a_replay_gets_everything_again(
    cache: CacheManager, listener: Listener
) -> None:
    heard(cache, listener, 3)
    listener.batches.clear()
    listener.ask(0)
    assert min(listener.batches) > 0
    listener.until(lambda: listener.held() == indexes(cache))
    clearing = [b for b in listener.batches.values() if AllBlocksCleared() in b.events]
    assert len(clearing) == 1


def test_who_is_connected_is_told_by_address(
    cache: CacheManager, listener: Listener, events: dict[str, Any]
) -> None:
    listener.ask(0)
    until(lambda: cache.stats()["events"]["clients"] == {"127.0.0.1": 2})
    assert cache.stats()["events"]["replays"] == 1
    (line,) = [
        one for one in cache.describe().splitlines() if one.startswith("clients of the feed: ")
    ]
    assert line == (
        "clients of the feed: 2, most: 2, of 127.0.0.1; at most 32 from an address, 512 from all;"
        " 4 replays a second for an address, 1000 messages waiting for a connection,"
        " 10000 batches or 64 MiB kept for replays"
    )
    listener.subscriber.close(linger=0)
    until(lambda: cache.stats()["events"]["clients"] == {"127.0.0.1": 1})


@pytest.mark.slow
def test_connections_of_one_address_keep_no_other_out(
    events: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(clients, "ALL_CONNECTIONS_MAX", 8)
    there, held = events["publish"].removeprefix("tcp://"), "127.0.0.2"
    monkeypatch.setattr(clients, "HANDSHAKE_MS", 200)
    with open_cache(source(events, tmp_path), layout=LAYOUT) as cache, zmq.Context() as context:
        flood = [context.socket(zmq.SUB) for _ in range(20)]
        for one in flood:
            one.connect(f"tcp://{held}:0;{there}")
            one.subscribe("kv")
        until(lambda: cache.stats()["events"]["turned_away"] > 32)  # they try again
        listener = Listener(events)
        listener.ask(0)
        save(cache, 1)
        listener.until(lambda: listener.held() == indexes(cache))
        listener.context.destroy(linger=0)
        told = [one.poll(1000) for one in flood]
        context.destroy(linger=0)
        until(lambda: cache.stats()["events"]["clients"] == {})
    assert told.count(zmq.POLLIN) == 4


@pytest.mark.slow
def test_a_connection_that_says_nothing_ends(
    events: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "HANDSHAKE_MS", 100)
    with open_cache(source(events, tmp_path), layout=LAYOUT) as cache:
        host, _, port = events["replay"].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.settimeout(PATIENCE_S)
            while silent.recv(100):
                continue
        until(lambda: cache.stats()["events"]["clients"] == {})


@pytest.mark.slow
def test_the_batches_that_wait_for_a_connection_are_bounded_by_their_bytes(
    cache: CacheManager, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard(cache, listener, 12)
    kept = [len(msgspec.msgpack.encode(batch)) for batch in listener.batches.values()]
    monkeypatch.setattr(publisher, "KEPT_BYTES_MAX", 4 * max(kept))
    heard(cache, listener, 24)
    settled(cache)
    (most,) = re.findall(r"(\d+) messages waiting for a connection", cache.describe())
    assert 1 <= int(most) <= 4 * max(kept) // min(kept)
    own: Any = cache._publisher
    assert own._publish.sndhwm == int(most)


@pytest.mark.slow
def test_an_address_that_asks_too_often_gets_only_the_end(
    cache: CacheManager, listener: Listener
) -> None:
    heard(cache, listener, 1)
    asked = 50
    for _ in range(asked):
        listener.asking.send_multipart([b"", bytes(8)])
    ends = batches = reasons = 0
    while ends < asked:
        assert listener.asking.poll(1000 * PATIENCE_S)
        _, topic, number, payload = listener.asking.recv_multipart()
        ends += number == END
        batches += number == bytes(8)
        if number == END:
            assert payload == b"", "it tells listeners of vLLM that this is the end"
            reasons += topic == b"refused: this address asks too often"
    told = cache.stats()["events"]
    assert reasons == told["refused"]
    assert (told["replays"], told["replays"] + told["refused"]) == (batches, asked)
    assert batches >= 4
    assert told["refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("events", [{"buffer": 2}], indirect=True)
def test_everything_is_announced_again_at_most_once_in_its_time(
    cache: CacheManager, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard(cache, listener, 4)
    listener.ask(0)

    def cleared() -> int:
        return sum(AllBlocksCleared() in batch.events for batch in listener.batches.values())

    listener.until(lambda: cleared() == 1)
    listener.ask(0)
    listener.ask(0)
    heard(cache, listener, len(listener.batches) + 2)
    assert cleared() == 1
    monkeypatch.setattr(publisher, "REPEAT_S", 0.0)
    save(cache, 1)
    listener.until(lambda: cleared() == 2)
    listener.until(lambda: listener.held() == indexes(cache))


@pytest.mark.slow
def test_the_batches_that_are_kept_are_bounded_by_their_bytes(
    cache: CacheManager, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "KEPT_BYTES_MAX", 600)
    heard(cache, listener, 12)
    settled(cache)
    listener.batches.clear()
    listener.ask(0)
    kept = [msgspec.msgpack.encode(batch) for batch in listener.batches.values()]
    assert sum(map(len, kept)) <= 600 < 12 * len(kept[0])


@pytest.mark.slow
def test_blocks_of_an_earlier_process_are_announced(events: dict[str, Any], tmp_path: Path) -> None:
    with open_cache(source(events, tmp_path), layout=LAYOUT) as cache:
        keys = save(cache, 1, 2)
        settled(cache)
    with open_cache(source(events, tmp_path), layout=LAYOUT) as cache:
        listener = Listener(events)
        try:
            while not listener.batches:
                listener.ask(0)
            assert listener.held() == {"files": set(keys)} == {"files": indexes(cache)["files"]}
        finally:
            listener.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ({"publish": "127.0.0.1:5557"}, r"events.publish: 127.0.0.1:5557: .*such as tcp://"),
        ({"publish": "tcp://127.0.0.1:0", "replay": "udp://x"}, r"events.replay: udp://x: "),
        ({"replay": "tcp://127.0.0.1:0"}, r"events.replay: .*set events.publish, too"),
        ({"publish": "tcp://127.0.0.1:0", "max": 0}, r"events.max: 0 .*expected 1 or more"),
    ],
)
def test_wrong_addresses_are_refused(events: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        open_cache(source(events, tmp_path), layout=LAYOUT)


def test_an_address_that_is_taken_and_a_missing_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"events.publish: {address}: Address already in use"):
            open_cache(source({"publish": address}, tmp_path), layout=LAYOUT)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvladder.publishing.publisher", raising=False)
    with pytest.raises(ConfigError, match=r"events.publish: needs pyzmq.*kvladder\[events\]"):
        open_cache(source({"publish": "tcp://127.0.0.1:0"}, tmp_path), layout=LAYOUT)
