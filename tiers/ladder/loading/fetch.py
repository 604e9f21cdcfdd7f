"""One request's load from the stack."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from typing import Protocol

from kvladder.arena import NO_SLOT, Slot
from kvladder.keys import BlockKey
from kvladder.metrics import MissCause, Missed, MissReason
from kvladder.policy.fetch_cost import AvoidedCompute, Patience
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.records.terms import ANYWHERE
from kvladder.tiers.spans import FetchSpan
from kvladder.units import counted


class Pins(Protocol):
    """The part of the stack that a fetch needs."""

    def unpin(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Give pinned slots back."""
        ...

    def late(self, levels: Sequence[str]) -> None:
        """Count blocks that had not arrived when a fetch ended; one level name for each."""
        ...

    def discard(self, keys: Sequence[BlockKey], /) -> object:
        """Forget blocks that have unusable bytes."""
        ...

    def missed(self, keys: Sequence[BlockKey], first: int, cause: MissCause) -> tuple[Missed, ...]:
        """Count blocks from ``first`` on as missed; with the lock held."""
        ...


class FetchState(Enum):
    """How far a fetch has come; the README of the ladder says which call leads to which state."""

    ASKING = "asking"
    """The rest of the prefix is looked for. Blocks before it may be on their way."""
    PENDING = "pending"
    """The prefix is known. Blocks of it may be on their way."""
    ANSWERED = "answered"
    """The answer is final, and its blocks are pinned."""
    RELEASED = "released"
    """The answer is final, and no block is pinned for it any more."""


_ASKING, _PENDING = FetchState.ASKING, FetchState.PENDING
_ANSWERED, _RELEASED = FetchState.ANSWERED, FetchState.RELEASED


