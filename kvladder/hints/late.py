"""Actions about finished requests, whose blocks may still have to be saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from threading import Lock

from kvladder.hints.fetches import WAITING_MAX
from kvladder.hints.moves import do_late
from kvladder.hints.protocol import Order
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager

RETRY_MIN_S, RETRY_MAX_S = 0.01, 1.0
"""Time between two attempts about a finished request's blocks: doubled after each."""
SAVED_S = 30.0
"""Time during which an action about a finished request waits for the saves of its blocks."""


@dataclass(slots=True)
class Late:
    """An action about blocks of a finished request, some of them not saved yet."""

    order: Order
    keys: Sequence[BlockKey]
    """Those for which it is not done yet."""
    salt: bytes
    until_s: float
    """Loop time at which it is given up."""
    again_s: float
    """Loop time of the next attempt."""
    since_s: float
    """Loop time at which the request finished."""
    wait_s: float = RETRY_MIN_S


class LateActions:
    """Does orders about blocks as soon as these are saved. Any thread may call it."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._lock = Lock()
        self._waiting: deque[Late] = deque(maxlen=WAITING_MAX)
        self._again_s = inf
        """Loop time at which the first of these is tried again."""

    @property
    def is_busy(self) -> bool:
        """True if an action waits for blocks."""
        return bool(self._waiting)

    def add(self, order: Order, keys: Sequence[BlockKey], salt: bytes) -> None:
        """Do an order once for each block, as soon as it is saved.

        Blocks that are not saved within ``SAVED_S`` are given up, and the oldest action if too many
        wait.
        """
        now_s = self._manager.ladder.clock.now()
        with self._lock:
            self._waiting.append(Late(order, keys, salt, now_s + SAVED_S, now_s, now_s))
            self._again_s = now_s
        self.poll()

    def poll(self) -> None:
        """Try those actions again that are due."""
        now_s = self._manager.ladder.clock.now()
        if now_s < self._again_s:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, deque(maxlen=WAITING_MAX)
            self._again_s = inf
        for one in waiting:
            if one.again_s <= now_s:
                one.keys = do_late(self._manager, one.order, one.keys, one.salt, one.since_s).left
                one.again_s = now_s + one.wait_s
                one.wait_s = min(2 * one.wait_s, RETRY_MAX_S)
            if one.keys and now_s < one.until_s:
                with self._lock:
                    self._waiting.append(one)
                    self._again_s = min(self._again_s, one.again_s)

    def clear(self) -> None:
        """Give up all actions."""
        with self._lock:
            self._waiting.clear()
