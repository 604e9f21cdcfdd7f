"""Typed calls between two processes over a socket pair: each end calls an object at the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

from kvladder.children.interface import Interface, Method
from kvladder.children.messages import (
    AnyMessage,
    Call,
    Cancel,
    Done,
    Failed,
    frame,
    take,
)
from kvladder.errors import TierError

T = TypeVar("T")


class PipeState(Enum):
    """The two states of a pipe."""

    OPEN = "open"
    """Calls are sent and answered."""
    CLOSED = "closed"
    """Nothing is sent or answered any more."""


class Handler(NamedTuple):
    """A method that the other end may call, and the function here that does it."""

    method: Method
    function: Callable[..., Any]

    def run(self, call: Call) -> Any:
        """Call the function; raise ValidationError if an argument has a wrong type."""
        return self.function(*self.method.unpack(call.arguments))

    async def finish(self, call: Call) -> Any:
        """Call the function and return the result; nothing is raised before it is awaited."""
        return await self.run(call)


class Pipe:
    """One end of the calls between two processes. It is open until its end, then closed for ever.

    ``stub`` returns an object whose methods call the other end. ``answer`` names the object here
    that the other end calls. Calls begin in the order in which they were made. A notification that
    fails is reported to the event loop, since no caller waits for it.

    A fault costs only the call that has it: an unknown method, an argument or a result of a wrong
    type, one that cannot be encoded, or one longer than ``FRAME_BYTES_MAX``. That call raises
    TierError, or TypeError for an argument that cannot be encoded here.

    A cancelled call is cancelled at the other end, too. It raises CancelledError when it has ended
    there. If that takes longer than ``late_s``, ``late`` is called, which may kill the other end.

    A pipe ends when the other end closes its socket or dies, also within a frame; when the other
    end sends a broken frame, which is too long or no message; or by ``aclose``. Then:

    1. The pipe is closed: each new call raises TierError at once, each notification is dropped.
       This end closes its socket, so that the pipe of the other end ends, too.
    2. Calls that run here are cancelled. All of them have ended before the next step.
    3. ``ended`` is awaited; for a child, it waits for the child's death.
    4. Calls that wait for an answer raise TierError.

    Parameters
    ----------
    other:
        Name of the other end, for messages.
    ended:
        Awaited in step 3, with a sentence about the broken frame or an empty string. It returns the
        message of the errors in step 4, or an empty string for the usual one.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: str,
        *,
        ended: Callable[[str], Awaitable[str]] | None = None,
        late: Callable[[], object] | None = None,
        late_s: float = 0.0,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._ended = ended
        self._late = late
        self._late_s = late_s
        self._state = PipeState.OPEN
        self._reason = f"{other} is gone"
        self._fault = ""
        self._handlers: dict[str, Handler] = {}
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Done | Failed]] = {}
        """Calls of this end that wait for an answer."""
        self._running: dict[int, asyncio.Task[Any]] = {}
        """Calls of the other end that run here."""
        self._reading = asyncio.create_task(self._read(), name=f"kvladder-pipe: {other}")
        self._reading.add_done_callback(self._fail)  # also if it is cancelled before it begins

    @property
    def state(self) -> PipeState:
        """The state of the pipe."""
        return self._state

    def stub(self, interface: Interface[T]) -> T:
        """Return an object whose methods call those of the other end."""
        methods = {name: self._caller(method) for name, method in interface.methods.items()}
        return cast("T", SimpleNamespace(**methods))

    def answer(self, interface: Interface[T], target: T) -> None:
        """Let the other end call these methods of ``target``; before anything else is awaited."""
        for name, method in interface.methods.items():
            if name in self._handlers:
                raise ValueError(f"two interfaces of one pipe have a method {name}")
            self._handlers[name] = Handler(method, getattr(target, name))

    async def join(self) -> str:
        """Wait until the pipe has ended, with all four steps.

        Returns a sentence about the broken frame that ended it, else an empty string.
        """
        await asyncio.wait({self._reading})
        return self._fault

    async def aclose(self) -> None:
        """End the pipe, and wait until it has ended; may be called again."""
        self._reading.cancel()
        await self.join()

    # ---- calls of this end

    def _caller(self, method: Method) -> Callable[..., Any]:
        if not method.one_way:
            return partial(self._call, method)
        notify = partial(self._notify, method)
        if not method.is_async:
            return notify

        async def begin(*arguments: Any, **named: Any) -> None:
            notify(*arguments, **named)

        return begin

    def _notify(self, method: Method, *arguments: Any, **named: Any) -> None:
        packed = method.pack(arguments, named)
        self._write(frame(Call(next(self._numbers), method.name, packed)))

    async def _call(self, method: Method, *arguments: Any, **named: Any) -> Any:
        if self._state is PipeState.CLOSED:
            raise TierError(self._reason)
        number = next(self._numbers)
        self._write(frame(Call(number, method.name, method.pack(arguments, named))))
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            answer = await future
        except asyncio.CancelledError:
            await self._cancel(number)
            raise
        if isinstance(answer, Failed):
            raise answer.error
        try:
            return method.result(answer.value)
        except ValueError as error:  # also of msgspec
            message = f"the result of {method.name} has a wrong type: {error!r}"
            raise TierError(message, temporary=False) from error

    async def _cancel(self, number: int) -> None:
        """Cancel a call at the other end, and wait until it has ended there or the pipe has."""
        if number not in self._calls:  # it ended at the same moment
            return
        loop = asyncio.get_running_loop()
        future = self._calls[number] = loop.create_future()  # in place of the cancelled one
        self._write(frame(Cancel(number)))
        timer = None if self._late is None else loop.call_later(self._late_s, self._late)
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if timer is not None:
            timer.cancel()

    def _write(self, framed: bytes) -> None:
        if self._state is PipeState.OPEN and not self._writer.is_closing():
            self._writer.write(framed)

    # ---- messages of the other end

    async def _read(self) -> None:
        """Take messages until the end, then do what follows from it."""
        try:
            while True:
                self._take(await take(self._reader))
        except OSError:
            pass
        except ValueError as error:
            self._fault = f"it broke the protocol: {error}"
        finally:
            self._close()
            tasks = [*self._running.values()]
            while not all(task.done() for task in tasks):
                with suppress(asyncio.CancelledError):
                    await asyncio.wait(tasks)
            if self._ended is not None:
                self._reason = await self._ended(self._fault) or self._reason

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Call():
                self._begin(message, self._handlers.get(message.method))
            case Cancel():
                if (task := self._running.get(message.number)) is not None:
                    task.cancel()
            case _:
                future = self._calls.pop(message.number, None)
                if future is not None and not future.done():
                    future.set_result(message)

    def _begin(self, call: Call, handler: Handler | None) -> None:
        loop, number = asyncio.get_running_loop(), call.number
        if number in self._running:
            raise ValueError(f"two calls have the number {number}")
        if handler is not None and handler.method.one_way:
            if not handler.method.is_async:
                loop.call_soon(handler.run, call)  # the loop reports its errors
                return
            task, ended = loop.create_task(handler.finish(call)), self._reported
        else:
            task, ended = loop.create_task(self._answer(call, handler)), self._answered
        self._running[number] = task
        task.add_done_callback(partial(ended, number))

    async def _answer(self, call: Call, handler: Handler | None) -> bytes:
        """Run a call and return its answer as a frame."""
        if handler is None:
            unknown = TierError(f"the other process has no method {call.method}", temporary=False)
            return frame(Failed.of(call.number, unknown))
        try:
            return frame(Done.of(call.number, await handler.finish(call)))
        except BaseException as error:  # noqa: BLE001 - told to the caller
            return frame(Failed.of(call.number, error))

    def _answered(self, number: int, task: asyncio.Task[Any]) -> None:
        """Send the answer of a call, also if the call was cancelled before it began."""
        del self._running[number]
        if task.cancelled():
            self._write(frame(Failed(number, "cancelled")))
        elif (error := task.exception()) is not None:  # which cannot even be told
            message = f"the call raised {type(error).__name__}"
            self._write(frame(Failed(number, "tier", message, temporary=False)))
        else:
            self._write(task.result())

    def _reported(self, number: int, task: asyncio.Task[Any]) -> None:
        """Report the error of a call whose caller does not wait."""
        del self._running[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            told = {"message": "a one-way call failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)

    # ---- the end

    def _close(self) -> None:
        self._state = PipeState.CLOSED
        self._writer.close()
        for task in self._running.values():
            task.cancel()

    def _fail(self, _reading: asyncio.Task[None]) -> None:
        """Fail the calls that wait for an answer."""
        self._close()
        for number, future in self._calls.items():
            if not future.done():
                future.set_result(Failed(number, "tier", self._reason))
        self._calls.clear()
