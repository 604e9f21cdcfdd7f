"""The guard of a policy that is not the default one: if it fails, the level orders by LRU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvladder.keys import BlockKey
from kvladder.policy.eviction import (
    BULK_MIN,
    STATE_MAX,
    EvictionPolicy,
    KeyedPolicy,
    Places,
    PrioritizedLRU,
    RefusalReason,
)

SLOW_S: Final = 0.1
"""Time of a call, or of the policy's part of a walk, from which on it counts as slow."""
SLOW_MAX: Final = 3
"""Number of slow calls within ``SLOW_WITHIN_S`` at which the policy is left."""
SLOW_WITHIN_S: Final = 60.0

Ranks = Callable[[NDArray[np.intp]], tuple[NDArray[np.uint8], NDArray[np.uint32]]]
"""Returns the priority of the blocks at some places, and how long ago each was used, in uses."""


class GuardedPolicy(KeyedPolicy):
    """Passes each call on to a policy, and leaves it for a prioritized LRU when it misbehaves.

    That is: it raises an error, its walk yields a handle that is not there or stops before the
    last, or its calls take too long. The guard keeps one byte a place, so it knows what the policy
    should hold without asking it. The order by last use is sorted once, when the policy is left.

    Parameters
    ----------
    now:
        Returns the loop time.
    ranks:
        Says how blocks are ordered when the policy is left.
    say:
        Is told once why the policy was left.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        now: Callable[[], float],
        ranks: Ranks,
        say: Callable[[str], object],
    ) -> None:
        self.inner = policy
        """The policy that orders the blocks now."""
        self.keyed = policy if isinstance(policy, KeyedPolicy) else None
        """The same if it is told keys, else None."""
        self.left = False
        """True once the policy was left."""
        self._now = now
        self._ranks = ranks
        self._say = say
        self._in = bytearray()
        """Per place, 1 if its block may be evicted."""
        self._len = 0
        self._slow: list[float] = []

    # ---- what the policy should hold

    def _set(self, handles: Sequence[int], value: int) -> None:
        if self.left:
            return
        held = self._in
        self._len += len(handles) if value else -len(handles)
        if len(handles) >= BULK_MIN:
            at = np.asarray(handles, np.intp)
            self._grow(int(at.max()))
            np.frombuffer(held, np.uint8)[at] = value
            return
        for handle in handles:
            if handle >= len(held):
                self._grow(handle)
            held[handle] = value

    def _grow(self, handle: int) -> None:
        if handle >= len(self._in):
            self._in.extend(bytes(max(handle + 1 - len(self._in), min(len(self._in), 1 << 16))))

    def _run(self, call: Callable[..., object], *given: Any, **named: Any) -> None:
        """Make a call; what the policy should hold is noted already, so nothing is lost."""
        began_s = self._now()
        try:
            call(*given, **named)
        except Exception as error:  # noqa: BLE001 - whatever a plug-in raises, the level lives
            self._leave(f"it raised {error!r}")
            return
        if (took_s := self._now() - began_s) >= SLOW_S:
            self._was_slow(took_s)

    def _was_slow(self, took_s: float) -> None:
        now_s = self._now()
        self._slow = [then for then in self._slow if now_s - then < SLOW_WITHIN_S] + [now_s]
        if len(self._slow) >= SLOW_MAX:
            self._leave(f"{SLOW_MAX} of its calls took long, the last one {took_s:.2g} s")

    def _leave(self, why: str) -> None:
        if self.left:
            return
        name, self.left = type(self.inner).__name__, True
        order, handles = PrioritizedLRU(), np.flatnonzero(np.frombuffer(self._in, np.uint8))
        order.reserve(len(self._in))
        if len(handles):
            handles = handles[::-1]  # of blocks used at once, a prompt's end lies higher
            priorities, ages = self._ranks(handles)
            worth = (priorities.astype(np.uint64) << np.uint64(32)) + (
                np.uint64(0xFFFFFFFF) - ages.astype(np.uint64)
            )
            ranked = np.argsort(worth, kind="stable")
            handles, priorities = handles[ranked], priorities[ranked]
            for run in np.split(np.arange(len(handles)), np.flatnonzero(np.diff(priorities)) + 1):
                chain = array("i", handles[run].astype(np.intc).tobytes())
                order.push_all(chain, int(priorities[run[0]]))
        self.inner, self.keyed = order, None
        self._in = bytearray()
        self._say(f"policy {name} failed: {why}: evicting the least recently used from now on")

    # ---- the policy's calls

    def reserve(self, handles: int) -> None:
        self._grow(handles - 1)
        self._run(self.inner.reserve, handles)

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        self._set((handle,), 1)
        self._run(self.inner.push, handle, priority, front=front)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        self._set(handles, 1)
        self._run(self.inner.push_all, handles, priority)

    def touch(self, handle: int) -> None:
        self._run(self.inner.touch, handle)

    def touch_all(self, handles: Sequence[int]) -> None:
        self._run(self.inner.touch_all, handles)

    def remove(self, handle: int) -> None:
        self._set((handle,), 0)
        self._run(self.inner.remove, handle)

    def remove_all(self, handles: Sequence[int]) -> None:
        self._set(handles, 0)
        self._run(self.inner.remove_all, handles)

    def pop(self) -> int:
        for handle in self:
            self.remove(handle)
            return handle
        raise IndexError("pop from an empty policy")

    def __len__(self) -> int:
        return len(self.inner) if self.left else self._len

    def __contains__(self, handle: int) -> bool:
        if self.left:
            return handle in self.inner
        return handle < len(self._in) and bool(self._in[handle])

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner) if self.left else self._walk()

    def _walk(self) -> Iterator[int]:
        """Yield the policy's order as long as it is one of what it should hold, then LRU."""
        given: set[int] = set()
        spent_s, now, held = 0.0, self._now, self._in
        try:
            walk: Iterator[int] | None = iter(self.inner)
        except Exception as error:  # noqa: BLE001 - as in ``_run``
            self._leave(f"it raised {error!r}")
            walk = None
        while walk is not None and not self.left:
            began_s = now()
            try:
                handle = next(walk, -1)
                if handle < 0 and len(given) == self._len:
                    return
                is_sound = 0 <= handle < len(held) and held[handle] and handle not in given
            except Exception as error:  # noqa: BLE001 - as in ``_run``
                self._leave(f"it raised {error!r}")
                break
            spent_s += now() - began_s
            if not is_sound:
                what = f"gave {handle}, which it does not hold" if handle >= 0 else "ended too soon"
                self._leave(f"its order {what}")
            elif spent_s >= SLOW_S:
                self._was_slow(spent_s)
                spent_s = 0.0
            if is_sound:
                given.add(handle)
                yield handle
        yield from (handle for handle in self.inner if handle not in given)

    # ---- the calls of a policy that is told keys

    def attached(self, blocks: int, places: Places) -> None:
        if self.keyed is not None:
            self._run(self.keyed.attached, blocks, places)

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        if self.keyed is not None:
            self._run(self.keyed.requested, keys, request)

    def requested_in_session(self, keys: Sequence[BlockKey], request: int) -> None:
        if self.keyed is not None:
            self._run(self.keyed.requested_in_session, keys, request)

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        if self.keyed is not None:
            self._run(self.keyed.inserted, handles, keys, request)

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        if self.keyed is not None:
            self._run(self.keyed.dropped, handles, evicted=evicted)

    def refused(self, keys: Sequence[BlockKey], reason: RefusalReason) -> None:
        if self.keyed is not None:
            self._run(self.keyed.refused, keys, reason)

    def state(self) -> bytes:
        found: list[object] = []
        if self.keyed is not None:
            keyed = self.keyed
            self._run(lambda: found.append(keyed.state()))
        state = found[0] if found else b""
        if isinstance(state, bytes) and len(state) <= STATE_MAX:
            return state
        self._leave(f"its state was {type(state).__name__} or above {STATE_MAX} bytes")
        return b""

    def restore(self, state: bytes) -> None:
        if self.keyed is not None:
            self.keyed.restore(state)


