"""Batches that several of SGLang's threads fetch at once, through arenas of any size."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.compose import open_cache
from kvladder.connectors.sglang.pieces import PageBatch, fetch_pieces, save_pieces
from kvladder.layout import Layout
from kvladder.notices import Notices
from kvladder.runtime import SystemClock
from kvladder.tiers.ladder.batched import BatchedFetch, SlotAdmission
from kvladder.tiers.ladder.loading.unreleased import Unreleased
from tests.patience import PATIENCE_S, until

PAGES = 24
BYTES = 4096
PART = 16
"""Slots of which a fetch has one in each of its parts."""


def share(manager):
    """Return how many slots a fetch or a save may hold: a quarter, as of a single rank."""
    return max(1, manager.arena.slots // 4)


def prompt(number):
    return [b"%016d%016d" % (number, page) for page in range(PAGES)]


@pytest.fixture
def opened():
    """Opens a stack of few slots, and stores prompts below them."""
    left = []

    def open_one(slots, prompts):
        level = {"name": "below", "type": "memory", "capacity": "16 MiB", "when": "commit"}
        stack = {"arena": {"size": slots * BYTES}, "tiers": [{"type": "host"}, level]}
        manager = open_cache(stack, layout=Layout(16, BYTES))
        left.append(manager)
        for number in range(prompts):
            saved = PageBatch(prompt(number), within_s=PATIENCE_S)
            for piece in save_pieces(manager, saved, share(manager)):
                for page, slot in zip(piece.pages, piece.slots, strict=True):
                    manager.arena.view(slot)[:] = bytes([number * PAGES + page]) * BYTES
        waiting = threading.Event()
        while not manager.idle():
            waiting.wait(0.005)
        return manager

    yield open_one
    for manager in left:
        manager.check()
        manager.close()


def read(manager, number, within_s=PATIENCE_S):
    """Return the first byte of each loaded page, and the number of pages that count."""
    batch = PageBatch(prompt(number), "", within_s, within_s)
    found, pieces = [], fetch_pieces(manager, batch, share(manager))
    try:
        while True:
            found += [manager.arena.view(slot)[0] for slot in next(pieces).slots]
            time.sleep(0)  # other calls may run in between
    except StopIteration as end:
        return found, end.value


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 3, 4, PART, 2 * PART, 3 * PART + 1])
@pytest.mark.parametrize("readers", [1, 6])
def test_fetches_at_once_all_end_and_have_all_pages(opened, slots, readers):
    manager = opened(slots, readers)
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: read(manager, n)}), daemon=True)
        for n in range(readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for number in range(readers):
        first = number * PAGES
        assert found[number] == (list(range(first, first + PAGES)), PAGES)


def test_a_fetch_that_gets_no_slot_ends_in_time(opened):
    manager = opened(4, 1)
    held = manager.fetch_paced(prompt(0))
    while not held.ready:
        pass
    assert read(manager, 0, within_s=0.05) == ([], 0)
    held.close()
    assert read(manager, 0)[1] == PAGES


def test_a_rank_that_stops_leaves_slots_to_others(opened):
    manager = opened(2 * PART, 2)
    still = fetch_pieces(manager, PageBatch(prompt(0), "", PATIENCE_S, PATIENCE_S), share(manager))
    assert next(still).pages
    assert read(manager, 1, within_s=5.0)[1] == PAGES
    still.close()


class Came:
    """A fetch that ended after it was waited for: the number of blocks of a prefix that arrived."""

    def __init__(self, blocks, until_over: Any = None):
        self.done = until_over is None
        self.blocks = blocks
        self.slots = list(range(blocks))
        self.sources = ["nvme"] * blocks
        self._until_over = until_over

    def wait(self):
        self._until_over()
        self.done = True

    def release(self):
        pass


class Rival:
    """Takes all free slots while a fetch finds no room for its first part."""

    def __init__(self, slots):
        self.arena = SimpleNamespace(slots=PART * 2)
        self.turns = SlotAdmission(slots, SystemClock(), Unreleased(Notices(lambda: 0.0)))
        self._slots = slots
        self._asks = threading.Event()
        self._found_none = False
        self.thread = threading.Thread(target=self._take)
        self.thread.start()

    def _take(self):
        self._asks.wait(PATIENCE_S)
        taken = 0
        while taken < self._slots:
            taken += self.turns.take(self, self._slots - taken)
        self.turns.give(self, taken)

    def fetch_paced(self, keys, *, deadline_s, salt, session):
        return BatchedFetch(
            keys,
            self.turns,
            begin=self._begin,
            knows=lambda asked: [True] * len(asked),
            clock=SystemClock(),
            deadline_s=deadline_s,
            most=self.arena.slots,
        )

    def _begin(self, keys):
        if keys[0] != prompt(0)[0] or self._found_none:
            return Came(len(keys))
        self._found_none = True
        return Came(0, self._until_asked)

    def _until_asked(self):
        self._asks.set()
        until(lambda: self in self.turns._asked_s)


def test_later_parts_give_their_slots_back_while_the_first_has_none():
    rival: Any = Rival(4)
    pieces = fetch_pieces(rival, PageBatch(prompt(0), "", PATIENCE_S, PATIENCE_S), share(rival))
    assert sum(len(piece.pages) for piece in pieces) == PAGES
    rival.thread.join(PATIENCE_S)
    assert rival.turns.take(0, 9) == 4
