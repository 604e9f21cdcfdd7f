"""The interface that a tier's author implements: six calls, four of them with batches."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError
from kvladder.keys import Namespace, unseen
from kvladder.layout import Layout
from kvladder.tiers.label import Facts, Kept, Read, Ref, Write

ANYWHERE = -1
"""A set of levels as a bit mask, 1 for host, 2 for the first below it: all of them."""
HOST = 1

ALIKE_MAX = 1024
"""How many different terms are remembered, so that those to come share them."""
PAGE = 12
"""The logarithm of how many places are kept together."""

_HERE, _HOST_TOO, _ENDS = 1, 2, 4


class Terms(NamedTuple):
    """Travels with a block, beside its priority."""

    levels: int = ANYWHERE
    """Where it may be stored."""
    expires_s: float = inf
    """Loop time at which every level forgets it."""
    salt: bytes = b""
    """Digest of its request's cache salt, 8 bytes; empty without one."""
    kind: str = ""
    """What its layers keep, where a codec of the stack may not work on all; empty if unknown."""

    def last(self, clock: Clock) -> bool:
        """Whether the block need not be forgotten yet."""
        return self.expires_s == inf or self.expires_s > clock.now()

    def merged(self, other: Terms) -> Terms:
        """What a block may that two requests offer: all that one of them allows."""
        return Terms(
            self.levels | other.levels,
            max(self.expires_s, other.expires_s),
            self.salt or other.salt,
            self.kind or other.kind,
        )

    def packed(self) -> int:
        """``Facts.terms``: what of it outlives the process. Which level is which may change."""
        bits = _ENDS if self.expires_s != inf else 0
        if self.levels != ANYWHERE:
            bits |= _HERE | (_HOST_TOO if self.levels & HOST else 0)
        return bits

    @classmethod
    def unpacked(cls, facts: Facts, here: int, behind_s: float) -> Terms:
        """The terms of a block that the level with the bit ``here`` recovered.

        Of several levels that it might be stored in, this one and host are left. ``behind_s`` is
        loop time minus wall time.
        """
        levels, expires_s = ANYWHERE, inf
        if facts.terms & _HERE:
            levels = here | (HOST if facts.terms & _HOST_TOO else 0)
        if facts.terms & _ENDS and facts.expires_wall_s is not None:
            expires_s = facts.expires_wall_s + behind_s
        return cls(levels, expires_s, facts.salt)


NO_TERMS = Terms()


class Deadlines:
    """By place, the loop time at which something happens to its block, for those that have one."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, float]] = {}
        """By ``place >> PAGE``, so that none is long to copy; empty if there are none at all."""
        self._count = 0
        self._heap: list[tuple[float, int]] = unseen([])
        self._before: list[tuple[float, int]] = unseen([])
        """A heap that was mostly of blocks that are gone: the others leave it for the new one."""

    def get(self, place: int) -> float:
        """When it happens to the block at a place; inf if never, or if ``due`` has told it."""
        page = self.of.get(place >> PAGE)
        return inf if page is None else page.get(place, inf)

    def put(self, place: int, at_s: float) -> None:
        """It happens at ``at_s``, and not when it was to happen before; inf for never."""
        self.drop(place)
        if at_s == inf:
            return
        self.of.setdefault(place >> PAGE, {})[place] = at_s
        self._count += 1
        heapq.heappush(self._heap, (at_s, place))
        for _ in range(min(4, len(self._before))):
            entry = heapq.heappop(self._before)
            if self.get(entry[1]) == entry[0] and entry not in self._before[:1]:
                heapq.heappush(self._heap, entry)
        if not self._before and len(self._heap) > 64 + 2 * self._count:
            self._heap, self._before = self._before, self._heap

    def drop(self, place: int) -> None:
        """There is no block at ``place`` any more."""
        page = self.of.get(place >> PAGE)
        if page is not None and page.pop(place, None) is not None:
            self._count -= 1
            if not page:
                del self.of[place >> PAGE]

    @property
    def _next(self) -> list[tuple[float, int]]:
        """The heap whose first entry is the first of all."""
        heap, before = self._heap, self._before
        return before if before and not (heap and heap[0] < before[0]) else heap

    @property
    def next_s(self) -> float:
        """Loop time at which ``due`` may have something; inf if never."""
        heap = self._next
        return heap[0][0] if heap else inf

    def due(self, now_s: float, count_max: float = inf) -> list[int]:
        """Places to whose blocks it happens by now, at most so many; told once."""
        found: list[int] = []
        looked = 0
        while self.next_s <= now_s and looked < count_max:
            looked += 1
            at_s, place = heapq.heappop(self._next)
            if self.get(place) == at_s:
                self.drop(place)
                found.append(place)
        return found

    def check(self, places: Collection[int]) -> None:
        """Assert that these are of blocks that are held, and that none is missed; for tests."""
        of = {place: at_s for page in self.of.values() for place, at_s in page.items()}
        assert all(self.of.values())
        assert len(of) == self._count
        assert all(place in places for place in of)
        assert {(at_s, place) for place, at_s in of.items()} <= {*self._heap, *self._before}
        assert len(self._heap) + len(self._before) <= 2 * (64 + 2 * len(of) + len(places))


class TermsByPlace:
    """The terms of a level's blocks."""

    def __init__(self) -> None:
        self.of: list[Terms] = unseen([])
        """By place, and where there is no block ``NO_TERMS``; whoever has the places extends it."""
        self.count = 0
        """Of how many blocks their requests said anything."""
        self.ends = Deadlines()
        """When those expire that do."""
        self._alike: dict[Terms, Terms] = {}
        """Equal terms are one object."""

    def put(self, place: int, terms: Terms) -> None:
        """The block at ``place`` has these from now on."""
        if len(self._alike) >= ALIKE_MAX:
            self._alike.clear()
        self.count += (terms != NO_TERMS) - (self.of[place] != NO_TERMS)
        self.of[place] = self._alike.setdefault(terms, terms)
        self.ends.put(place, terms.expires_s)

    def drop(self, place: int) -> None:
        """There is no block at ``place`` any more."""
        if self.of[place] != NO_TERMS:
            self.count -= 1
            self.of[place] = NO_TERMS
            self.ends.drop(place)

    def check(self, places: Collection[int]) -> None:
        """Assert that these are of blocks that are held; for tests."""
        special = [place for place, terms in enumerate(self.of) if terms != NO_TERMS]
        assert len(special) == self.count
        assert all(place in places for place in special)
        self.ends.check(places)


