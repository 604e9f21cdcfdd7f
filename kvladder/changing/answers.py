"""The HTTP answers that change a running cache's stack, drain it, and warm it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvladder.changing.changer import Busy, StackChanger
from kvladder.changing.drain import Drain
from kvladder.changing.warm import BLOCKS_MAX, HotBlock, Warm, hottest
from kvladder.control.answers import CacheAnswers
from kvladder.control.http import HttpRequest, HttpResponse, as_json, refusal
from kvladder.errors import ClosedError, ConfigError
from kvladder.manager import CacheManager
from kvladder.runtime import Runtime
from kvladder.tiers.ladder.stack import TierStack

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
WAIT_MAX_S: Final = 86400.0
Wait = Annotated[float, msgspec.Meta(ge=0, le=WAIT_MAX_S)]


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks for another stack; answered when the change is whole."""

    stack: str | None = None
    """YAML of the whole stack; None stands for the one that runs."""
    set: dict[str, str] = {}
    """Single settings to change in it, by path: ``{"tiers.nvme.capacity": "1 TiB"}``."""
    dry_run: bool = False
    """True to check, and to tell what would change."""
    save: bool = False
    """True to write the result into the file that the cache was started with."""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to take no more blocks, and to write down what only this engine has."""

    to: str | None = None
    """Level that gets them; None for levels that outlive the engine."""
    begin: bool = True
    """False to ask only for the progress."""
    stop: bool = False
    """True to take blocks again."""
    wait_s: Wait = 0.0
    """Seconds to wait for the end; the answer has the progress."""


class WarmRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to bring blocks up into host memory."""

    blocks: list[str] = []
    """Names of blocks, as ``/hottest`` returns them; without any, only the progress is told."""
    stop: bool = False
    wait_s: Wait = 0.0


class HottestRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks for the blocks that were used last."""

    count: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_MAX)] = 4096


class ChangeAnswers:
    """Answers requests that change one cache, on the loop of the serving thread.

    Checks run here; what concerns blocks runs on the cache's loop.
    """

    def __init__(
        self, manager: CacheManager, stack: TierStack, runtime: Runtime, changer: StackChanger
    ) -> None:
        self._manager = manager
        self._stack = stack
        self._runtime = runtime
        self._changer = changer
        self.drain = Drain(manager, stack)
        self.warm = Warm(manager, stack)

    def join(self, answers: CacheAnswers) -> None:
        """Have ``answers`` answer these paths, too."""
        answers.offer("/change", "POST", self._wrapped(self._change))
        answers.offer("/drain", "POST", self._wrapped(self._drain))
        answers.offer("/warm", "POST", self._wrapped(self._warm))
        answers.offer("/hottest", "POST", self._wrapped(self._hottest))

    def _wrapped(
        self, answer: Callable[[HttpRequest], Awaitable[Any]]
    ) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
        """Return ``answer`` with its result as JSON, and its errors as refusals."""

        async def answering(request: HttpRequest) -> HttpResponse:
            try:
                return as_json(await answer(request))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                return refusal(400, f"not a request: {error}")
            except Busy as error:
                return refusal(409, str(error))
            except ConfigError as error:
                return refusal(400, str(error))
            except ClosedError as error:
                return refusal(503, str(error))

        return answering

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the cache's loop; it goes on if this client leaves."""
        return await asyncio.shield(asyncio.wrap_future(self._runtime.begin(work)))

    async def _change(self, request: HttpRequest) -> dict[str, Any]:
        wanted = msgspec.json.decode(request.body, type=ChangeRequest)
        plan = self._changer.plan(text=wanted.stack, settings=wanted.set, save=wanted.save)
        if not wanted.dry_run:
            await self._there(self._changer.carry_out(plan))
        saved = None if plan.save is None or wanted.dry_run else str(plan.save)
        changed = [*map(str, plan.changes)]
        return {"changed": changed, "dry_run": wanted.dry_run, "saved": saved}

    async def _drain(self, request: HttpRequest) -> dict[str, Any]:
        wanted, drain = msgspec.json.decode(request.body, type=DrainRequest), self.drain

        async def draining() -> dict[str, Any]:
            if wanted.stop:
                await drain.stop()
            elif wanted.begin:
                await drain.begin(wanted.to)
            await drain.wait(wanted.wait_s)
            return drain.as_dict()

        return await self._there(draining())

    async def _warm(self, request: HttpRequest) -> dict[str, Any]:
        wanted, warm = msgspec.json.decode(request.body, type=WarmRequest), self.warm
        blocks = [HotBlock.of(one, f"blocks[{at}]") for at, one in enumerate(wanted.blocks)]

        async def warming() -> dict[str, Any]:
            if wanted.stop:
                await warm.stop()
            elif blocks:
                warm.begin(blocks)
            await warm.wait(wanted.wait_s)
            return warm.as_dict()

        return await self._there(warming())

    async def _hottest(self, request: HttpRequest) -> Any:
        wanted = msgspec.json.decode(request.body or b"{}", type=HottestRequest)
        return hottest(self._manager, self._stack, wanted.count)

    def close(self) -> None:
        """End what is in progress, before the cache closes."""
        self._changer.close()
        self._runtime.post(self.drain.close)
        self._runtime.post(self.warm.close)