class Fetch:
    """The longest prefix of some keys that the stack could serve, pinned in host slots.

    The caller owns it, polls ``done``, uses ``slots`` and calls ``release`` or ``forget`` in the
    end; until then the slots are not reused. If the caller loses it, a ResourceWarning says so and
    the slots are reused: keep it as long as a copy reads them.
    """

    is_prefix = True
    """True if its keys are those of a prompt, in order."""
    missed: tuple[Missed, ...] = ()
    """Blocks that were not served, by cause; together with ``blocks`` they are all of ``keys``.

    The first one says why the prefix ended. Empty until ``done``, and for a prefetch.
    """
    span: FetchSpan | None = None
    """Is told how the fetch goes; None without tracing."""
    _number = 0
    _end: tuple[int, MissCause] | None = None
    """Position at which the prefix ends, as far as is known, and why."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        *,
        stack: Pins,
        shared: Shared,
        deadline_s: float,
        levels: int = ANYWHERE,
        salt: bytes = b"",
        saves: AvoidedCompute | None = None,
        is_use: bool = True,
        in_session: bool = False,
    ) -> None:
        self._unreleased = unreleased = shared.unreleased
        if unreleased.lost:
            unreleased.settle()
        self.keys = keys
        self.levels = levels
        """Bits of the levels that may be read for it."""
        self.saves = saves
        """Compute that the engine avoids if all blocks come; None has them fetched in any case."""
        self.is_use = is_use
        """True if a request uses its blocks, so that eviction policies are told; False for a
        prefetch."""
        self.in_session = in_session
        """True if the request is of a session that the engine named."""
        self.patience: Patience | None = None
        """Limit of the wait that is worth it; None waits up to the deadline."""
        self._stack = stack
        self.salt = salt
        """Digest of the cache salt that is bound into the keys."""
        self._lock = shared.lock
        self._clock = shared.clock
        self.begun_s = shared.clock.now()
        self._deadline_s = deadline_s  # loop time: from then on the answer is what has arrived
        self._slots: list[Slot] = []
        self._sources: list[str] = []
        self._here = 0  # leading blocks that have arrived
        # The blocks on their way. They may be there while ASKING as well as while PENDING, and one
        # that arrives ends neither: so they are no states.
        self._waiting: set[int] = set()
        self._ends = sys.maxsize  # from there on nothing is waited for
        self._state = _PENDING
        # Wakes a thread in ``wait``. It may have begun to wait in any state but the final ones, and
        # the event stays when they come: so it is no state.
        self._settled: threading.Event | None = None

    def __repr__(self) -> str:  # changes nothing, unlike ``done``
        here = len(self._slots) - len(self._waiting)
        state = self._state.value if self._is_final else f"{len(self._waiting)} in flight"
        return f"<Fetch: {here} of {counted(len(self.keys), 'block')}, {state}>"

    # ---- for the stack, with the lock held

    def extend(self, slots: Sequence[Slot], sources: Sequence[str]) -> None:
        """Append the next blocks of the prefix; ``NO_SLOT`` where one is still to arrive."""
        first = len(self._slots)
        self._waiting.update([at for at, slot in enumerate(slots, first) if slot == NO_SLOT])
        self._slots += slots
        self._sources += sources

    def number(self, numbers: Iterator[int]) -> int:
        """Return the number of this fetch: the next of ``numbers`` when it is first asked for."""
        self._number = self._number or next(numbers)
        return self._number

    def joins(self, earlier: Fetch | None) -> bool:
        """Return whether ``earlier`` asks for the same keys and is not released: one use.

        Its number is then this fetch's, too.
        """
        is_same = earlier is not None and earlier._state is not _RELEASED
        if earlier is None or not is_same or len(earlier.keys) != len(self.keys):
            return False
        self._number = earlier._number
        return True

    def fill(self, slots: Sequence[Slot], source: str) -> None:
        """Append blocks of the prefix that are all there, in this level."""
        self._slots += slots
        self._sources += [source] * len(slots)

    def arrived(self, indices: Sequence[int], slots: Sequence[Slot], source: str) -> None:
        """Set the slots of the blocks at ``indices``, which are pinned now and were waited for."""
        for index, slot in zip(indices, slots, strict=True):
            self._slots[index] = slot
            self._sources[index] = source
        self._waiting.difference_update(indices)
        if self.patience is not None:
            while self._here < len(self._slots) and self._slots[self._here] != NO_SLOT:
                self._here += 1
        self._notify()

    def ends(self, cause: MissCause) -> None:
        """Record why no more blocks than those so far are there or on their way."""
        self._end = (len(self._slots), cause)

    def failed(self, index: int, cause: MissCause) -> None:
        """End the prefix before the block at ``index``, which does not come."""
        if index in self._waiting:
            self._end = (index, cause)
            self._waiting.difference_update(range(index, min(self._ends, len(self._slots))))
            self._ends = index
            self._state = _PENDING  # a final one waits for nothing
            self._notify()

    def ask(self, *, asking: bool) -> None:
        """Set whether the rest of the prefix is still looked for, here or in shared tiers.

        A final answer stays final.
        """
        if self._state is _PENDING or self._state is _ASKING:
            self._state = _ASKING if asking else _PENDING
        self._notify()

    def be_patient(self, patience: Patience) -> None:
        """Set how long waiting is worth it; the deadline still holds."""
        self.patience = patience

    @property
    def length(self) -> int:
        """Number of blocks of the prefix that are there or on their way."""
        return len(self._slots)

    @property
    def asking(self) -> bool:
        """True while the rest of the prefix is looked for and would still be used."""
        return self._state is _ASKING

    def waits_for(self, indices: Sequence[int]) -> bool:
        """Return whether all blocks at ``indices`` would still be used."""
        return self._waiting.issuperset(indices)

    def queues_for(self, indices: Sequence[int], now_s: float) -> bool:
        """Return whether to begin the blocks at ``indices``, which waited for room."""
        return self.waits_for(indices) and now_s < self._end_s

    @property
    def _end_s(self) -> float:
        """Time at which the fetch ends: its deadline, or earlier if computing becomes faster."""
        if self.patience is None:
            return self._deadline_s
        return min(self._deadline_s, self.patience.end_s(self._here))

    def _notify(self) -> None:
        if self._settled is not None and not (self._waiting or self._state is _ASKING):
            self._settled.set()

    # ---- for the engine

    @property
    def done(self) -> bool:
        """True if the answer is final: nothing is on its way, or it has taken long enough."""
        state = self._state
        if state is _ANSWERED or state is _RELEASED:
            return True
        if (self._waiting or state is _ASKING) and self._clock.now() < self._end_s:
            return False
        if late := [*self._waiting]:
            self._stack.late([self._sources[index] for index in late])
        self._answer("late")
        return True

    def _answer(self, why: MissReason) -> None:
        """Keep the leading blocks that are here, and give the rest back.

        ``why`` is the reason if that is a miss of blocks that are still to come.
        """
        with self._lock:
            state = self._state
            if state is _ANSWERED or state is _RELEASED:  # by another thread meanwhile
                return
            self._state = _ANSWERED
            self._waiting.clear()
            here = len(self._slots)
            if NO_SLOT in self._slots:
                here = self._slots.index(NO_SLOT)
            if here < len(self.keys) and self.is_use:
                cause = self._cause(here, why, asking=state is _ASKING)
                self.missed = self._stack.missed(self.keys, here, cause)
            slots = self._slots[here:]
            del self._slots[here:], self._sources[here:]
        if self.span is not None:
            self.span.answered(len(self.keys), self._sources, self.missed)
        if not slots:
            return
        rest = [pair for pair in zip(self.keys[here:], slots, strict=False) if pair[1] != NO_SLOT]
        self._stack.unpin([key for key, _ in rest], [slot for _, slot in rest])

    def _cause(self, index: int, why: MissReason, *, asking: bool) -> MissCause:
        """Return why the block at ``index`` is not served."""
        if self._end is not None and self._end[0] == index and not asking:
            return self._end[1]
        return MissCause(self._sources[index] if index < len(self._sources) else "", why)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until ``done``, at most ``timeout_s``; the one call that waits for a tier."""
        with self._lock:
            if self._waiting or self._state is _ASKING:
                self._settled = threading.Event()
        if self._settled is None:
            return self.done
        end_s = inf if timeout_s is None else self._clock.now() + timeout_s
        while not self.done:  # an arrival may lengthen the wait
            now_s = self._clock.now()
            if now_s >= end_s or self._settled.wait(max(0.0, min(end_s, self._end_s) - now_s)):
                break
        return self.done

    @property
    def planned(self) -> list[str]:
        """Level of each block that is here or on its way, before ``done``."""
        return list(self._sources)

    @property
    def blocks(self) -> int:
        """Number of leading blocks in ``slots``; 0 until ``done``."""
        return len(self._slots) if self._is_final else 0

    @property
    def slots(self) -> list[Slot]:
        """Slots of those blocks, pinned until ``release``."""
        state = self._state  # not by ``_is_final``: engines ask this for each request
        return list(self._slots) if state is _ANSWERED or state is _RELEASED else []

    @property
    def sources(self) -> list[str]:
        """Level that each of those blocks came from."""
        return list(self._sources) if self._is_final else []

    def release(self) -> None:
        """Unpin the blocks, which stay cached. May be called again."""
        if self._state is not _ANSWERED:
            self._answer("ended")
        with self._lock:
            is_first, self._state = self._state is _ANSWERED, _RELEASED
        if is_first:
            self._stack.unpin(*self._pinned())

    def _pinned(self) -> tuple[Sequence[BlockKey], Sequence[Slot]]:
        """Return the blocks of the answer, and their slots."""
        return self.keys[: len(self._slots)], self._slots

    def __del__(self) -> None:
        # There is no state if the constructor failed. A default on the class would slow down each
        # reading of the attribute.
        state = getattr(self, "_state", _RELEASED)
        if state is not _RELEASED and any(slot != NO_SLOT for slot in self._slots):
            self._unreleased.add("fetch", self.release)

    def forget(self) -> None:
        """Release, and have every level forget the blocks, as their bytes could not be used."""
        self.release()
        self._stack.discard(self._pinned()[0])

    @property
    def _is_final(self) -> bool:
        return self._state is _ANSWERED or self._state is _RELEASED

    def check(self) -> None:
        """Assert that the blocks are those of the state; for tests."""
        assert len(self._slots) == len(self._sources) <= len(self.keys)
        assert all(self._slots[index] == NO_SLOT for index in self._waiting)
        assert not (self._waiting and self._is_final), self._state
        if self._is_final and type(self) is Fetch:
            assert NO_SLOT not in self._slots, "the answer has a hole"
        if self._is_final and self.is_use:
            served = len(self._slots) - self._slots.count(NO_SLOT)
            missed = sum(blocks for _, _, blocks in self.missed)
            assert served + missed == len(self.keys), "a block was neither served nor missed"


