"""The client's end of a connection to one far end, and the line that makes it again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
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
    Lookup,
    Message,
    Offer,
    Ping,
    Pong,
    Purge,
    Remove,
    Reply,
    Stored,
    Welcome,
    WireError,
    area_in,
    frame,
    labels_packed,
    reply,
)
from kvladder.tiers.nixl.plane import Plane
from kvladder.tiers.nixl.pump import Pump, doze

HEARTBEAT_S = 0.5
SILENT_MAX = 4
"""Heartbeats without an answer after which a far end is taken for dead."""
CONNECT_S = 5.0
RETRY_S, RETRY_MAX_S = 0.2, 5.0
TIMEOUT_S = 60.0
"""For a call whose level waits for ever."""
INNER = 0.5
"""Of a call's time: after it the call is given up here, so that the fence fits into the rest."""
QUIET_S = 0.4
"""How long what was given up may go on before the fence; less where a call has little time."""

R = TypeVar("R", bound=Message)


class Client(NamedTuple):
    """What all connections of a tier have in common."""

    namespace: Namespace
    block_bytes: int
    plane: Callable[[], Awaitable[Plane]]
    """Makes one; half a second, the first time."""
    timeout_s: float | None
    nap: Callable[[], None] = doze


class Channel:
    """Questions and answers; once broken it stays so, and whoever made it closes it."""

    def __init__(self, dial: Dial) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._joined = False
        """Whether the far end is to know this one."""
        self._silent = 0
        self.broken: asyncio.Future[TierError] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._control = dial(self._take, self.fail)

    async def greet(self) -> None:
        """See whether anybody is there who knows this end; raises TierError."""
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
            self.fail(TierError("it does not know this end any more"))
        future = self._waiting.get(message.op)
        if future is not None and not future.done():
            future.set_result(message)

    async def _asked(self, message: Message, wanted: type[R], within_s: float | None = None) -> R:
        """The answer to a message; raises TierError."""
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
            self._lies(f"{type(answer).__name__} is no answer to {type(message).__name__}")
        return answer

    def _lies(self, how: str) -> NoReturn:
        error = TierError(f"it does not keep to the protocol: {how}")
        self.fail(error)
        raise error

    def fail(self, error: TierError) -> None:
        """It is broken: nobody waits for an answer any more."""
        if not self.broken.done():
            self.broken.set_result(_again(error))
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_again(error))

    def close(self) -> None:
        """End it; may be called again."""
        self.fail(TierError("the tier is closed", temporary=False))
        if not self.closed.done():
            self._control.close()
            self.closed.set_result(None)


