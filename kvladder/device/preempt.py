"""Preemption: suspends a running request to free its device memory, and resumes it later.

Either all of its blocks are copied into slots of the arena that are kept for it. Or they are
released, and blocks that are no longer cached are recomputed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final, Literal

from kvladder.arena import Slot
from kvladder.device.port import TierPort, blended
from kvladder.errors import NotReady
from kvladder.gpu.requests.requests import Request, Requests
from kvladder.gpu.requests.sequence import KVSequence
from kvladder.notices import Notices

How = Literal["tiers", "recompute"]
SUSTAINED: Final = 10
"""Number of suspensions within ``SUSTAINED_S`` that causes advice to be logged."""
SUSTAINED_S: Final = 60.0
"""Seconds within which ``SUSTAINED`` suspensions cause advice."""
ADVICE_EVERY_S: Final = 600.0
"""Seconds between two pieces of advice."""


class Suspended:
    """A suspended request. The engine owns it, and resumes or discards it once."""

    __slots__ = ("copies_left", "how", "over", "parts", "slots")

    def __init__(self, parts: Sequence[KVSequence], how: How) -> None:
        self.parts = tuple(parts)
        self.how = how
        """Way of resuming; a failed copy sets it to ``recompute``."""
        self.slots: list[list[Slot]] = []
        """Arena slots with its blocks, by group."""
        self.copies_left = 0
        """Number of copies that still read its device slots; at 0 the slots are free."""
        self.over = False


class Preemption:
    """Suspends and resumes the requests of one device cache, on the engine's thread.

    Parameters
    ----------
    block_bytes:
        Bytes of a block, by group.
    """

    def __init__(self, port: TierPort, requests: Requests, block_bytes: Sequence[int]) -> None:
        self._port = port
        self._requests = requests
        self._block_bytes = block_bytes
        self._token_s: float | None = None
        self._suspended: set[Suspended] = set()
        """Suspended requests with blocks in slots of the arena, or in flight to them."""
        self._clock = port.manager.ladder.clock
        self._notices = Notices(self._clock.now, every_s=ADVICE_EVERY_S)
        self._recent: deque[tuple[float, str]] = deque(maxlen=SUSTAINED)
        """Time and way of the last suspensions."""
        self._counted: dict[str, Counter[str]] = {
            name: Counter(tiers=0, recompute=0) for name in ("suspended", "resumed")
        }
        self._over = 0
        """Number of suspended requests that were resumed or discarded."""

    def counts(self) -> dict[str, Any]:
        """Return how many requests were suspended and resumed, by way, and how many wait.

        May be called on any thread.
        """
        waiting = sum(self._counted["suspended"].values()) - self._over
        return {**{name: dict(by) for name, by in self._counted.items()}, "waiting": waiting}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed ``tokens`` of a prompt in ``seconds``; tell the manager."""
        self._port.manager.prefilled(tokens, seconds)
        if tokens > 0:
            self._token_s = blended(self._token_s, seconds / tokens)

    def costs_s(self, request: Request) -> dict[How, float | None]:
        """Return the seconds that suspending and resuming takes, by way; None if not measured.

        All copies are measured, those to and from the tiers too. A direction without a measurement
        counts as fast as the other.
        """
        held = zip(request.parts, self._block_bytes, strict=True)
        size = sum(len(part.held) * each for part, each in held)
        byte_s = self._port.byte_s.values()
        compute = None if self._token_s is None else request.computed * self._token_s
        return {"tiers": 2 * size * fmean(byte_s) if byte_s else None, "recompute": compute}

    def choice(self, request: Request) -> How:
        """Return the cheaper way; ``tiers`` until both are measured."""
        costs = self.costs_s(request)
        copying, computing = costs["tiers"], costs["recompute"]
        if copying is None or computing is None:
            return "tiers"
        return "tiers" if copying <= computing else "recompute"

    def suspend(self, request: Request, how: How | None = None) -> Suspended:
        """Suspend a ready request and free its device memory; None for ``how`` takes the cheaper.

        If the arena has no room for all of its blocks, the request will be recomputed. Its device
        slots are free when ``copies_left`` is 0, after ``poll``. The request itself must not be
        used any more.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or its blocks are not in place.
        """
        request.require_ready()
        suspended = self._suspend(request, self.choice(request) if how is None else how)
        self._counted["suspended"][suspended.how] += 1
        self._recent.append((self._clock.now(), suspended.how))
        self._advise()
        return suspended

    def _advise(self) -> None:
        """Log advice, at intervals, if requests are suspended often."""
        first_s, last_s = self._recent[0][0], self._recent[-1][0]
        if len(self._recent) < SUSTAINED or last_s - first_s > SUSTAINED_S:
            return
        again = sum(how == "recompute" for _, how in self._recent)
        self._notices.say(
            "preemption",
            f"{SUSTAINED} requests gave up their device memory within {last_s - first_s:.0f} s;"
            f" {again} of them must be computed again. Run fewer requests at a time, shorten their"
            " context, give the pools more memory (gpu.memory, gpu.fraction), or keep keys and"
            " values in fp8 (gpu.dtype); see docs/how-to/out-of-memory.md",
        )

    def _suspend(self, request: Request, way: How) -> Suspended:
        counts = [len(part.held) for part in request.parts]
        slots = self._port.lease(sum(counts)) if way == "tiers" else None
        suspended = Suspended([part.copy() for part in request.parts], way)
        if slots is None:
            suspended.how = "recompute"
            self._requests.release(request)
            return suspended
        suspended.copies_left = len(counts)
        self._suspended.add(suspended)

        held = [list(part.held) for part in request.parts]
        pools = [one.pool for one in self._requests.sequences]

        def ended(ok: bool) -> None:
            suspended.copies_left -= 1
            if not ok:
                suspended.how = "recompute"
            if not suspended.copies_left:
                for pool, slots in zip(pools, held, strict=True):
                    pool.copies_ended(slots)
                for part in request.parts:
                    part.settle()
                self._requests.release(request)
                if suspended.how == "recompute":
                    self._free(suspended)

        for pool, slots_held in zip(pools, held, strict=True):
            pool.copying(slots_held)
        for group, (part, count) in enumerate(zip(request.parts, counts, strict=True)):
            own, slots = slots[:count], slots[count:]
            suspended.slots.append(own)
            part.wait([self._port.copy(group, "offload", part.held, own, ended)])
        return suspended

    def _free(self, suspended: Suspended) -> None:
        self._suspended.discard(suspended)
        self._port.unlease([slot for slots in suspended.slots for slot in slots])
        suspended.slots = []

    def resume(self, suspended: Suspended, *, room: int | None = None) -> Request:
        """Resume a suspended request; run the returned one when it is ``ready``.

        A recomputed request, as after ``DeviceCache.rename``, has fewer tokens ``computed`` than
        before. It has slots for ``room`` tokens behind those; None for all. ``Requests.extend``
        gets more.

        Raises
        ------
        NotReady
            Its blocks are still being read, or it was resumed or discarded before.
        OutOfBlocks, BlocksBusy
            There is no room, or not yet; nothing is held, and the call may be repeated.
        """
        if suspended.copies_left or suspended.over:
            is_left = bool(suspended.copies_left)
            state = "still being suspended" if is_left else "already resumed or discarded"
            raise NotReady(f"the request is {state}")
        if any(part.renamed for part in suspended.parts):  # the copies are useless
            suspended.how = "recompute"
            self._free(suspended)
        copied = suspended.how == "tiers"
        request = self._restore(suspended) if copied else self._again(suspended, room)
        suspended.over = True
        self._over += 1
        self._counted["resumed"][suspended.how] += 1
        return request

    def _again(self, suspended: Suspended, room: int | None) -> Request:
        old = suspended.parts[0]
        request = self._requests.begin(
            old.tokens,
            retention=old.retention,
            salt=old.root.salt,
            lora=old.root.lora,
            extra=old.extra,
            room=room,
            prompt_tokens=old.prompt_tokens,
        )
        for part, before in zip(request.parts, suspended.parts, strict=True):
            if before.outdated:
                part.stop_storing()
        return request

    def _restore(self, suspended: Suspended) -> Request:
        """Return the request with shared blocks from the device; start copies of the others."""
        request, kept = self._requests.restore([part.copy() for part in suspended.parts])
        for group, (part, count) in enumerate(zip(request.parts, kept, strict=True)):
            slots = suspended.slots[group]
            self._port.unlease(slots[:count])
            if count < len(slots):
                self._bring(group, part, slots[count:])
        suspended.slots = []
        self._suspended.discard(suspended)
        return request

    def _bring(self, group: int, part: KVSequence, slots: list[Slot]) -> None:
        pool = self._requests.sequences[group].pool
        given = part.table[-len(slots) :]
        pool.retain(given)  # for the copy: the request may leave before it ends
        pool.copying(given)

        def ended(ok: bool) -> None:
            part.landed(ticket, ok=ok)
            pool.copies_ended(given)
            pool.release(given)
            self._port.unlease(slots)

        ticket = self._port.copy(group, "onboard", given, slots, ended)
        part.wait([ticket])

    def discard(self, suspended: Suspended) -> None:
        """Drop a suspended request for good. Raises NotReady until its copies have ended."""
        if suspended.copies_left:
            raise NotReady("the request is still being suspended")
        self._over += not suspended.over
        suspended.over = True
        self._free(suspended)

    def close(self) -> None:
        """Give back the slots of all suspended requests; no copy may be in flight any more."""
        for suspended in list(self._suspended):
            suspended.over = True
            self._free(suspended)