class PolicyTeller(ABC):
    """The part of an index that passes news on to its policy, if that is told keys."""

    _keyed: KeyedPolicy | None

    @abstractmethod
    def __contains__(self, key: BlockKey) -> bool:
        """Return whether the block is held."""

    @property
    def is_told(self) -> bool:
        """True if the policy is told of requests and refusals."""
        return self._keyed is not None

    def requested(
        self, keys: Sequence[BlockKey], request: int, *, in_session: bool = False
    ) -> None:
        """Tell the policy that a request, maybe of a named session, asks for a prompt."""
        if self._keyed is not None:
            tell = self._keyed.requested_in_session if in_session else self._keyed.requested
            tell(keys, request)

    def refused(self, keys: Sequence[BlockKey], reason: RefusalReason) -> None:
        """Tell the policy of blocks that were offered to the level, which does not hold them."""
        if self._keyed is None:
            return
        if absent := [key for key in keys if key not in self]:
            self._keyed.refused(absent, reason)

    def state(self) -> bytes:
        """Return what the policy has learned; empty for nothing."""
        return b"" if self._keyed is None else self._keyed.state()

    def restore(self, state: bytes) -> str:
        """Have the policy continue with what it had learned; return what is wrong with that."""
        try:
            if self._keyed is not None:
                self._keyed.restore(state)
        except Exception as error:  # noqa: BLE001 - it may be damaged in any way
            return str(error) or repr(error)
        return ""
