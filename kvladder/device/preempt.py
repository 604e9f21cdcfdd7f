"""Preemption: a running request gives its device memory up, and goes on later.

Its blocks are copied into slots of the arena that are kept for it, all or none; or they are
released, and what is not cached any more is computed again.
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
"""So many requests that make way ..."""
SUSTAINED_S: Final = 60.0
"""... within so many seconds are worth a word of advice, ..."""
ADVICE_EVERY_S: Final = 600.0
"""... once in so many."""


class Suspended:
    """A request that was suspended; owned by the engine, which resumes or discards it once."""

    __slots__ = ("copies_left", "how", "over", "parts", "slots")

    def __init__(self, parts: Sequence[KVSequence], how: How) -> None:
        self.parts = tuple(parts)
        self.how = how
        """``recompute`` too where the copy failed."""
        self.slots: list[list[Slot]] = []
        """By group, arena slots with its blocks."""
        self.copies_left = 0
        """Copies that still read its device slots; they are free when there are none."""
        self.over = False


class Preemption:
    """Suspends and resumes the requests of one device cache, on the engine's thread.

    Parameters
    ----------
    block_bytes:
        By group.
    """

    def __init__(self, port: TierPort, requests: Requests, block_bytes: Sequence[int]) -> None:
        self._port = port
        self._requests = requests
        self._block_bytes = block_bytes
        self._token_s: float | None = None
        self._suspended: set[Suspended] = set()
        """Those whose blocks are in slots of the arena, or on their way there."""
        self._clock = port.manager.ladder.clock
        self._notices = Notices(self._clock.now, every_s=ADVICE_EVERY_S)
        self._recent: deque[tuple[float, str]] = deque(maxlen=SUSTAINED)
        """When requests were suspended, and how."""
        self._counted: dict[str, Counter[str]] = {
            name: Counter(tiers=0, recompute=0) for name in ("suspended", "resumed")
        }
        self._over = 0
        """Of those that were suspended, how many went on or never will."""

    def counts(self) -> dict[str, Any]:
        """How many requests were suspended and resumed, by how, and how many wait; any thread."""
        waiting = sum(self._counted["suspended"].values()) - self._over
        return {**{name: dict(by) for name, by in self._counted.items()}, "waiting": waiting}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of a prompt in ``seconds``; the manager hears it."""
        self._port.manager.prefilled(tokens, seconds)
        if tokens > 0:
            self._token_s = blended(self._token_s, seconds / tokens)

    def costs_s(self, request: Request) -> dict[How, float | None]:
        """What suspending and resuming costs, as measured so far; None where nothing was.

        Until both directions were copied in, for this or to and from the tiers, the other is
        taken to be as fast.
        """
        held = zip(request.parts, self._block_bytes, strict=True)
        size = sum(len(part.held) * each for part, each in held)
        byte_s = self._port.byte_s.values()
        compute = None if self._token_s is None else request.computed * self._token_s
        return {"tiers": 2 * size * fmean(byte_s) if byte_s else None, "recompute": compute}

    def choice(self, request: Request) -> How:
        """The cheaper way; copying, as long as nothing was measured."""
        costs = self.costs_s(request)
        copying, computing = costs["tiers"], costs["recompute"]
        if copying is None or computing is None:
            return "tiers"
        return "tiers" if copying <= computing else "recompute"

    def suspend(self, request: Request, how: How | None = None) -> Suspended:
        """Have a request that is ready give its device memory up; None chooses how.

        If the arena has no room for all of its blocks it will be recomputed. Its slots are free
        when ``copies_left`` is 0, after ``poll``; the request itself is not used any more.

        Raises
        ------
        NotHeld, NotReady
            It was released, or its blocks are not in place.
        """
        request.require_ready()
        suspended = self._suspend(request, self.choice(request) if how is None else how)
        self._counted["suspended"][suspended.how] += 1
        self._recent.append((self._clock.now(), suspended.how))
        self._advise()
        return suspended

    def _advise(self) -> None:
        """Say what helps, once in a while, where requests make way again and again."""
        first_s, last_s = self._recent[0][0], self._recent[-1][0]
        if len(self._recent) < SUSTAINED or last_s - first_s > SUSTAINED_S:
            return
        again = sum(how == "recompute" for _, how in self._recent)
        self._notices.say(
            "preemption",
            f"{SUSTAINED} requests gave their device memory up within {last_s - first_s:.0f} s,"
            f" {again} of them to be computed again. What helps: fewer requests at a time, a"
            " shorter context, more for the pools (gpu.memory, gpu.fraction), or keys and values"
            " in fp8 (gpu.dtype); see docs/out-of-memory.md",
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
        """Go on with a suspended request; run it when it is ``ready``.

        One that is recomputed, as after ``DeviceCache.rename``, has fewer tokens ``computed`` than
        it had, and slots for ``room``
        tokens behind those; None for all. ``Requests.extend`` gets more.

        Raises
        ------
        NotReady
            Its blocks are still being read, or it was resumed or discarded before.
        OutOfBlocks, BlocksBusy
            There is no room, or not yet; nothing is held, ask again.
        """
        if suspended.copies_left or suspended.over:
            raise NotReady("still being suspended" if suspended.copies_left else "resumed before")
        if any(part.renamed for part in suspended.parts):  # what was copied is of no use any more
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
        """What is still on the device is shared again, the rest is copied from its slots."""
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
        pool.retain(given)  # for the copy, should the request leave before it has ended
        pool.copying(given)

        def ended(ok: bool) -> None:
            part.landed(ticket, ok=ok)
            pool.copies_ended(given)
            pool.release(given)
            self._port.unlease(slots)

        ticket = self._port.copy(group, "onboard", given, slots, ended)
        part.wait([ticket])

    def discard(self, suspended: Suspended) -> None:
        """A suspended request is not going to go on; once its copies have ended."""
        if suspended.copies_left:
            raise NotReady("still being suspended")
        self._over += not suspended.over
        suspended.over = True
        self._free(suspended)

    def close(self) -> None:
        """Give the slots of all that is suspended back; no copy is under way any more."""
        for suspended in list(self._suspended):
            suspended.over = True
            self._free(suspended)
