"""Answers about blocks over HTTP: where one lies, checks of a level, evictions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeVar

import msgspec

from kvladder.control.http import HttpRequest, HttpResponse, as_json, refusal
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.manager import CacheManager
from kvladder.runtime import Runtime

BLOCKS: Final = "/blocks/"
"""Path of a block; its key follows, in hexadecimal digits."""
T = TypeVar("T")
Key = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to read and check some blocks of a level; the answer says where to continue."""

    level: str
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Place to begin at."""
    blocks: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Most blocks to read."""


class EvictRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to evict blocks from a level: these keys, or so many of the next ones."""

    level: str
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=128)] = ()
    count: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0


_VERIFY: Final = msgspec.json.Decoder(VerifyRequest)
_EVICT: Final = msgspec.json.Decoder(EvictRequest)


class UpkeepAnswers:
    """Answers about the blocks of one cache, on the loop of the serving thread."""

    def __init__(self, manager: CacheManager, cache_loop: Runtime) -> None:
        self._upkeep = manager.upkeep
        self._cache_loop = cache_loop
        self.paths: dict[str, dict[str, Callable[[HttpRequest], Awaitable[HttpResponse]]]] = {
            "/verify": {"POST": self._verify},
            "/evict": {"POST": self._evict},
            BLOCKS: {"GET": self._block},
        }

    async def _block(self, request: HttpRequest) -> HttpResponse:
        try:
            key = BlockKey(bytes.fromhex(request.path.removeprefix(BLOCKS)))
        except ValueError:
            key = BlockKey(b"")
        if len(key) != KEY_BYTES:
            return refusal(400, f"expected {2 * KEY_BYTES} hexadecimal digits after {BLOCKS}")
        copies = [one._asdict() for one in self._upkeep.inspect(key)]
        return as_json({"key": key.hex(), "copies": copies})

    async def _verify(self, request: HttpRequest) -> HttpResponse:
        try:
            wanted = _VERIFY.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refusal(400, f"not a request: {error}")
        below = list(self._upkeep.levels)[1:]
        if wanted.level not in below:
            return refusal(400, _unknown(wanted.level, below))
        work = self._upkeep.verify(wanted.level, wanted.start, wanted.blocks)
        found = await asyncio.wrap_future(self._cache_loop.begin(work))
        return as_json(found._asdict())

    async def _evict(self, request: HttpRequest) -> HttpResponse:
        try:
            wanted = _EVICT.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refusal(400, f"not a request: {error}")
        if wanted.level not in self._upkeep.levels:
            return refusal(400, _unknown(wanted.level, [*self._upkeep.levels]))
        if bool(wanted.keys) == bool(wanted.count):
            return refusal(400, "expected either keys or a count above 0")
        if wanted.keys:
            keys = [BlockKey(bytes.fromhex(key)) for key in wanted.keys]
            done = self._upkeep.evict(wanted.level, keys)
        else:
            done = self._upkeep.evict_next(wanted.level, wanted.count)
        return as_json(done._asdict())


def _unknown(level: str, known: list[str]) -> str:
    return f"no level {level!r}: expected one of {', '.join(known) or 'none: host is alone'}"
