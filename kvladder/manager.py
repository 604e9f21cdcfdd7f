"""The cache manager: save and load, as the engine's thread calls them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from functools import partial
from math import inf
from threading import RLock
from typing import Any, NamedTuple, TypeVar

from kvladder.arena import Arena
from kvladder.keys import BlockKey, Namespace, salt_digest
from kvladder.layout import Layout
from kvladder.lock import BATCH, STEP
from kvladder.metrics import Missed
from kvladder.policy.eviction import PRIORITY_MAX, PRIORITY_MIN
from kvladder.policy.fetch_cost import ANYTHING, AvoidedCompute
from kvladder.policy.retention import checked_duration, checked_priority
from kvladder.policy.sessions import LATER, Sessions
from kvladder.policy.tenants import NO_LIMITS, Limits
from kvladder.tiers.guests import Closing as Closing
from kvladder.tiers.ladder import Ladder
from kvladder.tiers.ladder.batched import PINNED_MAX, Reserved, SlotAdmission
from kvladder.tiers.ladder.batched import POLL_S as POLL_S
from kvladder.tiers.ladder.batched import BatchedFetch as BatchedFetch
from kvladder.tiers.ladder.batched import BatchedSave as BatchedSave
from kvladder.tiers.ladder.loading.fetch import Fetch as Fetch
from kvladder.tiers.ladder.loading.fetch import PrefetchSet as PrefetchSet
from kvladder.tiers.ladder.loading.fetch import SetFetch as SetFetch
from kvladder.tiers.ladder.owner import CLOSE_TIMEOUT_S as CLOSE_TIMEOUT_S
from kvladder.tiers.ladder.owner import FLUSH_TIMEOUT_S as FLUSH_TIMEOUT_S
from kvladder.tiers.ladder.owner import StackOwner
from kvladder.tiers.ladder.records.terms import ANYWHERE, HOST, Terms
from kvladder.tiers.ladder.saving import Save as Save
from kvladder.tiers.ladder.saving import metas_of, require_one_each
from kvladder.tiers.ladder.stack import Portal, TierStack
from kvladder.tiers.ladder.upkeep.blocks import StackUpkeep
from kvladder.tiers.ladder.upkeep.commands import StackCommands
from kvladder.tiers.spans import LookupSpan as LookupSpan
from kvladder.tiers.spans import TraceHeaders as TraceHeaders
from kvladder.units import Size, counted

R = TypeVar("R", bound=Reserved)

SET_MAX = BATCH
"""Largest number of blocks in one ``fetch_set``."""


class Lookup(NamedTuple):
    """Lengths of the longest cached prefix, in blocks."""

    host: int
    """Length of the prefix that the host level holds."""
    total: int
    """Length of the prefix in which each block is in some level."""


class CacheManager(StackOwner):
    """Composes arena and stack for one engine. Only ``close`` waits for a tier.

    Owns the objects it is given and closes them. Calls may come from any thread. The engine copies
    bytes between its KV cache and the slots that ``save`` and ``fetch`` name.
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
        super().__init__(
            layout=layout,
            namespace=namespace,
            arena=arena,
            stack=stack,
            portal=portal,
            description=description,
            publisher=publisher,
        )
        self.ladder: Ladder = stack
        """The levels, as pools, publishers and connectors use them."""
        self.fetch_deadline_s = fetch_deadline_s
        """Default deadline of a fetch."""
        self.kinds = kinds
        """``Layout.kinds`` if a codec may apply to some kinds only, else empty."""
        self.limits = limits
        """Limits on the priorities that a request may ask for."""
        self.commands = StackCommands(stack)
        """Commands about blocks that the levels hold."""
        self.upkeep = StackUpkeep(stack)
        """What an operator may ask about blocks: where they lie, to check and to evict them."""
        self._clock, self.tracer = stack.shared.clock, stack.shared.tracer
        lost = stack.shared.unreleased
        self._fetches = SlotAdmission(max(1, int(arena.slots * PINNED_MAX)), self._clock, lost)
        self._saves = SlotAdmission(1, self._clock, lost)
        self.sessions = Sessions(lock=RLock())
        """The sessions' blocks, as far as engines name sessions."""
        self.name_blocks: Callable[[Sequence[int], str], Sequence[Sequence[BlockKey]]] | None = None
        """Names the whole blocks of tokens under a salt, by group, if the engine set it."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        slots, size = counted(self.arena.slots, "slot"), Size(self.layout.slot_bytes).about()
        space = self.namespace.hex()[:16]
        return f"<CacheManager {state}: {self._stack!r}, {slots} of {size}, namespace {space}>"

    def lookup(self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None) -> Lookup:
        """Return how much of a prefix is cached in ``levels`` (None: all); change nothing."""
        return Lookup(*self._stack.lookup(keys, self._bits(levels)))

    def reach(self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None) -> int:
        """Return how many leading ``keys`` to fetch: all, if a shared tier must be asked."""
        return self._stack.reach(keys, self._bits(levels))

    def missed(
        self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None
    ) -> tuple[Missed, ...]:
        """Count looked-up blocks as not found, and return them by cause, in order.

        ``keys`` begin with the first block of a prefix that was not found in ``levels``. Fetches
        count their own blocks: see ``Fetch.missed``.
        """
        loader, bits = self._stack.loader, self._bits(levels)
        with self._stack.lock:
            loader.count(len(keys), 0, 0, {})
            return loader.missed(keys, 0, loader.misses.cause(keys[0], bits)) if keys else ()

    def fetch(
        self,
        keys: Sequence[BlockKey],
        *,
        deadline_s: float | None = None,
        levels: Collection[str] | None = None,
        salt: str = "",
        saves: AvoidedCompute | None = None,
        session: str | None = None,
        is_use: bool = True,
        trace: TraceHeaders | None = None,
    ) -> Fetch:
        """Pin the longest cached prefix of ``keys``, and begin to promote it where needed.

        After ``deadline_s`` seconds the answer is what has arrived; None stands for the configured
        deadline. Ask ``Fetch.done``, then copy from ``Fetch.slots``, then release.

        Only the named ``levels`` are read; None stands for all. A block in the host level is never
        read from another level: without host among ``levels``, it is not read at all. ``salt`` is
        bound into the keys, and recorded as the owner of blocks found in a shared tier.

        The engine may report how long computing takes (``prefilled``). From then on, a block that
        would take longer than computing it is neither fetched nor waited for. ``saves`` is the work
        that the engine avoids if all of the blocks come; None stands for their tokens. ``session``
        is the session that asks: blocks that another session brought in outlast that session's end.
        Policies are told that a session asks, so ``adaptive`` keeps or evicts it as a whole.
        Without ``is_use`` it is a prefetch, which eviction policies do not count as a use.
        ``trace`` has the headers of the request's trace; None continues OpenTelemetry's context.
        """
        self.sessions.met(session, keys)
        if saves is None:
            saves = AvoidedCompute(len(keys) * self.layout.block_tokens)
        within_s = self.fetch_deadline_s if deadline_s is None else deadline_s
        fetch = Fetch(
            keys,
            stack=self._stack.loader,
            shared=self._stack.shared,
            deadline_s=self._stack.shared.clock.now() + within_s,
            levels=self._bits(levels),
            salt=self._digest(salt),
            saves=saves,
            is_use=is_use,
            in_session=session not in (None, LATER),
        )
        if self.tracer is not None:
            fetch.span = self.tracer.fetch(trace, is_use=is_use)
        self._stack.loader.fetch(fetch)
        return fetch

    def holding(
        self, keys: Sequence[BlockKey], *, levels: Collection[str] | None = None
    ) -> list[bool]:
        """Return, for each of ``keys``, whether host or one of ``levels`` (None: all) holds it.

        ``keys`` are a set, not a prefix. Shared tiers are not asked; nothing changes.
        """
        return self._stack.holding(keys, self._bits(levels))

    def fetch_set(
        self,
        keys: Collection[BlockKey],
        *,
        deadline_s: float | None = None,
        levels: Collection[str] | None = None,
    ) -> SetFetch:
        """Pin those of at most ``SET_MAX`` blocks that are in host, and begin to promote the rest.

        Works like ``fetch``, but for a set: a block that is missing or does not come ends nothing.
        Only host and ``levels`` (None: all) are read; shared tiers are not asked.
        """
        assert len(keys) <= SET_MAX, "expected at most SET_MAX blocks"
        self.sessions.met(None, keys)
        within_s = self.fetch_deadline_s if deadline_s is None else deadline_s
        unique, bits = list(dict.fromkeys(keys)), self._bits(levels) | HOST
        with self._stack.lock:
            found = self._stack.loader.fetchable(unique, bits)
            self._stack.loader.misses.left_out(unique, found, bits)
            fetch = SetFetch(
                found,
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
        """Fetch blocks piece by piece; there may be more of them than the arena has slots.

        Works like ``fetch``, which also gets ``told``, or like ``fetch_set`` if ``whole_set``. Each
        piece has its own deadline and leaves a share of the slots to others. After the piece is
        used, ``BatchedFetch.advance`` begins the next one. Slots go to callers in order of arrival.
        """
        within_s = self.fetch_deadline_s if deadline_s is None else deadline_s

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
        """Record how long one step took to compute ``tokens`` prompt tokens.

        ``seconds`` excludes a step's fixed cost. Steps of fewer than 64 tokens count only until
        longer steps are recorded, as longer ones measure the time of a token better.
        """
        with self._stack.lock:
            self._stack.worth.prefilled(tokens, seconds)

    def computing_s(self, tokens: int) -> float | None:
        """Return the recorded time to compute ``tokens`` prompt tokens, or None without records."""
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
        trace: TraceHeaders | None = None,
        parent: BlockKey | None = None,
    ) -> Save:
        """Lease slots for those of ``keys`` that are not here yet and that some level would take.

        If several requests save a block, it may be in every level, and last as long, as any allows.

        Parameters
        ----------
        keys:
            Consecutive blocks of one prefix.
        only:
            Positions of those to save, ascending; None for all. The others count for floors.
        parent_floor:
            ``Save.floor`` of the blocks before them; 100 at the start of a prefix.
        priorities, durations_s:
            One per key: 0..100; seconds, None for no end. By default a block keeps what it has.
        levels, ttl_s:
            Names of the levels that may store these blocks, now or later, None for all; seconds
            after which every level forgets them, None for never.
        salt:
            The salt that is bound into the keys; ``purge`` finds blocks by it.
        patient:
            True if the caller tries again for blocks without room: they do not count as dropped.
        group:
            Number of their group of layers in the layout.
        session:
            The session that they are saved for. Its end gives up the blocks that it brought in.
        trace:
            Headers of the request's trace; see ``fetch``.
        parent:
            The block before the first, ``START`` for none, None if unknown; for purges by prefix.

        Raises
        ------
        ValueError, KeyError
            A priority, a duration, or their number is wrong; no level has a name. Nothing changed.
        """
        now, floor = self._clock.now(), checked_priority(parent_floor)
        if priorities is not None or durations_s is not None:
            priorities, durations_s = self._clipped(len(keys), priorities, durations_s)
        expires_s = inf if (lasts_s := checked_duration(ttl_s)) is None else now + lasts_s
        terms = self.terms(levels, expires_s, salt, group)
        metas = metas_of(len(keys), priorities, durations_s, floor, now, terms)
        floor, total, whole = metas[-1].floor if metas else floor, len(keys), keys
        if only is not None:
            keys, metas = [keys[at] for at in only], [metas[at] for at in only]
        explicit = priorities is not None
        indices, slots, end = self._stack.reserve(keys, metas, explicit=explicit, patient=patient)
        kept = list(keys) if len(indices) == len(keys) else [keys[at] for at in indices]
        self.sessions.saved(session, keys, kept)
        if only is not None:
            indices, end = [only[at] for at in indices], [*only, total][end]
        self._stack.note(whole, indices, parent, links=only is not None)
        span = None if self.tracer is None or not kept else self.tracer.save(trace, len(kept))
        return Save(self._stack, kept, indices, slots, floor, end, span)

    def _clipped(
        self,
        blocks: int,
        priorities: Sequence[int] | None,
        durations_s: Sequence[float | None] | None,
    ) -> tuple[Sequence[int] | None, Sequence[float | None] | None]:
        """Return priorities and durations within ``limits``; count and report those above."""
        require_one_each(blocks, priorities=priorities, durations_s=durations_s)
        if priorities is None or self.limits == NO_LIMITS:
            return priorities, durations_s
        said, lasting, count = self.limits.clipped(
            [checked_priority(one) for one in priorities],
            None if durations_s is None else [checked_duration(one) for one in durations_s],
        )
        if count:
            with self._stack.lock:
                self._stack.host.index.clipped += count
            most = "no limit" if self.limits.pin_s == inf else f"{self.limits.pin_s:g} s"
            what = f"{count} blocks exceeded their limits and were reduced to them:"
            limits = f"limits.priority {self.limits.priority}, limits.pin {most}"
            self._stack.shared.notices.say("limits", f"{what} {limits}")
        return said, lasting

    def save_paced(
        self, keys: Sequence[BlockKey], *, only: Sequence[int] | None = None, **told: Any
    ) -> BatchedSave[Save]:
        """Save blocks piece by piece; there may be more of them than the arena has slots.

        ``told`` are ``save``'s other options. Each piece is a ``Save`` of the blocks that find
        room. After it is committed, ``BatchedSave.advance`` begins the next one. Only
        ``BatchedSave.wait`` and ``settle`` wait.
        """
        wanted = range(len(keys)) if only is None else only

        def begin(first: int, patient: bool) -> Save:
            rest = wanted[bisect_left(wanted, first) :]
            return self.save(keys, only=rest, patient=patient, **told)

        return self.reserve_paced(len(keys), begin)

    def reserve_paced(self, total: int, begin: Callable[[int, bool], R]) -> BatchedSave[R]:
        """Work like ``save_paced``, with ``begin`` to reserve slots; see ``BatchedSave``."""
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
        """Return the levels' terms for a block of ``group``; ``expires_s`` is in loop time."""
        kind = self.kinds[group] if self.kinds else ""
        return Terms(self._bits(levels), expires_s, self._digest(salt), kind)

    def touch(self, keys: Sequence[BlockKey], *, session: str | None = None) -> None:
        """Mark a prefix's blocks as used by ``session``, head newest: its tail is evicted first."""
        self.sessions.met(session, keys)
        self._stack.touch(keys)

    def prefetch(self, session: str) -> list[Fetch]:
        """Begin to fetch, at any cost, the blocks that a session's next request begins with.

        The caller releases each fetch when it is ``done``. Raises ValueError if the session has
        ended or is not known.
        """
        runs, salt = self.sessions.last(session)
        told: dict[str, Any] = {"saves": ANYTHING, "session": session, "is_use": False}
        return [self.fetch(run, salt=salt, **told) for run in runs if run]

    def end_session(self, session: str, *, spare: Container[BlockKey] = ()) -> list[BlockKey]:
        """End a session, and lower the blocks that it owns to the lowest priority.

        It owns the blocks that it brought in and that no other request used. Those outside
        ``spare`` leave the levels with a threshold and are the next to be evicted from the others.
        Returns them. Raises ValueError if the session has ended or is not known.
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
        """Forget these blocks in every level: for good, also in files, once ``removals`` is 0."""
        self._stack.remove(keys)

    def purge(self, salt: str) -> Iterator[dict[str, int]]:
        """Forget every block that was saved with this salt, step by step.

        Each step yields how many are gone so far, by level; no step delays other calls for long.
        In-flight blocks do not come back. In shared tiers, blocks of other engines go, too. Once
        ``removals`` is 0, all tiers have forgotten them, and tiers that keep bytes have overwritten
        them.

        Raises
        ------
        ValueError
            The salt is empty.
        """
        if not salt:
            raise ValueError("the salt is empty: blocks without a salt belong to all users")
        return self._stack.purge(self._digest(salt))

    @property
    def removals(self) -> int:
        """Number of blocks that tiers must still remove, plus syncs and purges in progress."""
        with self._stack.lock:
            return sum(level.removals for level in self._stack.levels)

    @property
    def denied(self) -> int:
        """Number of removals and purges for which tiers had no rights: those blocks stay there."""
        with self._stack.lock:
            return sum(level.stats.denied for level in self._stack.levels)

    def _digest(self, salt: str) -> bytes:
        return salt_digest(self.namespace, salt)

    def clear(self, *, erase: bool = False) -> None:
        """Forget every block of this namespace in every level.

        With ``erase``, tiers that keep the bytes of forgotten blocks overwrite them.
        """
        for _ in self._stack.clear(erase=erase):
            pass

    def reset(self) -> None:
        """Forget the blocks that no other engine shares: those of host and of private tiers.

        Returns at once, however many blocks there are. Nothing is stored while ``resetting``. Tiers
        forget the blocks in the background. If the engine ends earlier, a durable tier may bring
        back the blocks it has not forgotten yet.
        """
        self._stack.reset()

    @property
    def resetting(self) -> bool:
        """True while a reset is in progress."""
        return self._stack.resetting
