"""Ranks that share one stack: each is a process, and any of them may die at any moment."""

from __future__ import annotations

import errno
import signal
import threading
from typing import Any

import pytest

from kvladder.compose import open_cache
from kvladder.connectors.listener import PAUSE_S, LocalListener
from kvladder.connectors.listener import connect as come
from kvladder.connectors.sglang import node
from kvladder.connectors.sglang.node import FLUSH_S, CacheClient, CacheServer, join
from kvladder.connectors.sglang.pieces import PageBatch
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from tests.patience import PATIENCE_S, until

SLOTS = 16
KEYS = [b"%032d" % number for number in range(6)]
OTHERS = [b"%032d" % number for number in range(6, 12)]
BATCH = PageBatch(KEYS, within_s=PATIENCE_S, deadline_s=PATIENCE_S)
RANK = """
import sys
from tests.connectors.test_sglang_node import BATCH, KEYS, OTHERS, PageBatch, opened, join

address, verb = sys.argv[1].replace("@", chr(0)), sys.argv[2]
keys = KEYS if verb == "fetch" else OTHERS
node = join(address, opened)
pieces = getattr(node, verb)(PageBatch(keys, "", BATCH.within_s, BATCH.deadline_s))
print(type(node).__name__, next(pieces).pages, flush=True)
input()
"""
OWNER = """
import sys
from tests.connectors.test_sglang_node import opened, join, stored

node = join(sys.argv[1].replace("@", chr(0)), opened)
stored(node)
print("ready", flush=True)
input()
"""


def opened():
    """A stack of one level."""
    arena = {"size": SLOTS * 4096}
    stack = {"arena": arena, "tiers": [{"type": "host"}]}
    return open_cache(stack, layout=Layout(16, 4096))


def stored(node, keys=None):
    """Store pages; each repeats one byte, derived from its number."""
    pieces = node.save(PageBatch(keys or KEYS, within_s=PATIENCE_S))
    for piece in pieces:
        for page, slot in zip(piece.pages, piece.slots, strict=True):
            node.arena.view(slot)[:] = bytes([page + 1]) * node.arena.slot_bytes


def read(node, keys=None):
    """Return the first byte of each page that arrives, and the number of pages that count."""
    found, pieces = [], node.fetch(PageBatch(keys or KEYS, "", PATIENCE_S, PATIENCE_S))
    try:
        while True:
            found += [node.arena.view(slot)[0] for slot in next(pieces).slots]
    except StopIteration as end:
        return found, end.value


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)


def until_free(node, slots):
    until(lambda: node.arena.free == slots)
    node.manager.check()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fetch", "save"])
def test_slots_of_a_dead_rank_become_free(address, rank, verb):
    owner = join(address, opened)
    try:
        stored(owner)
        process, said = rank(RANK, verb)
        assert said.startswith("CacheClient [0")
        if verb == "save":
            assert owner.arena.free < SLOTS - len(KEYS)
        killed(process)
        until_free(owner, SLOTS - len(KEYS))
        assert owner.reach(PageBatch(OTHERS)) == 0
        assert read(owner) == ([1, 2, 3, 4, 5, 6], 6)
        stored(owner, [b"%032d" % number for number in range(20, 20 + SLOTS)])  # none is pinned
    finally:
        owner.close()


def test_without_its_owner_a_rank_has_misses_and_no_wrong_pages(address, rank, caplog):
    process, said = rank(OWNER)
    assert said == "ready\n"
    guest = join(address, opened)
    try:
        assert isinstance(guest, CacheClient)
        assert read(guest) == ([1, 2, 3, 4, 5, 6], 6)
        assert (guest.reach(BATCH), guest.holding(BATCH)) == (6, [True] * 6)
        stored(guest, OTHERS)
        assert guest.reach(PageBatch(OTHERS, within_s=PATIENCE_S)) == 6
        pieces = guest.fetch(BATCH)
        piece = next(pieces)
        killed(process)
        assert guest.arena.view(piece.slots[0])[0] == 1  # still mapped, without an owner
        with pytest.raises(StopIteration) as end:
            next(pieces)
        assert end.value.value == 0  # since it may be another page by now
        assert (read(guest), guest.reach(BATCH)) == (([], 0), 0)
        assert guest.holding(BATCH) == [False] * 6
        with pytest.raises(StopIteration) as end:
            next(guest.save(PageBatch(OTHERS)))
        assert end.value.value == 0
        guest.clear()
        assert caplog.text.count("does not answer") == 1
    finally:
        guest.close()


