"""vLLM's KV events announce the blocks of every level under vLLM's hashes to listeners."""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import warnings
import weakref
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvladder.config.stack import load_config
from kvladder.connectors.vllm.groups import VllmGroups, groups_of
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.testing.redisserver import free_ports
from tests.connectors.scripted import TOKENS, Engine, Request, configs, kv_spec
from tests.patience import PATIENCE_S, until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds

SOURCE = {  # room for eight blocks on the host, and more below
    "arena": {"size": "32 KiB"},
    "tiers": [
        {"type": "host"},
        {"type": "memory", "name": "cold", "capacity": "256 KiB", "when": "commit"},
    ],
}
PLACES = {("CPU", None): "host", ("CPU", "cold"): "cold"}


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvladder.connectors.vllm")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that publishes events, with whole hashes."""
    from kvladder.connectors.vllm.reports.events import KVEvents

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    engine = Engine(SOURCE)
    half = engine.half
    manager, (_, config) = half.connector.manager, configs()
    half.events = KVEvents(manager, load_config(SOURCE), groups_of(config, model="tiny"), config)
    yield engine
    engine.close()


def held(engine: Engine) -> dict[str, set[bytes]]:
    ladder = engine.half.connector.manager.ladder
    with ladder.lock:
        return {name: set[bytes](index) for name, index in ladder.indexes.items()}


def prompt(seed: int, blocks: int = 3) -> list[int]:
    return Random(seed).choices(range(50), k=blocks * TOKENS + 1)


def serve(engine: Engine, tokens: Sequence[int]) -> Request:
    request = engine.add(tokens)
    engine.run()
    until(engine.half.connector.manager.idle)
    return request


def taken(engine: Engine) -> list[Any]:
    """Return all pending events."""
    events = engine.half.events
    found = [*events.take()]
    while events.pending:
        found += events.take()
    return found


def replay(events: Sequence[Any], known: dict[str, set[bytes]] | None = None) -> Any:
    """Return the listener's index after these events."""
    known = {"host": set(), "cold": set()} if known is None else known
    for event in events:
        level = known[PLACES[event.medium, event.ownership]]
        hashes = set(event.block_hashes)
        if type(event).__name__ == "BlockStored":
            assert not level & hashes
            level |= hashes
        else:
            assert level >= hashes
            level -= hashes
    return known


def test_events_of_each_level_carry_tokens_and_parents(engine: Engine) -> None:
    known, events = replay(taken(engine)), []
    for seed in range(6):
        request = serve(engine, prompt(seed))
        events = taken(engine)
        replay(events, known)
        assert known == held(engine)
        stored = [event for event in events if type(event).__name__ == "BlockStored"]
        assert {event.ownership for event in stored} == {None, "cold"}
        for event in stored:
            chain = [None, *request.block_hashes]
            start = chain.index(event.parent_block_hash)
            assert event.block_hashes == chain[start + 1 : start + 1 + len(event.block_hashes)]
            end = (start + len(event.block_hashes)) * TOKENS
            assert event.token_ids == request.tokens[start * TOKENS : end]
            assert (event.block_size, event.group_idx) == (TOKENS, 0)
            assert (event.lora_id, event.lora_name) == (None, None)
    assert any(type(event).__name__ == "BlockRemoved" for event in events), "the host level is full"
    serve(engine, [*prompt(0), 1])
    replay(taken(engine), known)
    engine.half.reset()
    replay(taken(engine), known)
    assert known == {"host": set(), "cold": set()}


def test_blocks_of_no_known_request_are_announced_by_hash_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvladder.connectors.vllm.reports import events as vllm_events

    serve(engine, prompt(1))
    first = taken(engine)
    assert all(event.token_ids for event in first)
    monkeypatch.setattr(vllm_events, "KNOWN_MAX", 0)
    request = serve(engine, prompt(2))
    events = [event for event in taken(engine) if type(event).__name__ == "BlockStored"]
    assert {tuple(event.block_hashes) for event in events} <= {
        tuple(request.block_hashes[a:b]) for a in range(4) for b in range(a, 4)
    }
    for event in events:
        assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)


def test_blocks_of_an_adapter_keep_one_name_in_all_events(engine: Engine) -> None:
    from kvladder.connectors.vllm.reports.events import KVEvents

    taken(engine)
    events = engine.half.events
    assert isinstance(events, KVEvents)
    request = Request("r", prompt(3))
    request.lora_request = SimpleNamespace(
        adapter_id=7, name="mine", lora_name="mine", lora_path="/a"
    )
    request.cache_salt = "whose"
    keys = [BlockKey(hashlib.sha256(b"adapter" + one).digest()) for one in request.block_hashes]
    manager = engine.half.connector.manager
    events.describe(request, 0, 0, keys)
    save = manager.save(keys)
    save.commit()
    until(manager.idle)
    stored = events.take()
    assert {(event.lora_id, event.lora_name) for event in stored} == {(7, "mine")}
    assert stored[0].extra_keys == [("mine", "whose"), ("mine",), ("mine",)]
    known = replay(stored)
    assert known == {name: set(request.block_hashes) for name in ("host", "cold")}
    request.block_hashes.clear()  # and whatever becomes of the request
    manager.remove(keys)
    assert replay(taken(engine), known) == {"host": set(), "cold": set()}
    assert not events._names