class PrefetchSet:
    """Keeps fetches with no waiting request: they bring blocks up to host for later ones."""

    def __init__(self) -> None:
        self._fetches: list[Fetch] = []

    def __len__(self) -> int:
        return len(self._fetches)

    def add(self, fetches: Iterable[Fetch]) -> None:
        """Add fetches, to be released once they are done."""
        self._fetches += fetches

    def settle(self) -> None:
        """Release the fetches that are done."""
        self._let_go([fetch for fetch in self._fetches if fetch.done])

    def close(self) -> None:
        """Release all fetches; may be called again."""
        self._let_go(self._fetches[:])

    def _let_go(self, fetches: Sequence[Fetch]) -> None:
        for fetch in fetches:
            self._fetches.remove(fetch)
            fetch.release()


class SetFetch(Fetch):
    """Those of a set of blocks that the stack could serve: a missing one ends nothing.

    ``keys`` are those that were there when it began; ``found`` says which of them came.
    """

    is_prefix = False
    _told: asyncio.Event | None = None
    _causes: dict[int, MissCause] | None = None
    """Why blocks did not come, by position."""

    def failed(self, index: int, cause: MissCause) -> None:
        self._waiting.discard(index)
        self._causes = {} if self._causes is None else self._causes
        self._causes.setdefault(index, cause)
        self._notify()

    def _notify(self) -> None:
        super()._notify()
        if self._told is not None:
            self._told.set()

    def _answer(self, why: MissReason) -> None:
        with self._lock:
            if not self._is_final:
                self._state = _ANSWERED
                self._waiting.clear()
                if NO_SLOT in self._slots or len(self._slots) < len(self.keys):
                    self._miss(why)

    def _miss(self, why: MissReason) -> None:
        """Count each block that is not here."""
        missed: list[Missed] = []
        causes = self._causes or {}
        for index, key in enumerate(self.keys):
            if index >= len(self._slots):
                end = self._end
                cause = MissCause("", why) if end is None else end[1]
            elif self._slots[index] == NO_SLOT:
                cause = causes.get(index) or MissCause(self._sources[index], why)
            else:
                continue
            missed += self._stack.missed([key], 0, cause)
        self.missed = tuple(missed)

    @property
    def found(self) -> dict[BlockKey, Slot]:
        """Slots of the blocks that are here, pinned until ``release``; empty until ``done``."""
        pairs = zip(self.keys, self.slots, strict=False)
        return {key: slot for key, slot in pairs if slot != NO_SLOT}

    async def settle(self) -> None:
        """Wait until ``done``; on the loop thread, where blocks arrive."""
        self._told = asyncio.Event()
        while not self.done:
            self._told.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._end_s - self._clock.now()):
                    await self._told.wait()

    def _pinned(self) -> tuple[Sequence[BlockKey], Sequence[Slot]]:
        found = self.found
        return [*found], [*found.values()]
