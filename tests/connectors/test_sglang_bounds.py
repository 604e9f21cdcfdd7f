"""Bounds of one process at the socket of SGLang's ranks: it may be many, loud, slow or wrong."""

from __future__ import annotations

import math
import os
import threading
import time
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec
import pytest

from kvladder.compose import open_cache
from kvladder.connectors import listener
from kvladder.connectors.listener import PLACES_MAX, PROCESS_PLACES_MAX
from kvladder.connectors.sglang import node
from kvladder.connectors.sglang.node import CacheServer, Joining, Over, join
from kvladder.connectors.sglang.options import CALL_S, DEADLINE_MAX
from kvladder.connectors.sglang.pieces import PAGES_MAX, PageBatch, PageRun
from kvladder.export import bounds
from kvladder.layout import Layout
from kvladder.publishing.exposition import samples
from tests.patience import PATIENCE_S, until

SLOTS = 96
SHARE = SLOTS // 6
"""A third of half of them: for the owner, another rank, and all further processes."""
KEYS = [b"%032d" % number for number in range(SLOTS // 2)]
OTHERS = [b"%032d" % number for number in range(1000, 1000 + SLOTS // 2)]
MANY = 40
"""Connections that a process tries to have."""
STRANGER = """
import sys
from tests.connectors import test_sglang_bounds as them

getattr(them, sys.argv[2])(sys.argv[1].replace("@", chr(0)))
"""
answer = msgspec.msgpack.Decoder(PageRun | Over).decode
encode = msgspec.msgpack.encode


def opened():
    """A stack of one level."""
    stack = {"arena": {"size": SLOTS * 4096}, "tiers": [{"type": "host"}]}
    return open_cache(stack, layout=Layout(16, 4096))


@pytest.fixture
def owner(address):
    found = join(address, opened)
    assert isinstance(found, CacheServer)
    yield found
    found.close()


@pytest.fixture
def guest(owner, address):
    found = join(address, opened)
    yield found
    found.close()


def batch(keys: list[bytes], **told: Any) -> PageBatch:
    return PageBatch(keys, within_s=PATIENCE_S, deadline_s=PATIENCE_S, **told)


def moved(node: Any, verb: str, keys: list[bytes]) -> int:
    """Fetch or save pages and return how many count."""
    pieces = getattr(node, verb)(batch(keys))
    try:
        while True:
            next(pieces)
    except StopIteration as end:
        return int(end.value)


def stats(owner: CacheServer) -> dict[str, Any]:
    return owner.manager.stats()["ranks"]


# ---- what strangers do, in processes of their own


def joined(address: str, verb: Any) -> Connection:
    """Connect as a rank does; raise EOFError or OSError if there is no place."""
    connection = Client(address, "AF_UNIX")
    connection.send_bytes(encode(Joining(verb)))
    connection.recv_bytes()
    return connection


def crowd(address: str, verb: Any = "reach") -> list[Connection]:
    """Return the connections that find a place, of many."""
    found = []
    for _ in range(MANY):
        try:
            found.append(joined(address, verb))
        except (EOFError, OSError):
            continue
    return found


def many(address: str) -> None:
    found = crowd(address)
    print(len(found), flush=True)
    input()


def silent(address: str) -> None:
    found = [Client(address, "AF_UNIX") for _ in range(MANY)]
    print(len(found), flush=True)
    input()


def fetching(address: str) -> None:
    """Ask for pages over all connections, take the first piece, and never continue."""
    first, *others = crowd(address, "fetch")
    first.send_bytes(encode(batch(KEYS)))
    print(getattr(answer(first.recv_bytes()), "pages", []), flush=True)
    for one in others:
        one.send_bytes(encode(batch(KEYS)))
    input()


def saving(address: str) -> None:
    """Save pages over all connections, take the first piece, and never continue."""
    first, *others = crowd(address, "save")
    start = 1000 * os.getpid()
    first.send_bytes(encode(batch([b"%032d" % (start + page) for page in range(SLOTS)])))
    print(len(answer(first.recv_bytes()).slots), flush=True)
    for number, one in enumerate(others, 2):
        keys = [b"%032d" % (start + SLOTS * number + page) for page in range(SLOTS)]
        one.send_bytes(encode(batch(keys)))
    input()


def loud(address: str) -> None:
    """Ask as fast as answers come, over all connections, and never end."""
    found = crowd(address)

    def ask(one: Connection) -> None:
        while True:
            one.send_bytes(encode(batch(OTHERS)))
            one.recv_bytes()

    for one in found:
        threading.Thread(target=ask, args=[one], daemon=True).start()
    print("begun", flush=True)
    input()


# ---- the bounds


@pytest.mark.slow
def test_a_process_has_its_places_and_keeps_no_other_out(owner, rank, address):
    process, said = rank(STRANGER, "many")
    assert int(said) == PROCESS_PLACES_MAX
    name = f"process {process.pid}"
    assert stats(owner)["clients"] == {name: PROCESS_PLACES_MAX}
    assert stats(owner)["refused"] == MANY - PROCESS_PLACES_MAX
    guest = join(address, opened)
    assert moved(guest, "save", KEYS) == moved(guest, "fetch", KEYS) == len(KEYS)
    guest.close()
    process.kill()
    until(lambda: stats(owner)["clients"] == {})


@pytest.mark.slow
def test_a_rank_takes_the_place_of_a_connection_that_says_nothing(
    owner, rank, address, monkeypatch
):
    monkeypatch.setattr(listener, "PLACES_MAX", PROCESS_PLACES_MAX)
    rank(STRANGER, "silent")
    until(lambda: sum(stats(owner)["clients"].values()) == PROCESS_PLACES_MAX)
    guest = join(address, opened)
    assert moved(guest, "save", KEYS) == len(KEYS)
    assert stats(owner)["displaced"] == 2  # a place for each kind of request
    guest.close()


@pytest.mark.slow
def test_no_connection_that_has_sent_something_gives_its_place_up(
    owner, rank, address, monkeypatch
):
    monkeypatch.setattr(listener, "PLACES_MAX", PROCESS_PLACES_MAX)
    rank(STRANGER, "many")
    refused = stats(owner)["refused"]
    with pytest.raises((EOFError, OSError)):
        joined(address, "reach")
    assert (stats(owner)["displaced"], stats(owner)["refused"]) == (0, refused + 1)


def test_a_connection_that_says_nothing_ends(owner, address, monkeypatch):
    monkeypatch.setattr(listener, "TIMEOUT_S", 0.1)
    with Client(address, "AF_UNIX") as connection:
        assert connection.poll(PATIENCE_S)
        with pytest.raises(EOFError):
            connection.recv_bytes()
    until(lambda: stats(owner)["clients"] == {})


def test_a_message_that_does_not_come_whole_ends_its_connection(address, monkeypatch):
    monkeypatch.setattr(listener, "TIMEOUT_S", 0.1)
    found = join(address, opened)
    with Client(address, "AF_UNIX") as connection:
        os.write(connection.fileno(), b"\0\0")
        assert connection.poll(PATIENCE_S)
        with pytest.raises(EOFError):
            connection.recv_bytes()
    found.close()


@pytest.mark.slow
def test_a_process_that_never_continues_holds_its_share_of_the_slots(owner, guest, rank):
    assert moved(guest, "save", KEYS) == len(KEYS)
    process, said = rank(STRANGER, "fetching")
    assert said.startswith("[0")
    name = f"process {process.pid}"
    held = stats(owner)["client_slots"]["fetch"]
    assert held == {name: held[name]}
    assert 0 < held[name] <= SHARE
    until(lambda: stats(owner)["client_requests"][name] == PROCESS_PLACES_MAX)
    for _ in range(20):
        assert moved(guest, "fetch", KEYS) == len(KEYS)
    process.kill()
    until(lambda: stats(owner)["client_slots"] == {})
    owner.manager.check()


def test_a_rank_that_reads_for_too_long_loses_its_slots_and_its_pages_do_not_count(
    owner, guest, monkeypatch
):
    assert moved(guest, "save", KEYS) == len(KEYS)
    monkeypatch.setattr(node, "HELD_S", 0.1)
    pieces = guest.fetch(batch(KEYS))
    next(pieces)
    until(lambda: stats(owner)["clients_lost"] == 1)
    until(lambda: moved(owner, "fetch", KEYS) == len(KEYS))
    assert stats(owner)["client_slots"] == {}
    with pytest.raises(StopIteration) as end:
        next(pieces)
    assert end.value.value == 0
    owner.manager.check()


@pytest.mark.slow
def test_a_process_that_never_ends_its_saves_holds_its_share_of_the_slots(
    owner, guest, rank, monkeypatch
):
    monkeypatch.setattr(node, "HELD_S", 0.01)
    process, said = rank(STRANGER, "saving")
    assert int(said) == SHARE
    name = f"process {process.pid}"
    for _ in range(5):
        assert moved(guest, "save", KEYS) == moved(guest, "fetch", KEYS) == len(KEYS)
        guest.clear()
    threading.Event().wait(0.2)  # far more than ``HELD_S``
    assert stats(owner)["client_slots"]["save"] == {name: SHARE}  # it may still write
    assert stats(owner)["clients_lost"] == 0
    process.kill()
    until(lambda: stats(owner)["client_slots"] == {})
    until(lambda: owner.arena.free == SLOTS)


def test_all_processes_beyond_the_ranks_hold_one_share_together(owner, guest, rank):
    assert moved(guest, "save", KEYS) == len(KEYS)
    strangers = [rank(STRANGER, "fetching") for _ in range(3)]
    assert [said.startswith("[0") for _, said in strangers] == [True, False, False]
    held = stats(owner)["client_slots"]["fetch"]
    assert sum(held.values()) <= SHARE
    for _ in range(20):
        assert moved(guest, "fetch", KEYS) == len(KEYS)


def test_a_request_waits_for_an_earlier_one_of_its_kind_and_not_for_ever(
    owner, guest, address, monkeypatch
):
    monkeypatch.setattr(node, "CALL_S", 0.1)
    assert moved(owner, "save", KEYS) == len(KEYS)
    first, second = joined(address, "fetch"), joined(address, "fetch")
    forever = encode(PageBatch(KEYS, within_s=math.inf, deadline_s=math.inf))
    first.send_bytes(forever)
    piece = answer(first.recv_bytes())
    second.send_bytes(forever)
    assert answer(second.recv_bytes()) == Over(0)
    assert isinstance(piece, PageRun)
    assert guest.reach(batch(KEYS)) == len(KEYS)
    first.close()
    second.close()


@pytest.mark.slow
def test_a_process_that_sends_too_much_waits_and_others_do_not(owner, guest, rank, monkeypatch):
    monkeypatch.setattr(bounds, "MESSAGES_MAX", 100)
    process, _ = rank(STRANGER, "loud")
    name = f"process {process.pid}"
    until(lambda: stats(owner)["client_messages"].get(name, 0) > 100)
    begun_s = time.monotonic()
    most = 0
    for _ in range(30):
        assert guest.reach(batch(OTHERS)) == 0
        most = max(most, stats(owner)["client_messages"].get(name, 0))
        time.sleep(0.05)
    assert time.monotonic() - begun_s < PATIENCE_S
    assert most <= 100 + PROCESS_PLACES_MAX
    assert stats(owner)["clients"][name] == PROCESS_PLACES_MAX  # it only waits


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x92\x90\xa1\xff",
        encode([["short"]]),
        encode([[b"short"]]),
        encode([[bytes(32)] * (PAGES_MAX + 1)]),
        encode([[bytes(32)], "", 0.0, 0.0, 101]),
        encode([[bytes(32)], "", 0.0, 0.0, None, -1]),
    ],
)
def test_a_process_that_sends_an_invalid_message_is_disconnected(
    owner, guest, address, message, caplog
):
    connection = joined(address, "save")
    connection.send_bytes(message)
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()
    until(lambda: stats(owner)["messages_refused"] == 1)
    assert "sent an invalid message" in caplog.text
    assert moved(guest, "save", KEYS) == len(KEYS)
    with pytest.raises((EOFError, OSError)):
        joined(address, "none")
    until(lambda: stats(owner)["messages_refused"] == 2)
    assert caplog.text.count("sent an invalid message") == 1  # once a minute


def test_a_message_that_claims_to_be_huge_is_not_read(owner, address, monkeypatch):
    monkeypatch.setattr(listener, "TIMEOUT_S", 2 * PATIENCE_S)
    with Client(address, "AF_UNIX") as connection:
        os.write(connection.fileno(), (node.MESSAGE_BYTES_MAX + 1).to_bytes(4))
        assert connection.poll(PATIENCE_S)  # it does not wait for the rest
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()


def test_the_times_of_a_batch_are_bounded(owner):
    for told in (1e9, math.inf):
        found = owner._bounded(PageBatch(KEYS, within_s=told, deadline_s=told))
        assert (found.within_s, found.deadline_s) == (CALL_S, float(DEADLINE_MAX))
    found = owner._bounded(PageBatch(KEYS, within_s=math.nan, deadline_s=-math.inf))
    assert (found.within_s, found.deadline_s) == (0.0, 0.0)


@pytest.mark.slow
def test_the_end_waits_for_all_processes_together(address, rank, monkeypatch):
    monkeypatch.setattr(listener, "JOIN_S", 1.0)
    monkeypatch.setattr(node, "CALL_S", PATIENCE_S)
    owner = join(address, opened)
    assert isinstance(owner, CacheServer)
    assert owner._lines is not None
    strangers = [rank(STRANGER, "saving")[0] for _ in range(2)]
    begun_s = time.monotonic()
    owner._lines.end()
    assert time.monotonic() - begun_s < PROCESS_PLACES_MAX  # fewer seconds than threads
    for process in strangers:
        process.kill()
    until(lambda: stats(owner)["clients"] == {})
    assert owner.arena.free == SLOTS
    owner.close()


@pytest.mark.slow
def test_the_bounds_and_who_uses_most_are_described_and_exposed(owner, guest, rank):
    process, _ = rank(STRANGER, "saving")
    name = f"process {process.pid}"
    until(lambda: stats(owner)["client_requests"][name] == PROCESS_PLACES_MAX)
    text = owner.manager.describe()
    places = PROCESS_PLACES_MAX + 1
    assert f"ranks' connections: {places} of {PLACES_MAX}\n" in text
    for line in (
        f"most connections: {PROCESS_PLACES_MAX}, of {name}; at most 10 a process",
        f"most requests: {PROCESS_PLACES_MAX}, of {name}; at most 1 a connection",
        "at most 4096 a process, which then waits",
        "a connection sends its first message within 10 s",
        f"most slots of fetches: 0; at most {SHARE} a rank, and together by other",
        f"most slots of saves: {SHARE}, of {name}; at most {SHARE} a rank, and together by",
        "a message has at most 1024 KiB",
    ):
        assert line in text
    found = {(one.metric.name, one.labels): one.value for one in samples(owner.manager.stats())}
    assert found["kvladder_ranks_client_slots", ("save", name)] == SHARE
    assert found["kvladder_ranks_clients", (name,)] == PROCESS_PLACES_MAX
    assert found["kvladder_ranks_client_requests", (name,)] == PROCESS_PLACES_MAX
    assert found["kvladder_ranks_refused_clients_total", ()] == MANY - PROCESS_PLACES_MAX