def test_a_copy_that_fails_gives_slots_back(address):
    owner = join(address, opened)
    guest = join(address, opened)
    stored(guest)
    pieces = guest.save(PageBatch(OTHERS, within_s=PATIENCE_S))
    next(pieces)
    pieces.close()
    until_free(owner, SLOTS - len(KEYS))
    assert guest.reach(PageBatch(OTHERS, within_s=PATIENCE_S)) == 0
    assert read(guest)[1] == 6
    owner.close()
    guest.close()
    guest.close()


def test_an_owner_that_ends_waits_for_ranks_that_copy(address):
    owner = join(address, opened)
    guest = join(address, opened)
    pieces = guest.save(PageBatch(KEYS[: SLOTS // 6], within_s=PATIENCE_S))
    piece = next(pieces)
    ending = threading.Thread(target=owner.close)
    ending.start()
    assert owner.arena.claims(piece.slots[0]) == 1
    assert list(pieces) == []  # it has copied
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert owner.arena.claims(piece.slots[0]) == 0
    guest.close()


def test_a_stack_that_cannot_be_opened_is_an_error_on_every_rank(address, monkeypatch):
    coming = threading.Event()
    errors = []

    def connect(where):
        connection = come(where)
        coming.set()
        return connection

    monkeypatch.setattr(node, "connect", connect)

    def failing() -> Any:
        raise ConfigError("no room", path="arena.size")

    def one_more():
        try:
            join(address, failing)
        except ConfigError as error:
            errors.append(str(error))

    other = threading.Thread(target=one_more)

    def failing_later() -> Any:
        other.start()
        assert coming.wait(PATIENCE_S)
        failing()

    with pytest.raises(ConfigError, match="no room"):
        join(address, failing_later)
    other.join(PATIENCE_S)
    assert "no room" in errors[0]
    with pytest.raises(OSError, match="refused"):
        come(address)


def test_a_rank_that_joins_during_a_close_waits_and_opens_its_own_stack(address, monkeypatch):
    """A storage may be detached and attached at once, by ranks of different speed."""
    owner = join(address, opened)
    closing, may_close, nodes, opens = threading.Event(), threading.Event(), [], []
    manager: Any = owner.manager
    close = manager.close

    def slowly(**told):
        closing.set()
        assert may_close.wait(PATIENCE_S)
        close(**told)
        opens.append("closed")

    def open_another():
        opens.append("opened")
        return opened()

    monkeypatch.setattr(manager, "close", slowly)
    ending = threading.Thread(target=owner.close)
    ending.start()
    assert closing.wait(PATIENCE_S)
    coming = threading.Thread(target=lambda: nodes.append(join(address, open_another)))
    coming.start()
    coming.join(0.1)
    may_close.set()
    ending.join(PATIENCE_S)
    coming.join(PATIENCE_S)
    assert opens == ["closed", "opened"]
    stored(nodes[0])
    assert read(nodes[0])[1] == 6
    nodes[0].close()


def test_an_address_without_an_answer_is_an_error_in_the_end(address, monkeypatch):
    monkeypatch.setattr(node, "LEAVING_S", 0.0)
    lines = LocalListener(address, lambda _, text: pytest.fail(text))
    lines.begin(lambda line: None)
    with pytest.raises(ConfigError, match="the rank that owns kvladder's stack could not open it"):
        join(address, opened)
    lines.close()


def test_a_failure_to_accept_ranks_is_reported_now_and_then_and_may_end(address, monkeypatch):
    said: list[str] = []
    lines = LocalListener(address, lambda _, text: said.append(text))
    accept, fails = lines._listener.accept, [True]

    def failing():
        if fails:
            raise OSError(errno.EMFILE, "too many open files")
        return accept()

    monkeypatch.setattr(lines._listener, "accept", failing)
    lines.begin(lambda line: line.send(b"hello"))
    threading.Event().wait(PAUSE_S / 2)
    assert len(said) == 1
    assert "too many open files" in said[0]
    fails.clear()
    with come(address) as silent, come(address) as connection:  # a silent client delays no rank
        assert connection.recv_bytes() == silent.recv_bytes() == b"hello"
    lines.close()


def test_a_single_rank_opens_no_socket():
    owner = join(None, opened)
    assert isinstance(owner, CacheServer)
    stored(owner)
    assert read(owner)[1] == 6
    owner.close()
    assert FLUSH_S < 10
