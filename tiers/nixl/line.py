"""The client's end of a connection to one far end, and the line that keeps reconnecting it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, NoReturn, TypeVar

from kvladder.errors import TierError
from kvladder.keys import Namespace
from kvladder.tiers.label import LABEL_BYTES, Facts
from kvladder.tiers.nixl.control import Dial
from kvladder.tiers.nixl.messages import (
    HAVE,
    LATER,
    Abort,
    Bye,
    Commit,
    Done,
    Failed,
    Found,
    Get,
    Gone,
    Got,
    Grant,
    Hello,
    Listed,
    Lookup,
    Message,
    Offer,
    Ping,
    Pong,
    Purge,
    Remove,
    Reply,
    Stored,
    Survey,
    Welcome,
    WireError,
    area_in,
    frame,
    keys_in,
    labels_packed,
    reply,
)
from kvladder.tiers.nixl.plane import Plane
from kvladder.tiers.nixl.pump import Pump, doze

HEARTBEAT_S = 0.5
SILENT_MAX = 4
"""Heartbeats without an answer after which the connection counts as broken."""
CONNECT_S = 5.0
RETRY_S, RETRY_MAX_S = 0.2, 5.0
TIMEOUT_S = 60.0
"""Time limit of a call if its level sets none."""
INNER = 0.5
"""Share of a call's time after which the call is aborted here, so the fence fits in the rest."""
QUIET_S = 0.4
"""Seconds that an aborted operation has to end before the fence; less for short time limits."""

R = TypeVar("R", bound=Message)


async def _one_key() -> int:
    """Return 1: the keys stay as they are."""
    return 1


class Client(NamedTuple):
    """The settings that all connections of a tier share."""

    namespace: Namespace
    block_bytes: int
    plane: Callable[[], Awaitable[Plane]]
    """Makes a plane; this takes half a second the first time."""
    timeout_s: float | None
    nap: Callable[[], None] = doze
    renew: Callable[[], Awaitable[int]] = _one_key
    """Called before each connection: reads this end's keys again, and returns how many public keys
    the far end may have."""


class Channel:
    """Requests and their answers. Once broken, a channel stays broken; its owner must close it."""

    def __init__(self, dial: Dial) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._joined = False
        """True once the session has begun, so that the far end must know this end."""
        self._silent = 0
        self.broken: asyncio.Future[TierError] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._control = dial(self._take, self.fail)

    async def greet(self) -> None:
        """Check that the far end answers and knows this end's key; raise TierError if not."""
        await self._asked(Ping(self._number()), Pong, CONNECT_S)

    def _number(self) -> int:
        return next(self._numbers)

    def _send(self, message: Message) -> None:
        self._control.send(frame(message))

    def _take(self, data: bytes) -> None:
        self._silent = 0
        try:
            message = reply(data)
        except WireError as error:
            self.fail(TierError(str(error), temporary=False))
            return
        if isinstance(message, Gone):
            self.fail(TierError(message.why))
        elif isinstance(message, Pong) and self._joined and not message.known:
            self.fail(TierError("it no longer knows this client"))
        future = self._waiting.get(message.op)
        if future is not None and not future.done():
            future.set_result(message)

    async def _asked(self, message: Message, wanted: type[R], within_s: float | None = None) -> R:
        """Send a message and return its answer; raise TierError if it fails or comes too late."""
        if self.broken.done():
            raise _again(self.broken.result())
        future = self._waiting[message.op] = self._loop.create_future()
        self._send(message)
        try:
            async with asyncio.timeout(within_s):
                answer = await future
        except TimeoutError:
            raise TierError(f"no answer within {within_s:g} s") from None
        finally:
            del self._waiting[message.op]
        if isinstance(answer, Failed):
            raise TierError(answer.why, temporary=not answer.final)
        if not isinstance(answer, wanted):
            self._lies(f"{type(answer).__name__} is not an answer to {type(message).__name__}")
        return answer

    def _lies(self, how: str) -> NoReturn:
        error = TierError(f"it does not keep to the protocol: {how}")
        self.fail(error)
        raise error

    def fail(self, error: TierError) -> None:
        """Mark the channel as broken, and fail all pending requests; only the first call counts."""
        if not self.broken.done():
            self.broken.set_result(_again(error))
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_again(error))

    def close(self) -> None:
        """Close the channel; may be repeated."""
        self.fail(TierError("the tier is closed", temporary=False))
        if not self.closed.done():
            self._control.close()
            self.closed.set_result(None)