class Connection(Channel):
    """A session with a far end, and the agent that is its alone.

    An operation that is given up, or whose connection breaks, ends when nothing touches its slots:
    by the far end's word, or by ``close``, the fence.
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

    # ---- the beginning and the end

    async def open(self) -> None:
        """Begin the session; raises TierError, not temporary if it is refused."""
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
        self._beating = asyncio.create_task(self._beat(), name="kvladder-nixl-beat")

    async def _beat(self) -> None:
        """See whether the far end lives. Beats are counted, in case this process was stopped."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._silent += 1
            if self._silent > SILENT_MAX:
                self.fail(TierError("it is silent"))
            self._send(Ping(self._number()))
            self._pump.touch()

    def close(self) -> None:
        """The fence: after it nothing of this connection touches a slot, here or there."""
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
        """A byte for each key, 1 if it is there."""
        message = Lookup(self._number(), b"".join(keys))
        have = (await self._asked(message, Found, self._limit_s)).have
        if len(have) != len(keys):
            self._lies(f"{len(have)} answers to {len(keys)} keys")
        return have

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Have it forget blocks."""
        await self._asked(Remove(self._number(), b"".join(keys)), Done, self._limit_s)

    async def purge(self, salt: bytes | None) -> int:
        """Have it forget all blocks of this namespace, or those of one salt in it; how many."""
        return (await self._asked(Purge(self._number(), salt), Done)).count

    async def get(self, keys: Sequence[bytes], slots: Sequence[int]) -> Got:
        """Have blocks written into slots here; a length of 0 is a miss."""
        message = Get(self._number(), b"".join(keys), list(slots))
        async with self._operation(message.op):
            with self._pump.busy():
                got = await self._asked(message, Got)
        if not len(got.lengths) * LABEL_BYTES == len(got.labels) == len(slots) * LABEL_BYTES:
            self._lies(f"{len(got.lengths)} lengths of {len(slots)} blocks")
        return got

    async def put(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        lengths: Sequence[int],
        facts: Sequence[Facts],
        label: Callable[[Sequence[int]], Awaitable[Sequence[bytes]]],
    ) -> list[bool | None]:
        """Write blocks from slots here; ``label`` makes the labels of those that are wanted.

        Returns whether each is there now; None if it may be offered again at once.
        """
        op = self._number()
        async with self._operation(op):
            offer = Offer(op, b"".join(keys), list(lengths), [*facts])
            granted = (await self._asked(offer, Grant)).slots
            if len(granted) != len(keys) or max(granted) >= self._far_slots:
                self._lies("slots that it does not have")
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
        """Write what is wanted, and meanwhile make its labels; those of all, packed."""
        wanted = [n for n, slot in enumerate(granted) if slot >= 0]
        picked = ([column[n] for n in wanted] for column in (slots, granted, lengths))
        writing = self._pump.write(*picked)
        try:
            await asyncio.sleep(0)  # first the bytes: they travel while labels are made
            made = dict(zip(wanted, await label(wanted), strict=True))
            await asyncio.shield(writing)
        finally:  # until it has ended, bytes of slots here are sent
            with self._fence_later():
                await _ended(writing)
        return labels_packed(made.get(n, b"") for n in range(len(slots)))

    # ---- what is given up

    @asynccontextmanager
    async def _operation(self, op: int) -> AsyncGenerator[None]:
        """An operation that touches slots: it has a limit, and a sure end."""
        try:
            async with asyncio.timeout(self._limit_s):
                yield
        except (TimeoutError, asyncio.CancelledError, TierError) as error:
            await self._give_up(op)
            if isinstance(error, TimeoutError):
                raise TierError(f"no answer within {self._limit_s:g} s") from None
            raise

    async def _give_up(self, op: int) -> None:
        """Wait until nothing touches the slots of an operation."""
        with self._pump.busy(), self._fence_later():
            abort = asyncio.ensure_future(self._asked(Abort(self._number(), op), Done))
            await _ended(abort)
        if abort.exception() is not None:
            self.fail(TierError("it did not say what became of an operation"))
            await _ended(self.closed)

    @contextmanager
    def _fence_later(self) -> Generator[None]:
        """If this takes too long the connection breaks, which ends it."""
        late = TierError("it does not let go of slots")
        timer = self._loop.call_later(self._quiet_s, self.fail, late)
        try:
            yield
        finally:
            timer.cancel()


async def greet(dial: Dial) -> None:
    """See whether anybody is there who knows this end; raises TierError."""
    channel = Channel(dial)
    try:
        await channel.greet()
    finally:
        channel.close()


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait for it, whatever comes of it and whoever gives up meanwhile."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({future})


class Line:
    """A far end, connected whenever that can be done; without it calls fail at once.

    Parameters
    ----------
    address:
        Host and port, for messages.
    say:
        Is told when the connection breaks, and why.
    name:
        What stays when the far end comes back at another address; the address if it is empty.
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
        """Connections that broke."""
        self._running = asyncio.create_task(self._run(), name=f"kvladder-nixl-{address}")

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self._here is not None

    @property
    def error(self) -> TierError:
        """Why it is not connected."""
        return TierError(f"{self.address}: {self._error}", temporary=self._error.temporary)

    async def tried(self) -> bool:
        """Wait for the first attempt; whether it is connected."""
        await self._tried.wait()
        return self.is_up

    @property
    def here(self) -> Connection:
        """The connection; raises TierError if there is none."""
        if self._here is None:
            raise self.error
        return self._here

    async def _run(self) -> None:
        wait_s = RETRY_S
        while True:
            connection = Connection(self._client, self._dial)
            try:
                await connection.open()
                self._here, wait_s = connection, RETRY_S
                self._tried.set()
                self._error = await asyncio.shield(connection.broken)
                self.breaks += 1
                self._say(f"{self.address}: {self._error}: it is connected again")
            except TierError as error:
                self._error = TierError(str(error), temporary=error.temporary)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
            finally:
                self._here = None
                connection.close()
                self._tried.set()
            await asyncio.sleep(wait_s)

    async def aclose(self) -> None:
        """End the connection; calls under way fail when nothing touches their slots any more."""
        self._error = TierError("the tier is closed", temporary=False)
        self._running.cancel()
        await asyncio.wait({self._running})
        self._error = TierError("the tier is closed", temporary=False)


def _again(error: TierError) -> TierError:
    """The same, without the traceback of who met it first."""
    return TierError(str(error), temporary=error.temporary)