def become(engine: Engine, content: bytes) -> None:
    """Other weights are in memory, which the next request finds out."""
    engine.loaded_models[0].load(content)
    serve(engine, prompt(9, blocks=1))


def test_events_use_new_names_after_a_change_of_weights(engine: Engine) -> None:
    """A listener finds under vLLM's hashes only blocks that this engine can serve now."""
    known = replay(taken(engine))
    one = set(serve(engine, prompt(1)).block_hashes)
    replay(taken(engine), known)
    assert known == {"host": one, "cold": one}
    become(engine, b"new")
    two = set(serve(engine, prompt(2)).block_hashes)
    replay(taken(engine), known)
    assert [len(known[name]) for name in known] == [len(keys) for keys in held(engine).values()]
    assert known["cold"] >= two
    assert not known["cold"] & one
    become(engine, b"first")
    replay(taken(engine), known)
    assert known["cold"] >= one
    assert not known["cold"] & two
    serve(engine, [*prompt(2), 1])
    replay(taken(engine), known)
    assert known["cold"] >= one | two
    engine.half.reset()
    replay(taken(engine), known)
    assert known == {"host": set(), "cold": set()}


def test_groups_have_their_own_names_and_sizes() -> None:
    from kvladder.connectors.vllm.reports.events import kinds_of

    _, config = configs()
    window = kv_spec("SlidingWindowSpec", block_size=2 * TOKENS, sliding_window=9)
    large = SimpleNamespace(layer_names=["l2"], kv_cache_spec=window)
    config.kv_cache_groups = [*config.kv_cache_groups, large]
    kinds = kinds_of(groups_of(config, model="tiny"), config)
    assert [(kind.tokens, kind.hashes) for kind in kinds] == [(TOKENS, 1), (2 * TOKENS, 2)]
    request = Request("r", prompt(1, blocks=4))
    assert kinds[1].name(request.block_hashes, 0) == request.block_hashes[1]
    assert kinds[1].name(request.block_hashes, 1) == request.block_hashes[3]
    assert kinds[1].name(request.block_hashes, -1) is None


def test_ended_requests_are_not_kept_alive_by_their_described_blocks(
    engine: Engine,
) -> None:
    events = engine.half.events
    common = prompt(1)
    requests = [Request(f"r{n}", [*common, *prompt(n)]) for n in range(20)]
    over = [weakref.ref(request) for request in requests]
    for request in requests:
        events.describe(request, 0, 0, [BlockKey(one) for one in request.block_hashes])
    del request, requests
    gc.collect()
    assert not any(ref() for ref in over)


def test_events_are_refused_without_an_event_buffer(engine: Engine) -> None:
    from kvladder.connectors.vllm.reports.events import KVEvents, enabled

    config = load_config({**SOURCE, "events": {"max": 0}})
    with pytest.raises(ConfigError, match=r"events.max: 0 .*expected 1 or more"):
        KVEvents(engine.half.connector.manager, config, VllmGroups(), configs()[1])
    assert not enabled(SimpleNamespace())
    assert not enabled(SimpleNamespace(kv_events_config=None))
    off = SimpleNamespace(enable_kv_cache_events=False)
    assert not enabled(SimpleNamespace(kv_events_config=off))


@pytest.mark.vllm  # its context of sockets stays
def test_a_subscriber_of_vllms_publisher_fills_its_gaps(engine: Engine) -> None:
    import zmq
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    port, other = free_ports(2)
    replays = f"tcp://127.0.0.1:{other}"
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.bind(f"tcp://127.0.0.1:{port}")  # vLLM connects where there is no wildcard
    subscriber.subscribe("kv")
    publisher = ZmqEventPublisher(
        0, endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=replays, topic="kv"
    )
    asking = context.socket(zmq.DEALER)  # one request has many answers
    asking.connect(replays)
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    try:
        heard: dict[int, Any] = {}
        while not subscriber.poll(20):  # until they have found each other
            publisher.publish(KVEventBatch(ts=0.0, events=[]))
        for seed in range(5):
            serve(engine, prompt(seed))
            publisher.publish(KVEventBatch(ts=1.0, events=taken(engine)))
        batches = 0
        while batches < 5:
            assert subscriber.poll(int(1000 * PATIENCE_S))
            topic, sequence, payload = subscriber.recv_multipart()
            heard[int.from_bytes(sequence)] = payload
            _time_s, found, rank = msgspec.msgpack.decode(payload)
            assert (topic, rank) == (b"kv", 0)
            assert {event["type"] for event in found} <= {"BlockStored", "BlockRemoved"}
            batches += bool(found)
        last = max(heard)
        for lost in (last - 3, last - 2, last - 1):
            del heard[lost]
        asking.send_multipart([b"", (last - 3).to_bytes(8)])
        while True:
            assert asking.poll(int(1000 * PATIENCE_S))
            _empty, _topic, sequence, payload = asking.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                break
            heard[int.from_bytes(sequence)] = payload
        assert len(heard) == last - min(heard) + 1
        events = [event for number in sorted(heard) for event in decode(heard[number]).events]
        assert replay(events) == held(engine)
    finally:
        asking.close(0)
        subscriber.close(0)
        publisher.shutdown()
        context.term()