class Connection(Channel):
    """A session with a far end, with a data plane (a NIXL agent) of its own.

    An aborted operation ends only when nothing touches its slots any more. Either the far end
    confirms this, or ``close`` ensures it by destroying the agent: the fence.
    """

    def __init__(self, client: Client, dial: Dial) -> None:
        super().__init__(dial)
        self._client = client
        self._limit_s = INNER * (client.timeout_s or TIMEOUT_S)
        self._quiet_s = min(QUIET_S, INNER * self._limit_s)
        self._plane: Plane | None = None
        self._pump: Pump
        self._beating: asyncio.Task[None] | None = None
        self._far_slots = 0
        self.writable = False
        self.surveys = False

    # ---- opening and closing

    async def open(self) -> None:
        """Begin the session; raise TierError if that fails, not temporary if it is refused."""
        await self.greet()
        client = self._client
        self._plane = plane = await client.plane()
        self._pump = Pump(plane, self.fail, client.nap)
        hello = Hello(
            self._number(), client.namespace, client.block_bytes, plane.metadata, plane.area
        )
        welcome = await self._asked(hello, Welcome, CONNECT_S)
        try:
            far = area_in(welcome.area, client.block_bytes)
        except WireError as error:
            raise TierError(str(error), temporary=False) from error
        plane.join(welcome.metadata, far, client.block_bytes)
        self.writable, self._far_slots, self._joined = welcome.writable, far.slots, True
        self.surveys = welcome.surveys
        self._beating = asyncio.create_task(self._beat(), name="kvladder-nixl-beat")

    async def _beat(self) -> None:
        """Check that the far end is alive, for ever.

        Missed heartbeats are counted, not timed. So if this process was suspended, the far end is
        not taken for dead.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._silent += 1
            if self._silent > SILENT_MAX:
                self.fail(TierError("it does not answer heartbeats"))
            self._send(Ping(self._number()))
            self._pump.touch()

    def close(self) -> None:
        """Close the connection. This is the fence: it touches no slot any more, at either end."""
        self.fail(TierError("the tier is closed", temporary=False))
        if self._beating is not None:
            self._beating.cancel()
        if self._plane is not None:
            self._send(Bye(self._number()))
            self._plane.destroy()
            self._plane = None
            self._pump.close(self.broken.result())
        super().close()

    # ---- the calls

    async def lookup(self, keys: Sequence[bytes]) -> bytes:
        """Return a byte for each key: 1 if the far end has the block, else 0."""
        message = Lookup(self._number(), b"".join(keys))
        have = (await self._asked(message, Found, self._limit_s)).have
        if len(have) != len(keys):
            self._lies(f"{len(have)} answers to {len(keys)} keys")
        return have

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the far end."""
        await self._asked(Remove(self._number(), b"".join(keys)), Done, self._limit_s)

    async def purge(self, salt: bytes | None) -> int:
        """Remove all blocks of this namespace, or of one salt in it; return how many."""
        return (await self._asked(Purge(self._number(), salt), Done)).count

    async def survey(self, salt: bytes | None) -> AsyncIterator[list[bytes]]:
        """Yield the blocks of this namespace, or of one salt in it, that the far end has."""
        of, more = 0, True
        while more:
            message = Survey(self._number(), salt, of)
            of = of or message.op
            listed = await self._asked(message, Listed, TIMEOUT_S)
            try:
                keys = keys_in(listed.keys)
            except WireError as error:
                self._lies(str(error))
            yield keys
            more = listed.more

    async def get(self, keys: Sequence[bytes], slots: Sequence[int]) -> Got:
        """Let the far end write blocks into slots here; a length of 0 in the answer is a miss."""
        message = Get(self._number(), b"".join(keys), list(slots))
        async with self._operation(message.op):
            with self._pump.busy():
                got = await self._asked(message, Got)
        if not len(got.lengths) * LABEL_BYTES == len(got.labels) == len(slots) * LABEL_BYTES:
            self._lies(f"{len(got.lengths)} lengths for {len(slots)} blocks")
        return got

    async def put(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        lengths: Sequence[int],
        facts: Sequence[Facts],
        label: Callable[[Sequence[int]], Awaitable[Sequence[bytes]]],
    ) -> list[bool | None]:
        """Write blocks from slots here to the far end.

        ``label`` makes the labels of the blocks that the far end wants, given by index. Returns
        for each block whether the far end has it now; None if it may be offered again at once.
        """
        op = self._number()
        async with self._operation(op):
            offer = Offer(op, b"".join(keys), list(lengths), [*facts])
            granted = (await self._asked(offer, Grant)).slots
            if len(granted) != len(keys) or max(granted) >= self._far_slots:
                self._lies("it granted too few or too many slots, or slots that it does not have")
            stored = bytes(len(keys))
            if max(granted) >= 0:
                labels = await self._written(slots, granted, lengths, label)
                stored = (await self._asked(Commit(op, labels), Stored)).stored
        if len(stored) != len(keys):
            self._lies(f"{len(stored)} answers to {len(keys)} blocks")
        return [
            None if slot == LATER else slot == HAVE or bool(one)
            for slot, one in zip(granted, stored, strict=True)
        ]

    async def _written(
        self,
        slots: Sequence[int],
        granted: Sequence[int],
        lengths: Sequence[int],
        label: Callable[[Sequence[int]], Awaitable[Sequence[bytes]]],
    ) -> bytes:
        """Write the wanted blocks and make their labels meanwhile; return all labels, packed."""
        wanted = [n for n, slot in enumerate(granted) if slot >= 0]
        picked = ([column[n] for n in wanted] for column in (slots, granted, lengths))
        writing = self._pump.write(*picked)
        try:
            await asyncio.sleep(0)  # post the bytes first: they travel while labels are made
            made = dict(zip(wanted, await label(wanted), strict=True))
            await asyncio.shield(writing)
        finally:  # the slots here are in use until the write has ended
            with self._fence_later():
                await _ended(writing)
        return labels_packed(made.get(n, b"") for n in range(len(slots)))

    # ---- aborted operations

    @asynccontextmanager
    async def _operation(self, op: int) -> AsyncGenerator[None]:
        """Run an operation that uses slots, with a time limit; on failure, wait for its end."""
        try:
            async with asyncio.timeout(self._limit_s):
                yield
        except (TimeoutError, asyncio.CancelledError, TierError) as error:
            await self._give_up(op)
            if isinstance(error, TimeoutError):
                raise TierError(f"no answer within {self._limit_s:g} s") from None
            raise

    async def _give_up(self, op: int) -> None:
        """Abort an operation and wait until nothing touches its slots."""
        with self._pump.busy(), self._fence_later():
            abort = asyncio.ensure_future(self._asked(Abort(self._number(), op), Done))
            await _ended(abort)
        if abort.exception() is not None:
            self.fail(TierError("it did not confirm that an aborted operation ended"))
            await _ended(self.closed)

    @contextmanager
    def _fence_later(self) -> Generator[None]:
        """Break the connection, which ends every operation, if the body takes too long."""
        late = TierError("it did not release slots in time")
        timer = self._loop.call_later(self._quiet_s, self.fail, late)
        try:
            yield
        finally:
            timer.cancel()


