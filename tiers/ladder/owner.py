"""Owns an open stack: its description, statistics and events, the flush, and the close."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Self

from kvladder.arena import Arena
from kvladder.errors import ClosedError
from kvladder.events import Event
from kvladder.keys import Namespace
from kvladder.layout import Layout
from kvladder.metrics import Stats
from kvladder.tiers.guests import Closing, Guests
from kvladder.tiers.ladder.calling.calls import CALLS_TIMEOUT_S
from kvladder.tiers.ladder.calling.client import CLOSE_TIMEOUT_S as TIER_CLOSE_TIMEOUT_S
from kvladder.tiers.ladder.queries import level_counts
from kvladder.tiers.ladder.stack import Portal, TierStack

FLUSH_TIMEOUT_S = 10.0
"""Default time that closing waits for the flush to levels that outlive the engine."""
CLOSE_TIMEOUT_S = TIER_CLOSE_TIMEOUT_S + 2 * CALLS_TIMEOUT_S + 1.0
"""Time limit of closing after the flush. All levels close at once, each with its own time limit."""


class StackOwner:
    """Owns an arena, a stack over it and the portal to their loop thread, and closes them.

    Calls may come from any thread. Only ``flush`` and ``close`` wait for a tier.
    """

    def __init__(
        self: Self,
        *,
        layout: Layout,
        namespace: Namespace,
        arena: Arena,
        stack: TierStack,
        portal: Portal,
        description: str,
        publisher: Closing | None,
    ) -> None:
        self.layout = layout
        self.namespace = namespace
        self.arena = arena
        self._stack = stack
        self._portal = portal
        self.post = portal.post
        """Calls a function on the loop thread, soon; from any thread."""
        self.description = description
        """The resolved configuration as text."""
        self._publisher = publisher
        self._pid = os.getpid()
        self._unreleased = stack.shared.unreleased
        self.guests: Guests[Self] = Guests(self)
        """What is closed before the cache."""
        self._sections: dict[str, Callable[[], dict[str, Any]]] = {}
        self._described: list[Callable[[], Sequence[str]]] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> Stats:
        """Return counters and occupancy by level, hottest first, and of the arena; plain data."""
        stack = self._stack
        self._unreleased.settle()
        levels = [*stack.levels]  # one may be attached or detached meanwhile
        said = [level.client.gauges() for level in levels]  # theirs, so without the lock
        with stack.lock:
            size = self.layout.block_bytes
            host = {**stack.host.stats.as_dict(size), **stack.host.index.as_dict()}
            host["capacity"] = self.arena.slots
            found: Stats = {stack.host.name: host}
            for level, own in zip(levels, said, strict=True):
                found[level.name] = {**own, **level.stats.as_dict(size), **level_counts(level)}
            found["misses"] = stack.loader.misses.as_dict(self.layout.block_tokens)
            found["arena"] = {"slots": self.arena.slots, "free": self.arena.free}
            lost = self._unreleased.counts.total()
            found["loop"] = {"faults": self._portal.faults, "unreleased": lost}
        return found | {name: counts() for name, counts in self._sections.items()}

    def take_events(self) -> list[Event]:
        """Return the events since the last call; for one caller, the publisher if there is one."""
        with self._stack.lock:
            return self._stack.shared.events.take()

    def describe(self) -> str:
        """Return the resolved configuration as text, and the levels that are left out now."""
        out = [(lv.name, lv.client.why) for lv in self._stack.levels if lv.client.absent]
        now = chain.from_iterable(lines() for lines in self._described)
        left = (f"{name} is left out: {why}" for name, why in out)
        return "\n".join([self.description, *now, *left])

    def idle(self) -> bool:
        """Return whether no level has anything left to write."""
        with self._stack.lock:
            return not self._stack.pending

    def check(self) -> None:
        """Assert every invariant; O(n), for tests."""
        self._stack.check()

    def admit(self, guest: Closing) -> None:
        """Register ``guest``, which uses this cache, to be closed before it."""
        self.guests.admit(guest)

    def report(
        self,
        section: str,
        counts: Callable[[], dict[str, Any]],
        lines: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Add ``counts()`` to ``stats`` and ``lines()`` to ``describe``; any thread calls both."""
        self._sections[section] = counts
        self._described.append(lines)

    def flush(self, *, timeout_s: float) -> bool:
        """Write blocks that only host holds to levels that outlive it; return False on timeout."""
        with suppress(TimeoutError):
            self._portal.call(self._stack.flush(), timeout_s=timeout_s)
            return True
        return False

    def close(self, *, timeout_s: float | None = None) -> None:
        """Flush to durable levels, end the loop, and unmap the arena; may be called again.

        ``timeout_s`` bounds the flush; None stands for ``FLUSH_TIMEOUT_S``. The rest takes about
        ten seconds at most, whatever tiers do: calls that have not ended by then are abandoned. In
        a forked child it does nothing, since the cache belongs to the parent.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.guests.close()
        self._unreleased.close(*self._stack.held())
        flush_s = FLUSH_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            closing = self._stack.aclose(flush_timeout_s=flush_s)
            self._portal.call(closing, timeout_s=flush_s + CLOSE_TIMEOUT_S)
        except (TimeoutError, ClosedError) as error:
            self._stack.shared.notices.say("close", f"closing the cache did not finish: {error!r}")
        if self._publisher is not None:
            self._publisher.close()
        self._portal.close()
        behind = sum(level.client.behind for level in self._stack.levels)
        if not self.arena.close() and behind:
            what = f"{behind} calls to tiers have not ended: the arena stays mapped until they do"
            self._stack.shared.notices.say("arena", what)
