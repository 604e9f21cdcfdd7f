"""The answers of a running cache over HTTP: its health, metrics, status, page, purges, hints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvladder.control.hints import HINTS_BYTES_MAX
from kvladder.control.hints import PATH as HINTS
from kvladder.control.http import (
    REQUEST_BYTES_MAX,
    Answer,
    HttpRequest,
    HttpResponse,
    as_json,
    refusal,
)
from kvladder.control.page import page
from kvladder.control.upkeep import BLOCKS, UpkeepAnswers
from kvladder.errors import Unavailable
from kvladder.forgetting.purger import Purger, WrongScope
from kvladder.forgetting.receipt import Receipt
from kvladder.forgetting.scope import PurgeScope
from kvladder.manager import CacheManager
from kvladder.metrics import SECTIONS, Stats
from kvladder.runtime import Runtime

T = TypeVar("T")
POLL_S: Final = 0.02
LIVE_S: Final = 5.0
"""Time in which the cache's loop has to answer to count as alive."""
EVERY_S: Final = 1.0
"""Seconds between two events of the page's stream; all clients share one snapshot."""


class PurgeRequest(PurgeScope, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to remove blocks everywhere; answered when that is done, or after ``wait_s``."""

    namespace: str | None = None
    """The expected namespace; the request is refused if the cache has another one."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 600.0


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to check a receipt, and to look whether its blocks are there again."""

    receipt: Receipt


_PURGE: Final = msgspec.json.Decoder(PurgeRequest)
_CHECK: Final = msgspec.json.Decoder(CheckRequest)
PURGE_BYTES_MAX: Final = 12 << 20
"""Largest size of a request to purge: a million tokens of a prefix."""
NO_LEDGER: Final = "no receipts are configured: set forget.path, and restart the engine"


class CacheAnswers:
    """Answers requests about one cache, on the loop of the serving thread.

    Parameters
    ----------
    manager:
        The cache; any thread may call it.
    cache_loop:
        The runtime whose loop moves the cache's bytes; its health is that of the cache.
    notices:
        Returns the last notices, newest first.
    expose:
        Returns statistics as metrics, in a format that the header ``Accept`` allows, and its type.
    facts:
        What does not change, for ``/status``.
    now:
        The injected clock, monotonic seconds.
    hints:
        Answers envelopes of hints.
    """

    def __init__(
        self,
        manager: CacheManager,
        cache_loop: Runtime,
        notices: Callable[[], list[dict[str, Any]]],
        expose: Callable[[Stats, str], tuple[bytes, str]],
        facts: Mapping[str, Any],
        now: Callable[[], float],
        hints: Answer,
    ) -> None:
        self._manager = manager
        self._cache_loop = cache_loop
        self._notices = notices
        self._expose = expose
        self._facts = dict(facts)
        self.listens: Callable[[], list[str]] = list[str]
        """Returns the sockets and ports at which these answers are given."""
        self.purger: Purger | None = None
        """Purges with receipts; None if none are configured."""
        self._now = now
        self._began_s = now()
        self._latest = -EVERY_S, b""
        self._paths: dict[str, dict[str, Answer]] = {
            "/": {"GET": self._page},
            "/livez": {"GET": self._livez},
            "/readyz": {"GET": self._readyz},
            "/metrics": {"GET": self._metrics},
            "/status": {"GET": self._status},
            "/events": {"GET": self._events},
            "/describe": {"GET": self._describe},
            "/purge": {"POST": self._purge},
            **UpkeepAnswers(manager, cache_loop).paths,
            HINTS: {"POST": hints},
            "/receipt": {"POST": self._receipt},
        }

    def offer(self, path: str, method: str, answer: Answer) -> None:
        """Answer another path; before the first request."""
        self._paths.setdefault(path, {})[method] = answer

    def know(self, **facts: Any) -> None:
        """Show these facts from now on."""
        self._facts |= facts

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the answer to a request."""
        path = BLOCKS if request.path.startswith(BLOCKS) else request.path
        methods = self._paths.get(path)
        if methods is None:
            return refusal(404, f"no such path: expected one of {', '.join(self._paths)}")
        asked = "GET" if request.method == "HEAD" else request.method
        call = methods.get(asked)
        if call is None:
            allowed = ", ".join(methods)
            return refusal(405, f"expected method {allowed}", ("Allow", allowed))
        return await call(request)

    def bytes_max(self, head: HttpRequest) -> int:
        """Return the largest size of a request's body."""
        if head.path in {"/purge", "/receipt"}:
            return PURGE_BYTES_MAX
        return HINTS_BYTES_MAX if head.path == HINTS else REQUEST_BYTES_MAX

    # ---- health

    async def _is_alive(self) -> bool:
        """Return whether the cache's loop answers in time."""
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        self._cache_loop.post(loop.call_soon_threadsafe, answered.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(LIVE_S):
                await answered.wait()
        return answered.is_set()

    async def _livez(self, _: HttpRequest) -> HttpResponse:
        if await self._is_alive():
            return HttpResponse(b"ok\n")
        return HttpResponse(f"the cache's loop has not answered in {LIVE_S:g} s\n".encode(), 503)

    async def _readyz(self, request: HttpRequest) -> HttpResponse:
        """Answer with a line for each level; a level that is left out does not end readiness."""
        lines = [
            f"{name}: {'left out' if counts.get('left_out') else 'open'}"
            for name, counts in self._manager.stats().items()
            if "blocks" in counts and name not in SECTIONS
        ]
        alive = await self._livez(request)
        return HttpResponse(alive.body + "\n".join([*lines, ""]).encode(), alive.status)

    # ---- what it counts

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        body, kind = self._expose(self._manager.stats(), request.headers.get("accept", ""))
        return HttpResponse(body, kind=kind)

    async def _describe(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(self._manager.describe().encode())

    def status(self) -> dict[str, Any]:
        """Return everything that the page shows, as plain data."""
        manager, now_s = self._manager, self._now()
        return {
            **self._facts,
            "process": os.getpid(),
            "listens": self.listens(),
            "namespace": manager.namespace.hex(),
            "time_s": now_s,
            "open_s": now_s - self._began_s,
            "sessions": len(manager.sessions),
            "stats": manager.stats(),
            "notices": self._notices(),
        }

    async def _status(self, _: HttpRequest) -> HttpResponse:
        return as_json(self.status())

    async def _events(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(kind="text/event-stream", parts=self._stream())

    async def _stream(self) -> AsyncIterator[bytes]:
        """Yield a snapshot each second, for as long as the client stays."""
        while True:
            now = self._now()
            if now - self._latest[0] >= EVERY_S / 2:
                self._latest = now, msgspec.json.encode(self.status())
            yield b"data: " + self._latest[1] + b"\n\n"
            await asyncio.sleep(EVERY_S)

    async def _page(self, _: HttpRequest) -> HttpResponse:
        body, policy = page()
        safe = (
            ("Content-Security-Policy", policy),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        )
        return HttpResponse(body, kind="text/html; charset=utf-8", headers=safe)

    # ---- what changes something

    async def _purge(self, request: HttpRequest) -> HttpResponse:
        try:
            wanted = _PURGE.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refusal(400, f"not a request: {error}")
        own = self._manager.namespace.hex()
        if wanted.namespace not in {None, own}:
            return refusal(409, f"expected namespace {own}, that of the running cache")
        if self.purger is None and wanted.kind not in {"salt", "all"}:
            return refusal(400, f"a purge by {wanted.kind} needs receipts: set forget.path")
        try:
            return as_json(await self._purged(wanted, request.gone))
        except WrongScope as error:
            return refusal(404, str(error))
        except Unavailable as error:
            return refusal(503, str(error))

    async def _receipt(self, request: HttpRequest) -> HttpResponse:
        """Answer with the check of a receipt."""
        try:
            wanted = _CHECK.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refusal(400, f"not a request: {error}")
        if self.purger is None:
            return refusal(400, NO_LEDGER)
        found = await self._on_cache_loop(self.purger.check(wanted.receipt))
        return as_json(msgspec.to_builtins(found))

    async def _on_cache_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the cache's loop; it continues if this task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._cache_loop.begin(work)))

    async def _purged(self, wanted: PurgeRequest, gone: Callable[[], bool]) -> dict[str, Any]:
        """Remove in steps, then wait until all tiers are done, the client is gone or time is up."""
        manager, receipt = self._manager, None
        before = manager.stats()
        if self.purger is not None:
            fields = PurgeScope.__struct_fields__
            scope = PurgeScope(**{name: getattr(wanted, name) for name in fields})
            purging = self.purger.purge(scope, wait_s=wanted.wait_s, gone=gone)
            receipt = await self._on_cache_loop(purging)
        elif wanted.salt is None:
            for _ in manager.ladder.clear(erase=True):
                await asyncio.sleep(0)
        else:
            for _ in manager.purge(wanted.salt):
                await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if receipt else wanted.wait_s):
                while manager.removals and not gone():  # noqa: ASYNC110 - tiers send no event
                    await asyncio.sleep(POLL_S)
        now = manager.stats()
        names = [name for name, counts in now.items() if "removed" in counts]
        return {
            "namespace": manager.namespace.hex(),
            "processes": [os.getpid(), *filter(None, (now[name].get("process") for name in names))],
            **{
                what: {name: now[name][what] - before[name][what] for name in names}
                for what in ("removed", "purged", "denied")
            },
            "left": manager.removals if receipt is None else len(receipt.owed),
            **({} if receipt is None else {"receipt": msgspec.to_builtins(receipt)}),
        }