async def greet(dial: Dial) -> None:
    """Check that a far end answers and knows this end's key; raise TierError if not."""
    channel = Channel(dial)
    try:
        await channel.greet()
    finally:
        channel.close()


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` is done, even if the waiter is cancelled meanwhile."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({future})


class Line:
    """Keeps a far end connected, with retries; while it is not connected, calls fail at once.

    Parameters
    ----------
    address:
        Host and port, for messages.
    say:
        Called with a text when the connection breaks.
    name:
        Name that stays the same if the far end returns at another address; by default the address.
    """

    def __init__(
        self,
        address: str,
        client: Client,
        dial: Dial,
        say: Callable[[str], object],
        name: str = "",
    ) -> None:
        self.address = address
        self.name = name or address
        self._client = client
        self._dial = dial
        self._say = say
        self._here: Connection | None = None
        self._error = TierError("it is not connected yet")
        self._tried = asyncio.Event()
        self.breaks = 0
        """Number of connections that broke."""
        self._running = asyncio.create_task(self._run(), name=f"kvladder-nixl-{address}")

    @property
    def is_up(self) -> bool:
        """True if the far end is connected."""
        return self._here is not None

    @property
    def error(self) -> TierError:
        """Reason why the far end is not connected."""
        return TierError(f"{self.address}: {self._error}", temporary=self._error.temporary)

    async def tried(self) -> bool:
        """Wait for the first attempt with each key; return whether the far end is connected."""
        await self._tried.wait()
        return self.is_up

    @property
    def here(self) -> Connection:
        """The connection; TierError if there is none."""
        if self._here is None:
            raise self.error
        return self._here

    async def _run(self) -> None:
        wait_s, attempts = RETRY_S, 0
        while True:
            keys, attempts = await self._client.renew(), attempts + 1
            connection = Connection(self._client, self._dial)
            try:
                await connection.open()
                self._here, wait_s = connection, RETRY_S
                self._tried.set()
                self._error = await asyncio.shield(connection.broken)
                self.breaks += 1
                self._say(f"{self.address}: {self._error}: kvladder connects again")
            except TierError as error:
                self._error = TierError(str(error), temporary=error.temporary)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
            finally:
                self._here = None
                connection.close()
                if attempts >= keys:
                    self._tried.set()
            await asyncio.sleep(wait_s)

    async def aclose(self) -> None:
        """Close the connection; calls in flight fail once nothing touches their slots any more."""
        self._error = TierError("the tier is closed", temporary=False)
        self._running.cancel()
        await asyncio.wait({self._running})
        self._error = TierError("the tier is closed", temporary=False)


def _again(error: TierError) -> TierError:
    """Return a copy of the error without the traceback of the first raise."""
    return TierError(str(error), temporary=error.temporary)
