"""``Offers`` over a socket pair: the exporter's process calls, the cache's process answers.

Frames are those of an isolated tier. No frame holds bytes of blocks: both processes map the arena.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvladder.arena import Arena
from kvladder.errors import TierError
from kvladder.export.offers import Offers, Pinned
from kvladder.tiers.isolated.child import failure
from kvladder.tiers.isolated.process import error_of
from kvladder.tiers.isolated.wire import Cancel, Close, Done, Failed, Message, Said, frame, take
from kvladder.tiers.label import Facts

T = TypeVar("T")
Verb = Literal[
    "hello", "have", "pin", "release", "grant", "commit", "abort", "remove", "purge", "gone"
]
_ARGUMENTS: Final[Mapping[Verb, Any]] = {
    "hello": tuple[int, bytes, int],
    "have": tuple[int, list[bytes]],
    "pin": tuple[int, int, list[bytes]],
    "release": tuple[int, int],
    "grant": tuple[int, int, list[bytes], list[int], list[Facts]],
    "commit": tuple[int, int, list[bytes]],
    "abort": tuple[int, int],
    "remove": tuple[int, list[bytes]],
    "purge": tuple[int, bytes | None],
    "gone": tuple[int],
}


class Serve(Message):
    """The settings, the first message to the exporter's process. ``Done`` answers its address."""

    arena: tuple[int, int, int] = (0, 0, 0)
    """Descriptor, number of slots, bytes of a slot."""
    block_bytes_max: int = 0
    writable: bool = False
    guarded: bool = True
    """True if clients can write to granted slots only."""
    listen: str = ""
    """Host and port."""
    keys: str = ""
    transports: str = "tcp"
    interfaces: str = "all"
    roster: str = ""
    host: str = ""
    """Host name or address that clients use to connect."""
    name: str = ""
    namespace: bytes = b""
    """Namespace of an engine and of its clients; empty for a server."""


class Call(Message):
    """One call of ``Offers``; answered by ``Done`` or ``Failed``."""

    verb: Verb = "have"
    arguments: Any = ()


class Gauges(Message):
    """Gauges and counters of the exporter, sent at intervals."""

    counts: dict[str, int] = msgspec.field(default_factory=dict[str, int])


from_child: Final = msgspec.msgpack.Decoder[Any](Call | Cancel | Done | Failed | Gauges | Said)
from_parent: Final = msgspec.msgpack.Decoder[Any](Serve | Done | Failed | Close)


class FarOffers:
    """``Offers`` of a cache in another process: the exporter's end of the link.

    A cancelled call is cancelled in the cache's process too, and ends when it has ended there.
    """

    def __init__(self, arena: Arena, told: Serve, writer: asyncio.StreamWriter) -> None:
        self.arena = arena
        self.block_bytes_max = told.block_bytes_max
        self.writable = told.writable
        self._writer = writer
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Done | Failed]] = {}
        self._open: dict[tuple[int, int], list[int]] = {}
        """Slots that clients may write to, by session and operation."""

    def say(self, text: str) -> None:
        """Send a message to the operator of the cache."""
        self._writer.write(frame(Said(text=text)))

    def take(self, message: Done | Failed) -> None:
        """Hand an answer to the call that awaits it."""
        future = self._calls.pop(message.number, None)
        if future is not None:
            future.set_result(message)

    def _send(self, verb: Verb, *arguments: Any) -> int:
        """Send a call; return its number."""
        number = next(self._numbers)
        self._writer.write(frame(Call(number, verb, arguments)))
        return number

    async def _call(self, returns: type[T], verb: Verb, *arguments: Any) -> T:
        number = self._send(verb, *arguments)
        future = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                if cancelled is None:
                    self._writer.write(frame(Cancel(number)))
                cancelled = error
        if cancelled is not None:
            raise cancelled
        answer = future.result()
        if isinstance(answer, Failed):
            raise error_of(answer)
        return msgspec.convert(answer.value, returns)

    async def hello(self, session: int, namespace: bytes, block_bytes: int) -> str:
        """See ``Offers``."""
        return await self._call(str, "hello", session, namespace, block_bytes)

    async def have(self, session: int, keys: Sequence[bytes]) -> bytes:
        """See ``Offers``."""
        return await self._call(bytes, "have", session, keys)

    async def pin(self, session: int, op: int, keys: Sequence[bytes]) -> Sequence[Pinned | None]:
        """See ``Offers``."""
        return await self._call(list[Pinned | None], "pin", session, op, keys)

    async def release(self, session: int, op: int) -> None:
        """See ``Offers``. Does not wait; later calls are answered after it has been done."""
        self._send("release", session, op)

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> Sequence[int]:
        """See ``Offers``. Only granted slots are writable, until commit or abort.

        Raises TierError also if the kernel cannot keep more ranges with different protection.
        """
        slots = await self._call(list[int], "grant", session, op, keys, lengths, facts)
        granted = self._open[session, op] = [slot for slot in slots if slot >= 0]
        try:
            self.arena.allow_writes(granted)
        except OSError as error:
            raise TierError(f"slots cannot be written to: {error.strerror}") from error
        return slots

    def _shut(self, session: int, op: int) -> None:
        """Forbid writes to the slots of a grant, before they are checked or reused."""
        try:
            self.arena.forbid_writes(self._open.pop((session, op), ()))
        except OSError as error:  # the exit unmaps all slots
            raise SystemExit(f"slots stay open to a client: {error}") from error

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> Sequence[bool]:
        """See ``Offers``."""
        self._shut(session, op)
        return await self._call(list[bool], "commit", session, op, labels)

    async def abort(self, session: int, op: int) -> None:
        """See ``Offers``."""
        self._shut(session, op)
        await self._call(object, "abort", session, op)

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        """See ``Offers``."""
        await self._call(object, "remove", session, keys)

    async def purge(self, session: int, salt: bytes | None) -> int:
        """See ``Offers``."""
        return await self._call(int, "purge", session, salt)

    async def gone(self, session: int) -> None:
        """See ``Offers``."""
        for number, op in [one for one in self._open if one[0] == session]:
            self._shut(number, op)
        await self._call(object, "gone", session)


class NearOffers:
    """Answers the calls of one exporter's process from the cache of this process.

    Parameters
    ----------
    told:
        Called with each message of the exporter's process that is not a call.
    """

    def __init__(self, offers: Offers, told: Callable[[Message], object]) -> None:
        self._offers = offers
        self._told = told
        self._tasks: dict[int, asyncio.Task[object]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer calls until the process is gone. No call is in flight afterwards.

        Raises ConnectionError at its end, and ValueError if it breaks the protocol.
        """
        try:
            while True:
                message = from_child.decode(await take(reader))
                if isinstance(message, Call):
                    task = asyncio.create_task(self._answer(message))
                    self._tasks[message.number] = task
                    task.add_done_callback(partial(self._answered, message.number, writer))
                elif not isinstance(message, Cancel):
                    self._told(message)
                elif (running := self._tasks.get(message.number)) is not None:
                    running.cancel()
        finally:
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _answer(self, call: Call) -> object:
        arguments = msgspec.convert(call.arguments, _ARGUMENTS[call.verb])
        return await getattr(self._offers, call.verb)(*arguments)

    def _answered(
        self, number: int, writer: asyncio.StreamWriter, task: asyncio.Task[object]
    ) -> None:
        """Send the answer of a call, also of a cancelled or failed one."""
        del self._tasks[number]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if not writer.is_closing():
            done = Done(number, task.result()) if error is None else failure(number, error)
            writer.write(frame(done))
