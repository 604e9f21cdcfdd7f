"""One client of an exporter: its operations, and the slots that they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvladder.errors import TierError
from kvladder.export.bounds import OPERATIONS_MAX
from kvladder.export.offers import Offers, Pinned
from kvladder.tiers.nixl.messages import (
    REFUSED,
    WHY_MAX,
    Abort,
    Commit,
    Done,
    Failed,
    Found,
    Get,
    Got,
    Grant,
    Listed,
    Lookup,
    Offer,
    Ping,
    Pong,
    Purge,
    Remove,
    Reply,
    Request,
    Stored,
    Survey,
    WireError,
    facts_in,
    keys_in,
    labels_in,
    labels_packed,
)
from kvladder.tiers.nixl.plane import Area, Plane
from kvladder.tiers.nixl.pump import Pump, doze


class Session:
    """Does what one client asks for. It ends if the plane fails, or by ``fence`` and ``close``.

    Parameters
    ----------
    number:
        The cache's number of this session.
    plane:
        Joined to the client's plane; used by this session alone.
    far:
        The client's slots, the only ones that are written to.
    writable:
        Whether the client may put, remove and purge.
    block_bytes:
        Bytes of the longest block that fits into one of the client's slots.
    send:
        Sends a reply to the client.
    failed:
        Called once with the reason when the session fails.
    """

    def __init__(
        self,
        number: int,
        offers: Offers,
        plane: Plane,
        *,
        far: Area,
        block_bytes: int,
        writable: bool,
        send: Callable[[Reply], object],
        failed: Callable[[TierError], object],
        nap: Callable[[], None] = doze,
    ) -> None:
        self.number = number
        self._offers = offers
        self._plane = plane
        self._far = far
        self._block_bytes = block_bytes
        self._writable = writable
        self._send = send
        self._failed = failed
        self._pump = Pump(plane, self._broke, nap)
        self._last = 0
        """Highest number of an operation so far."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._firm: set[int] = set()
        """Operations that only ``close`` cancels; an abort waits until they end by themselves."""
        self._unwanted: set[int] = set()
        """Aborted operations; if firm, they run on but begin no further part."""
        self._granted: dict[int, int] = {}
        """Number of blocks of each offer that was granted slots, by operation."""
        self._held: dict[int, int] = {}
        """Beats for which each operation has held slots while waiting for the client."""
        self._silent = 0
        self._over = False
        self.refused = 0
        """Number of invalid messages of the client."""

    @property
    def pending(self) -> int:
        """Number of operations that have not ended, uncommitted grants included."""
        return len(self._tasks) + len(self._granted)

    # ---- the end

    def _broke(self, error: TierError) -> None:
        if not self._over:
            self._over = True
            self._failed(error)

    def beat(self, silent_max: int, held_max: int) -> None:
        """Count a beat. End the session if it exceeds ``silent_max`` or ``held_max`` beats."""
        self._silent += 1
        for op in self._held:
            self._held[op] += 1
        if self._silent > silent_max:
            self._broke(TierError("the client was silent for too long"))
        elif max(self._held.values(), default=0) > held_max:
            self._broke(TierError("the client held slots for too long"))
        else:
            self._pump.touch()

    def mute(self) -> None:
        """Ignore and answer no further message; ``fence`` and ``close`` follow."""
        self._over = True

    def fence(self) -> None:
        """End the data plane: no byte is transferred afterwards. Call once, before ``close``."""
        self._over = True
        self._plane.destroy()
        self._pump.close(TierError("the session is over"))

    async def close(self) -> None:
        """Cancel all operations and free all that the client held."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with suppress(TierError):  # the cache is gone, and its slots with it
            await self._offers.gone(self.number)

    # ---- messages

    def take(self, message: Request) -> None:
        """Begin what the client asks for; raise WireError if the message is invalid."""
        self._silent = 0
        if self._over:
            return
        match message:
            case Ping():
                self._send(Pong(message.op, known=True))
            case Commit():
                # A commit may come before the task of its offer is seen to have ended.
                if (count := self._granted.pop(message.op, None)) is None:
                    raise WireError("a commit of slots that were not granted")
                self._held.pop(message.op, None)
                self._pump.end()
                self._firm.add(message.op)
                self._begin(message.op, self._commit(message, count))
            case _ if message.op <= self._last:
                raise WireError("an operation number that was already used")
            case Abort():
                if message.of >= message.op:
                    raise WireError("an abort of an operation that has not begun")
                self._begin(message.op, self._abort(message))
            case _ if len(self._tasks) + len(self._granted) >= OPERATIONS_MAX:
                self._send(Failed(message.op, "too many operations at once"))
            case Lookup():
                self._begin(message.op, self._lookup(message))
            case Get():
                self._begin(message.op, self._get(message))
            case Offer() | Remove() | Purge() | Survey() if not self._writable:
                self._begin(message.op, self._unwritten(message))
            case Offer():
                self._begin(message.op, self._offer(message))
            case Remove():
                self._begin(message.op, self._remove(message))
            case Survey():
                self._begin(message.op, self._survey(message))
            case Purge():
                self._begin(message.op, self._purge(message))
            case _:
                raise WireError(f"unexpected in a session: {type(message).__name__}")

    def _begin(self, op: int, work: Coroutine[Any, Any, Reply]) -> None:
        self._last = max(self._last, op)
        task = self._tasks[op] = asyncio.create_task(self._answered(op, work))
        task.add_done_callback(partial(self._ended, op, work))

    def _ended(self, op: int, work: Coroutine[Any, Any, Reply], task: asyncio.Task[None]) -> None:
        work.close()  # it may have been cancelled before it began
        if self._tasks.get(op) is task:
            del self._tasks[op]
            self._firm.discard(op)
            self._unwanted.discard(op)

    async def _answered(self, op: int, work: Coroutine[Any, Any, Reply]) -> None:
        """Await ``work`` and send its answer, or its failure, to the client."""
        try:
            answer: Reply = await work
        except WireError as error:
            self.refused += 1
            answer = Failed(op, str(error)[:WHY_MAX], final=True)
        except TierError as error:
            answer = Failed(op, str(error)[:WHY_MAX])
        except asyncio.CancelledError:
            answer = Failed(op, "the operation was cancelled")
        if not self._over:
            self._send(answer)

    # ---- requests

    async def _lookup(self, message: Lookup) -> Reply:
        keys = keys_in(message.keys)
        return Found(message.op, bytes(await self._offers.have(self.number, keys)))

    async def _get(self, message: Get) -> Reply:
        """Pin the blocks that exist, write them to the client, and answer with their labels."""
        op, slots = message.op, message.slots
        keys = keys_in(message.keys, len(slots))
        if any(not 0 <= slot < self._far.slots for slot in slots) or len({*slots}) < len(slots):
            raise WireError("slots that the client does not have, or has named twice")
        found: list[Pinned | None] = []
        while len(found) < len(keys) and op not in self._unwanted:
            piece = await self._sent(op, keys[len(found) :], slots[len(found) :])
            if not piece:
                break
            found += piece
        found += [None] * (len(keys) - len(found))
        lengths = [one.length if one else 0 for one in found]
        return Got(op, lengths, labels_packed(one.label if one else b"" for one in found))

    async def _sent(
        self, op: int, keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[Pinned | None]:
        """Write the first blocks that there is room for to the client; return them."""
        try:
            pinned = await self._offers.pin(self.number, op, keys)
            found = [one if one and self._fits(one.length) else None for one in pinned]
            pairs = [(one, slot) for one, slot in zip(found, slots, strict=False) if one]
            if pairs:
                self._firm.add(op)
                self._held[op] = 0
                await self._pump.write(
                    [one.slot for one, _ in pairs],
                    [slot for _, slot in pairs],
                    [one.length for one, _ in pairs],
                )
        finally:
            self._held.pop(op, None)
            self._firm.add(op)
            await self._offers.release(self.number, op)
        self._firm.discard(op)
        return found

    def _fits(self, length: int) -> bool:
        return 0 < length <= self._block_bytes

    async def _unwritten(self, message: Offer | Remove | Purge | Survey) -> Reply:
        """Answer a read-only client: refuse all its blocks, remove nothing, and list nothing."""
        if isinstance(message, Survey):
            return Failed(message.op, "this client may not list blocks", final=True)
        if isinstance(message, Offer):
            return Grant(message.op, [REFUSED] * len(message.lengths))
        return Done(message.op)

    async def _offer(self, message: Offer) -> Reply:
        """Ask the cache for slots. They stay granted until commit or abort."""
        op, count = message.op, len(message.lengths)
        keys, facts = keys_in(message.keys, count), facts_in(message.facts)
        if len(facts) != count or not all(map(self._fits, message.lengths)):
            raise WireError("blocks of a wrong length, or without facts for each")
        try:
            slots = await self._offers.grant(self.number, op, keys, message.lengths, facts)
        except BaseException:
            await self._offers.abort(self.number, op)
            raise
        if max(slots, default=REFUSED) < 0:
            await self._offers.abort(self.number, op)
        else:
            self._granted[op], self._held[op] = count, 0
            self._pump.begin()
        return Grant(op, [int(slot) for slot in slots])

    async def _commit(self, message: Commit, count: int) -> Reply:
        """Publish the blocks that the client wrote."""
        op = message.op
        try:
            labels = labels_in(message.labels, count)
        except WireError:
            await self._offers.abort(self.number, op)
            raise
        return Stored(op, bytes(await self._offers.commit(self.number, op, labels)))

    async def _abort(self, message: Abort) -> Reply:
        """End another operation: cancel it, or wait for it if it is firm; return its slots."""
        of = message.of
        if (task := self._tasks.get(of)) is not None:
            self._unwanted.add(of)
            if of not in self._firm:
                task.cancel()
            await asyncio.wait({task})
        if self._granted.pop(of, None) is not None:
            self._held.pop(of, None)
            self._pump.end()
            await self._offers.abort(self.number, of)
        return Done(message.op)

    async def _remove(self, message: Remove) -> Reply:
        await self._offers.remove(self.number, keys_in(message.keys))
        return Done(message.op)

    async def _purge(self, message: Purge) -> Reply:
        return Done(message.op, await self._offers.purge(self.number, message.salt or None))

    async def _survey(self, message: Survey) -> Reply:
        of = message.of or message.op
        keys, more = await self._offers.survey(self.number, of, message.salt)
        return Listed(message.op, b"".join(keys), more)