NO_SLOT = Slot(-1)
NO_PLACE = -1
"""The place of a block of a shared tier that this level holds no place for."""
EVERYTHING = b"everything"
"""Stands for all salts, which are 8 bytes long, where all blocks are being removed."""


class Blocking(Protocol):
    """Runs a blocking function off the loop. Cancellation is deferred until the function ended."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


class Progress(Protocol):
    """Told now and then how far something is; both numbers may be estimates."""

    def __call__(self, done: int, total: int, /) -> object: ...


class Clock(Protocol):
    """The two clocks: everything that depends on time asks one of them."""

    def now(self) -> float:
        """Monotonic seconds: the loop's time."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for what outlives the process."""
        ...


@dataclass(frozen=True)
class TierContext:
    """What a level gives its tier at ``open``; owned by the level."""

    arena: Arena
    layout: Layout
    namespace: Namespace
    capacity_blocks: int
    clock: Clock
    run_blocking: Blocking
    say: Callable[[str], None] = lambda _text: None
    """Tells who runs the engine what they should know; logged at most once a minute."""
    timeout_s: float | None = None
    """After how long the level gives up a ``get`` or ``put``, with all that has come by then."""
    required: bool = False
    """Whether the cache is not to start without the tier: one that opens before it has reached
    anything, and connects later, raises ``Unavailable`` instead."""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the namespace is a digest of, for people: see ``kvladder.tiers.fields.told``."""


class Medium:
    """What few tiers say or do; most leave all of it as it is."""

    block_bytes_min: int = 0
    """The smallest block that it is worth it for: a configuration with smaller ones is refused."""
    overhead_bytes: int = 0
    """Bytes that a block takes beside its slot, e.g. for its label; a capacity pays for them."""
    medium: str = "STORAGE"
    """What KV events call it: CPU for memory of this machine, STORAGE for anything colder."""
    recovers_checked: bool = False
    """Whether ``recover`` keeps its promises in any case: the level need not look at each block."""
    erases: bool = False
    """Whether blocks that it has forgotten lie there until ``erase`` overwrites them."""
    probe_max: int = 0
    """The largest batch of ``contains``; 0 stands for ``batch_max``."""
    probe_timeout_s: float | None = None
    """How long an answer of ``contains`` is waited for; None: as long as for any call."""
    probe_cache_s: float = 1.0
    """How long the answer that a block is not there is believed."""

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        """See whether what the settings name is there, and leave it as it is; facts for people.

        Called before anything is opened, outside of a running cache, and by nobody after ``open``.
        What is to be mended and is no reason not to start goes to ``warn``, a sentence each.

        Raises
        ------
        ConfigError, Unavailable
            ``open`` would raise it, too.
        """
        return {}

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        """Overwrite what forgotten blocks of this namespace left behind, or those of one salt.

        Only of tiers that say so by ``erases``; neither ``put`` nor ``remove`` is called meanwhile.
        A step that takes no longer than a ``put``: it begins at place ``start``, and at place 0
        with what makes all removals so far survive a power cut. Returns how many blocks it
        overwrote, which survives one too, and where to go on, None at the end.
        """
        raise TierError("there is nothing to erase", temporary=False)

    def spare(self, salt: bytes) -> float:
        """How many more blocks of one salt it takes now; any number unless there is a quota.

        Called on the loop: it does not wait. A level drops what is above it.
        """
        del salt
        return inf

    def gauges(self) -> Mapping[str, int]:
        """What a server says of itself, as last heard: for statistics, by their names."""
        return {}

    def describe(self) -> dict[str, str]:
        """Settings as they are in effect, without secrets."""
        return {}


class Tier(Medium, ABC):
    """A medium for blocks. A tier may forget; it must never lie.

    Rules for every call, which ``kvladder.testing.TierTests`` checks:

    - Batches hold at most ``batch_max`` blocks and no key twice; results have the length and the
      order of the batch.
    - The level holds a claim on every slot of a batch while the call lasts. When a call ends, by
      return, error or cancellation, the tier touches those slots no more.
    - A miss is a False, a failure is a :class:`TierError`. No other exception leaves a tier.
    - ``put`` stores ``Write.label()`` beside the bytes; ``get`` calls ``Read.came`` with both for
      each block that it answers True. The level checks what the tier has not checked itself.
    - Calls may overlap, except that ``put`` and ``remove`` of one key never do.
    """

    batch_max: int = 64
    """The largest batch the tier wants to be given."""
    durable: bool = False
    """Whether ``recover`` finds blocks again after the process has ended."""
    shared: bool = False
    """Whether others put into and remove from it, so that the level's index is only a guess.

    A shared tier ignores places, and is asked by ``contains`` how a prefix goes on. It lets blocks
    expire by itself. Nothing is removed from it but by a user, or to make room where it is full:
    what is of no use is put again, to ``replace`` it.
    """

    async def open(self, context: TierContext) -> None:
        """Get ready. Called before any other call, and again after a while if it failed.

        Raises
        ------
        ConfigError
            The settings are wrong, and would be tomorrow: says where, what and what instead. The
            cache does not start.
        Unavailable
            What they name cannot be used now, e.g. a full disk or a server that is down: says what
            to do about it. The cache starts without the level, unless it is ``required``, and
            opens it again later. Any other error counts as this one.
        """
        self.context = context

    @abstractmethod
    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        """Fill each view with its block and tell by ``came``; False where it is not there.

        What ``check`` refuses may be answered by either, and what is refused the level forgets,
        with what is not there. None where that cannot be told now, e.g. because one of
        several servers is silent: a miss of a block that may be there later.
        """

    @abstractmethod
    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        """Store each block and its label under its key and place; False where it was not stored.

        What is answered True can be got from then on. A place that is put again holds its old
        block no more.

        Raises
        ------
        TierFull
            The medium is full: nothing of this batch is claimed to be stored. Only of ``put``: a
            ``remove`` for which there is no room is tried again, and slower if it is a TierError.
        """

    @abstractmethod
    async def remove(self, blocks: Sequence[Ref]) -> None:
        """Forget these blocks; those that are not there are ignored."""

    @abstractmethod
    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        """Whether each block could be got now; a hint, since others may be removing it."""

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        """Remove the blocks of this namespace, or those of one salt in it, whoever put them.

        Only of shared tiers. Takes as long as it takes, in steps that let others have their turn.
        ``salt`` is a ``Facts.salt``; None means all of them. Returns how many were removed.
        """
        raise TierError("only a shared tier is purged", temporary=False)

    async def recover(self) -> AsyncIterator[Sequence[Kept]]:
        """Yield batches of what an earlier process stored here under the same namespace.

        Each key and each place at most once, oldest first, each place below ``capacity_blocks``,
        also what has expired meanwhile: the level has it removed. Called once after ``open``, and
        again from the start if it failed. The default is right for tiers that are not ``durable``.
        """
        return
        yield []  # pragma: no cover - makes this an async generator

    async def aclose(self) -> None:
        """End every transfer, release every resource; may be called again."""
