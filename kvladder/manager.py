"""The cache manager: the two flows, save and load, as an engine's thread calls them."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from kvladder.arena import Arena
from kvladder.errors import ClosedError
from kvladder.events import Event
from kvladder.keys import BlockKey, Namespace, salt_digest
from kvladder.layout import Layout
from kvladder.lock import BATCH, STEP
from kvladder.metrics import Stats
from kvladder.policy.eviction import PRIORITY_MAX, PRIORITY_MIN
from kvladder.policy.fetch_cost import ANYTHING, AvoidedCompute
from kvladder.policy.retention import checked_duration, checked_priority
from kvladder.policy.sessions import Sessions
from kvladder.policy.tenants import NO_LIMITS, Limits
from kvladder.tiers.ladder import Ladder
from kvladder.tiers.ladder.batched import PINNED_MAX, Reserved, SlotAdmission
from kvladder.tiers.ladder.batched import POLL_S as POLL_S
from kvladder.tiers.ladder.batched import BatchedFetch as BatchedFetch
from kvladder.tiers.ladder.batched import BatchedSave as BatchedSave
from kvladder.tiers.ladder.client import CALLS_TIMEOUT_S
from kvladder.tiers.ladder.client import CLOSE_TIMEOUT_S as TIER_CLOSE_TIMEOUT_S
from kvladder.tiers.ladder.loading.fetch import Fetch as Fetch
from kvladder.tiers.ladder.loading.fetch import PrefetchSet as PrefetchSet
from kvladder.tiers.ladder.loading.fetch import SetFetch as SetFetch
from kvladder.tiers.ladder.queries import level_counts
from kvladder.tiers.ladder.records.terms import ANYWHERE, HOST, Terms
from kvladder.tiers.ladder.saving import Save as Save
from kvladder.tiers.ladder.saving import metas_of, require_one_each
from kvladder.tiers.ladder.stack import Post, TierStack

T = TypeVar("T")
R = TypeVar("R", bound=Reserved)

FLUSH_TIMEOUT_S = 10.0
"""How long closing waits for levels that outlive the engine, unless the caller says otherwise."""
SET_MAX = BATCH
"""How many blocks a set that is fetched may have."""
CLOSE_TIMEOUT_S = TIER_CLOSE_TIMEOUT_S + 2 * CALLS_TIMEOUT_S + 1.0
"""How long closing may take after the flush: all levels close at once, and each within its time."""


class Portal(Protocol):
    """The doors into the loop that a manager needs; ``kvladder.runtime.Runtime`` is one."""

    @property
    def post(self) -> Post:
        """See ``Runtime.post``."""
        ...

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """See ``Runtime.call``."""
        ...

    @property
    def faults(self) -> int:
        """See ``Runtime.faults``."""
        ...

    def close(self, *, timeout_s: float = 2.0) -> None:
        """See ``Runtime.close``."""
        ...


class Closing(Protocol):
    """Something that ends with a manager."""

    def close(self) -> None:
        """End it."""
        ...


class Lookup(NamedTuple):
    """The longest prefix, in blocks."""

    host: int
    """Of what the host level holds."""
    total: int
    """Of what some level holds."""


class CacheManager:
    """Composes arena and stack for one engine. Nothing here waits for a tier, but ``close``.

    Owns what it is given and closes it. Calls may come from any thread. The engine copies bytes
    between its KV cache and the slots that ``save`` and ``fetch`` name.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        namespace: Namespace,
        arena: Arena,
        stack: TierStack,
        portal: Portal,
        fetch_deadline_s: float = 2.0,
        kinds: Sequence[str] = (),
        description: str = "",
        publisher: Closing | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.layout = layout
        self.namespace = namespace
        self.arena = arena
        self.ladder: Ladder = stack
        """What pools, publishers and connectors use of the levels."""
        self._stack = stack
        self._portal = portal
        self._fetch_deadline_s = fetch_deadline_s
        self.kinds = kinds
        """``Layout.kinds`` where a codec may work on some only: then blocks are told apart."""
        self._description = description
        self._publisher = publisher
        self._limits = limits
        self._pid = os.getpid()
        self._clock = stack.shared.clock
        lost = self._unreleased = stack.shared.unreleased
        self._fetches = SlotAdmission(max(1, int(arena.slots * PINNED_MAX)), self._clock, lost)
        self._saves = SlotAdmission(1, self._clock, lost)
        self._guests: list[Closing] = []
        self._sections: dict[str, Callable[[], dict[str, Any]]] = {}
        self.sessions = Sessions()
        """Whose blocks are whose, as far as engines say."""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None) -> Lookup:
        """How much of a prefix is cached in ``levels``, None for all of them; changes nothing."""
        return Lookup(*self._stack.lookup(keys, self._bits(levels)))

    def reach(self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None) -> int:
        """How many leading ``keys`` it is worth to fetch: all, if a shared tier has to be asked."""
        return self._stack.reach(keys, self._bits(levels))

    def missed(self, blocks: int) -> None:
        """Count blocks that were looked up in vain: only what is fetched is counted by itself."""
        with self._stack.lock:
            self._stack.loader.count(blocks, 0, 0, {})

    def fetch(
        self,
        keys: Sequence[BlockKey],
        *,
        deadline_s: float | None = None,
        levels: Collection[str] | None = None,
        salt: str = "",
        saves: AvoidedCompute | None = None,
        session: str | None = None,
    ) -> Fetch:
        """Pin the longest cached prefix of ``keys``, and begin to bring it up where needed.

        ``deadline_s`` seconds from now the answer is what has arrived; None takes the
        configured deadline. Ask ``Fetch.done``, then copy from ``Fetch.slots``, then release.

        Only ``levels`` are read, by name, None for all of them. A block that is in the host level
        is read from there or, if that is not among them, not at all. ``salt`` is the one that is
        bound into the keys: it says whose blocks are that others put into a shared tier.

        What would take longer than computing it is not fetched, and not waited for, once the
        engine told how long that takes (``prefilled``). ``saves`` is what it need not compute if
        all of the blocks come; None stands for their tokens. ``session`` is the one that wants
        them: those that another one brought in outlast that one's end.
        """
        self.sessions.met(session, keys)
        if saves is None:
            saves = AvoidedCompute(len(keys) * self.layout.block_tokens)
        within_s = self._fetch_deadline_s if deadline_s is None else deadline_s
        fetch = Fetch(
            keys,
            stack=self._stack.loader,
            shared=self._stack.shared,
            deadline_s=self._stack.shared.clock.now() + within_s,
            levels=self._bits(levels),
            salt=self._digest(salt),
            saves=saves,
        )
        self._stack.loader.fetch(fetch)
        return fetch

    def holding(
        self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None
    ) -> list[bool]:
        """Whether each of ``keys``, a set, is in host or in ``levels``, None for all of them.

        Nothing is asked of shared tiers; changes nothing.
        """
        return self._stack.holding(keys, self._bits(levels))

    def fetch_set(
        self,
        keys: Collection[BlockKey],
        *,
        deadline_s: float | None = None,
        levels: Collection[str] | None = None,
    ) -> SetFetch:
        """Pin those of at most ``SET_MAX`` blocks that are in host, and bring up the others.

        As ``fetch``, but for a set: a block that is missing, or does not come, ends nothing. Only
        host and ``levels`` are read, None for all; nothing is asked of shared tiers.
        """
        assert len(keys) <= SET_MAX, "a set is taken in one step"
        self.sessions.met(None, keys)
        within_s = self._fetch_deadline_s if deadline_s is None else deadline_s
        unique, bits = list(dict.fromkeys(keys)), self._bits(levels) | HOST
        with self._stack.lock:
            fetch = SetFetch(
                self._stack.loader.fetchable(unique, bits),
                stack=self._stack.loader,
                shared=self._stack.shared,
                deadline_s=self._stack.shared.clock.now() + within_s,
                levels=bits,
            )
            self._stack.loader.fetch(fetch)
        return fetch

    def fetch_paced(
        self,
        keys: Sequence[BlockKey],
        *,
        whole_set: bool = False,
        deadline_s: float | None = None,
        levels: Collection[str] | None = None,
        **told: Any,
    ) -> BatchedFetch:
        """Fetch blocks of which there may be more than the arena has slots, piece by piece.

        As ``fetch``, which takes ``told``, too, or with ``whole_set`` as ``fetch_set``. Each piece
        has a deadline of its own, and no more of the slots than leaves some to others; when it was
        used, ``BatchedFetch.advance`` has the next one come. Who comes first has the next slots.
        """
        within_s = self._fetch_deadline_s if deadline_s is None else deadline_s

        def begin(part: Sequence[BlockKey]) -> Fetch:
            if whole_set:
                return self.fetch_set(part, deadline_s=within_s, levels=levels)
            return self.fetch(part, deadline_s=within_s, levels=levels, **told)

        return BatchedFetch(
            keys,
            self._fetches,
            begin=begin,
            knows=partial(self.holding, levels=levels),
            clock=self._clock,
            deadline_s=within_s,
            most=SET_MAX if whole_set else self.arena.slots,
        )

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tell how long computing so many tokens of prompts at once took, without what a step
        takes in any case. What steps of fewer than 64 tokens take counts only until longer ones,
        which say more about a token, were told.
        """
        with self._stack.lock:
            self._stack.worth.prefilled(tokens, seconds)

    def computing_s(self, tokens: int) -> float | None:
        """How long computing so many tokens of prompts takes, as it was told; None: nobody did."""
        with self._stack.lock:
            return self._stack.worth.seconds(tokens)

    def _bits(self, levels: Collection[str] | None) -> int:
        return ANYWHERE if levels is None else self._stack.bits(levels)

    def save(
        self,
        keys: Sequence[BlockKey],
        *,
        only: Sequence[int] | None = None,
        parent_floor: int = PRIORITY_MAX,
        priorities: Sequence[int] | None = None,
        durations_s: Sequence[float | None] | None = None,
        levels: Collection[str] | None = None,
        ttl_s: float | None = None,
        salt: str = "",
        patient: bool = False,
        group: int = 0,
        session: str | None = None,
    ) -> Save:
        """Lease slots for those of ``keys`` that are not here yet and that some level would take.

        Parameters
        ----------
        keys:
            Consecutive blocks of one prefix.
        only:
            Positions of those to save, ascending; None for all. The others count for floors.
        parent_floor:
            ``Save.floor`` of the blocks before them; 100 at the start of a prefix.
        priorities, durations_s:
            One per key; priorities in 0..100, durations in seconds, None for good. Without
            priorities blocks get the default, and those that are here keep theirs.
        levels:
            Names of those where these blocks may be stored, now or later; None for all.
        ttl_s:
            After so many seconds every level forgets them.
        salt:
            Whose they are, for ``purge``: the salt that is bound into the keys.
        patient:
            Whether what finds no room is tried again, and not counted as dropped.
        group:
            Which of the layout's groups of layers they are of.
        session:
            The one that they are saved for: at its end it gives up those that it brought in.

        A block that several requests save may be wherever, and as long as, one of them allows.

        Raises
        ------
        ValueError
            A priority is not in 0..100, a duration is negative or no number, or there is not one
            for each key; nothing changed.
        KeyError
            There is no level of one of these names.
        """
        require_one_each(len(keys), priorities=priorities, durations_s=durations_s)
        now = self._stack.shared.clock.now()
        floor = checked_priority(parent_floor)
        priorities, durations_s = self._clipped(priorities, durations_s)
        expires_s = inf if (lasts_s := checked_duration(ttl_s)) is None else now + lasts_s
        terms = self.terms(levels, expires_s, salt, group)
        metas = metas_of(len(keys), priorities, durations_s, floor, now, terms)
        floor, total = metas[-1].floor if metas else floor, len(keys)
        if only is not None:
            keys, metas = [keys[at] for at in only], [metas[at] for at in only]
        indices, slots, end = self._stack.reserve(
            keys, metas, explicit=priorities is not None, patient=patient
        )
        kept = list(keys) if len(indices) == len(keys) else [keys[at] for at in indices]
        self.sessions.saved(session, keys, kept)
        if only is not None:
            indices = [only[at] for at in indices]
            end = only[end] if end < len(only) else total
        return Save(self._stack, kept, indices, slots, floor, end)

    def _clipped(
        self, priorities: Sequence[int] | None, durations_s: Sequence[float | None] | None
    ) -> tuple[Sequence[int] | None, Sequence[float | None] | None]:
        """Priorities and durations within ``limits``; what is above is counted, and said."""
        if priorities is None or self._limits == NO_LIMITS:
            return priorities, durations_s
        said, lasting, count = self._limits.clipped(
            [checked_priority(one) for one in priorities],
            None if durations_s is None else [checked_duration(one) for one in durations_s],
        )
        if count:
            with self._stack.lock:
                self._stack.host.index.clipped += count
            most = "no limit" if self._limits.pin_s == inf else f"{self._limits.pin_s:g} s"
            what = (
                f"blocks ask for more than limits.priority, {self._limits.priority}, or limits.pin"
            )
            self._stack.shared.notices.say("limits", f"{count} {what}, {most}: they get that")
        return said, lasting

    def save_paced(
        self, keys: Sequence[BlockKey], *, only: Sequence[int] | None = None, **told: Any
    ) -> BatchedSave[Save]:
        """Save blocks of which there may be more than the arena has slots, piece by piece.

        ``told`` is what ``save`` takes beside ``keys``. Each piece is a ``Save`` of those that
        find room; when it is committed, ``BatchedSave.advance`` has the next one come. Nothing here
        waits, but ``BatchedSave.wait`` and ``settle``.
        """
        wanted = range(len(keys)) if only is None else only

        def begin(first: int, patient: bool) -> Save:
            rest = wanted[bisect_left(wanted, first) :]
            return self.save(keys, only=rest, patient=patient, **told)

        return self.reserve_paced(len(keys), begin)

    def reserve_paced(self, total: int, begin: Callable[[int, bool], R]) -> BatchedSave[R]:
        """As ``save_paced``, for who reserves slots in a way of its own, see ``BatchedSave``."""
        return BatchedSave(
            total,
            self._saves,
            begin=begin,
            moving=lambda wanted: self._stack.moving(wanted=wanted),
            clock=self._clock,
        )

    def terms(
        self,
        levels: Collection[str] | None = None,
        expires_s: float = inf,
        salt: str = "",
        group: int = 0,
    ) -> Terms:
        """What levels are told of a block of a group, with ``save``'s options; loop time."""
        kind = self.kinds[group] if self.kinds else ""
        return Terms(self._bits(levels), expires_s, self._digest(salt), kind)

    def touch(self, keys: Sequence[BlockKey], *, session: str | None = None) -> None:
        """Note that a session, None for none, used the blocks of a prefix; its tail goes first."""
        self.sessions.met(session, keys)
        self._stack.touch(keys)

    def prefetch(self, session: str) -> list[Fetch]:
        """Begin to bring up what the next request of a session begins with, whatever that takes.

        The caller releases each when it is ``done``. Raises ValueError if the session has ended,
        or nobody knows of it.
        """
        runs, salt = self.sessions.last(session)
        return [self.fetch(run, salt=salt, saves=ANYTHING, session=session) for run in runs if run]

    def end_session(self, session: str, *, spare: Container[BlockKey] = ()) -> list[BlockKey]:
        """End a session: what it brought in and no other request used is worth nothing any more.

        Those blocks, but for ``spare``, leave the levels that have a threshold, and are the next to
        go in the others. Returns them. Raises ValueError if the session has ended or is not known.
        """
        keys = [key for key in self.sessions.end(session) if key not in spare]
        for start in range(0, len(keys), STEP):
            with self._stack.lock:
                for key in keys[start : start + STEP]:
                    meta = self._stack.meta(key)
                    if meta is not None:
                        worth = meta._replace(priority=PRIORITY_MIN, floor=PRIORITY_MIN)
                        self._stack.used(key, worth._replace(until_s=inf))
        return keys

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks in every level."""
        self._stack.remove(keys)

    def purge(self, salt: str) -> Iterator[dict[str, int]]:
        """Forget every block that was saved with this salt, step by step.

        Each step yields how many are gone by level; none holds up others for long. Blocks under
        way do not come back. Shared tiers lose what others put, too. Once ``removals`` is 0, all
        tiers have forgotten them, and those that keep bytes have overwritten them.

        Raises
        ------
        ValueError
            The salt is empty.
        """
        if not salt:
            raise ValueError("the salt is empty: blocks without one are everybody's")
        return self._stack.purge(self._digest(salt))

    @property
    def removals(self) -> int:
        """Blocks that are gone and that tiers still have to forget, and purges that go on."""
        with self._stack.lock:
            return sum(level.removals for level in self._stack.levels)

    def _digest(self, salt: str) -> bytes:
        return salt_digest(self.namespace, salt)

    def clear(self, *, erase: bool = False) -> None:
        """Forget every block of this namespace in every level.

        ``erase`` has tiers that keep the bytes of what they forgot overwrite them.
        """
        for _ in self._stack.clear(erase=erase):
            pass

    def reset(self) -> None:
        """Forget what no other engine has: blocks of host and of tiers that are not shared.

        Returns at once, however many there are: nothing is stored while ``resetting``. Tiers
        forget them in the background; what one has not forgotten when the engine ends, a durable
        one may bring back.
        """
        self._stack.reset()

    @property
    def resetting(self) -> bool:
        """Whether a reset goes on."""
        return self._stack.resetting

    def stats(self) -> Stats:
        """Counters and occupancy by level, hottest first, and of the arena; plain data."""
        stack = self._stack
        self._unreleased.settle()
        said = [level.client.gauges() for level in stack.levels]  # theirs: without the lock
        with stack.lock:
            size = self.layout.block_bytes
            host = {**stack.host.stats.as_dict(size), **stack.host.index.as_dict()}
            host["capacity"] = self.arena.slots
            found: Stats = {stack.host.name: host}
            for level, own in zip(stack.levels, said, strict=True):
                found[level.name] = {**own, **level.stats.as_dict(size), **level_counts(level)}
            found["arena"] = {"slots": self.arena.slots, "free": self.arena.free}
            lost = self._unreleased.counts.total()
            found["loop"] = {"faults": self._portal.faults, "unreleased": lost}
        return found | {name: counts() for name, counts in self._sections.items()}

    def take_events(self) -> list[Event]:
        """What was stored and removed since the last call; for one caller, the publisher if any."""
        with self._stack.lock:
            return self._stack.shared.events.take()

    def describe(self) -> str:
        """The resolved configuration, for people, and which levels are left out now."""
        out = [(lv.name, lv.client.why) for lv in self._stack.levels if lv.client.absent]
        return "\n".join([self._description, *(f"{name} is left out: {why}" for name, why in out)])

    def idle(self) -> bool:
        """Whether no level has anything left to write."""
        with self._stack.lock:
            return not self._stack.pending

    def check(self) -> None:
        """Assert every invariant; O(n), for tests."""
        self._stack.check()

    def admit(self, guest: Closing) -> None:
        """Close ``guest``, which uses this cache, before it."""
        self._guests.append(guest)

    def report(self, section: str, counts: Callable[[], dict[str, Any]]) -> None:
        """Have ``stats`` say what ``counts`` returns, which may be called from any thread."""
        self._sections[section] = counts

    def flush(self, *, timeout_s: float) -> bool:
        """Write what only host memory holds to levels that outlive it; False if it took longer."""
        with suppress(TimeoutError):
            self._portal.call(self._stack.flush(), timeout_s=timeout_s)
            return True
        return False

    def close(self, *, timeout_s: float | None = None) -> None:
        """Flush to durable levels, end the loop, unmap the arena; may be called again.

        ``timeout_s`` bounds the flush; None takes the usual one. The rest takes at most some
        ten seconds, whatever tiers do: what has not ended by then is left behind. In a child that
        was forked it does nothing: the cache is its parent's.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for guest in self._guests:
            guest.close()
        self._unreleased.close(*self._stack.held())
        flush_s = FLUSH_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            closing = self._stack.aclose(flush_timeout_s=flush_s)
            self._portal.call(closing, timeout_s=flush_s + CLOSE_TIMEOUT_S)
        except (TimeoutError, ClosedError) as error:
            self._stack.shared.notices.say("close", f"closing was cut short: {error!r}")
        if self._publisher is not None:
            self._publisher.close()
        self._portal.close()
        behind = sum(level.client.behind for level in self._stack.levels)
        if not self.arena.close() and behind:
            what = f"{behind} calls to tiers have not ended: the arena stays mapped until they do"
            self._stack.shared.notices.say("arena", what)
