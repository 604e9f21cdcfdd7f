"""The object store tier: blocks as objects of a bucket or a folder that many engines share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import numpy as np
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from kvladder.errors import ConfigError, TierError, TierFull, Unavailable
from kvladder.keys import BlockKey
from kvladder.schema import cleared, masked
from kvladder.tiers.base import Tier
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import LABEL_BYTES, VERSION, Buffer, LabelFields, Read, Ref, Write, told
from kvladder.tiers.object.options import ObjectOptions

Item = TypeVar("Item")
T = TypeVar("T")

BLOCK_BYTES_MIN = 256 << 10
BATCH_BYTES = 64 << 20
"""Most bytes of a batch; a put needs the same amount of memory again for copies."""
PROBES = 128
"""Most requests of ``contains`` at once."""
SHARE = 0.8
"""Share of a call's time for the requests; the rest is for returning what has arrived by then."""
REACH_S = 5.0
"""Time limit for a store's first answer, if the level sets none."""
RETRIES = 3
LATE_S = 60.0
"""Seconds within which stores and the proxies before them carry a request out, or never."""
SPACE_DIGITS = 32
ERRORS = (BaseError, OSError, NotImplementedError)
"""Errors that obstore raises, and those of a timeout."""

_NAME = re.compile(r"kvladder/[0-9a-f]+/([0-9]+)/[0-9a-f]{64}")
_FULL = re.compile(r"os error (28|122)\b|QuotaExceeded|StorageFull|507 Insufficient")
_REFUSED = re.compile(r"status code: (30\d|4(?!08|29)\d\d)|LOCATION|builder error")
"""Errors of the settings rather than of the store: a retry would fail again."""
_HINTS = (
    ("169.254.169.254", "no credentials found: set the store's environment variables, or options"),
    (r"NoSuchBucket|status code: 404", "create the bucket, or correct the url"),
    (r"status code: 40[13]", "expected a user that may list, get, put and delete there"),
    (r"status code: 30\d|LOCATION", "set options.region to the region of the bucket"),
    ("builder error", "for http:// set options.allow_http: true"),
    ("", "expected a store that answers"),
)


class ObjectTier(Tier):
    """Blocks under ``kvladder/NAMESPACE/VERSION/BLOCK``; each object is a label, then the bytes.

    The first put of a block wins. A later put only checks that the stored object is usable, and
    replaces it if not. Objects are got and put whole. The library never sees a slot: each block is
    copied once, in a thread. So an abandoned request cannot touch the arena.

    The store may still carry out a put that was abandoned, up to ``late_s`` later. The library
    repeats a put that overwrites after a timeout, and reports only the last attempt. It does not
    repeat one that creates. So every put creates, if need be after a removal: then each put that
    may still come has failed.
    """

    Options: ClassVar[type[ObjectOptions]] = ObjectOptions
    shared = True
    surveys = True
    batch_max = 16
    block_bytes_min = BLOCK_BYTES_MIN
    overhead_bytes = LABEL_BYTES
    probe_max = PROBES
    late_s = LATE_S

    def __init__(self, options: ObjectOptions) -> None:
        self.options = options
        self.probe_timeout_s = options.probe_timeout
        self.probe_cache_s = options.probe_cache
        self._transfers = asyncio.Semaphore(options.requests)
        self._probes = asyncio.Semaphore(PROBES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._store: Any = None
        self._closed = False

    # ---- opening

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        await self._reach(REACH_S)
        return {"url": self.options.url, "access": "can be listed"}

    async def open(self, context: TierContext) -> None:
        self.context = context
        self._size = context.layout.block_bytes
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(self.options.requests, fitting, context.capacity_blocks))
        self._space = f"kvladder/{context.namespace.hex()[:SPACE_DIGITS]}"
        self._prefix = f"{self._space}/{VERSION}/"
        self._limit_s = None if context.timeout_s is None else context.timeout_s * SHARE
        await self._reach(context.timeout_s or REACH_S)

    async def _reach(self, limit_s: float) -> None:
        """Make the store's client, and check that the store can be listed.

        Raises
        ------
        ConfigError
            The store refuses, so the settings are wrong.
        Unavailable
            The store does not answer, or has a problem of its own.
        """
        self._store = self._made(limit_s)
        try:
            async with asyncio.timeout(limit_s):
                async for _ in self._store.list("kvladder/0"):
                    break
        except ERRORS as error:
            text = _text(error) or f"no answer within {limit_s:g} s"
            hint = next(hint for pattern, hint in _HINTS if re.search(pattern, text))
            kind = ConfigError if _REFUSED.search(text) else Unavailable
            raise kind(text, path="url", hint=hint) from error

    def _made(self, limit_s: float) -> Any:
        """Return a client for the URL's store; its retries end within ``limit_s``."""
        url, path, hint = self.options.url, "options", "docs/how-to/object.md lists the options"
        config, client = self.options.split()
        limit = timedelta(seconds=limit_s)
        backoff = {"init_backoff": limit / 50, "max_backoff": limit / 5, "base": 2}
        every: dict[str, Any] = {
            "config": config,
            "client_options": {"timeout": limit, "connect_timeout": limit / 2, **client},
            "retry_config": {"backoff": backoff, "max_retries": RETRIES, "retry_timeout": limit},
        }
        if url.startswith("file:"):
            every, path, hint = {}, "url", "expected a folder that exists: create or mount it"
        try:
            return from_url(url, **every)
        except (*ERRORS, ValueError) as error:
            raise ConfigError(_text(error), path=path, hint=hint) from error

    # ---- requests

    def _name(self, key: BlockKey) -> str:
        return self._prefix + key.hex()

    async def _each(
        self,
        call: Callable[[Item], Awaitable[T]],
        items: Iterable[Item],
        bound: asyncio.Semaphore | None = None,
        limit_s: float | None = None,
    ) -> list[T | TierError]:
        """Call ``call`` for each item, and return its result or its TierError.

        If all calls fail, raise the first error. However this ends, no call is left running.
        """
        every, bound = list(items), bound or self._transfers
        found: list[T | TierError] = [_closed() for _ in every]
        if self._closed:
            raise _closed()

        async def one(number: int) -> None:
            try:
                async with asyncio.timeout(limit_s), bound:
                    found[number] = await call(every[number])
            except ERRORS as error:  # TimeoutError is an OSError
                found[number] = failure(error)

        async with asyncio.TaskGroup() as group:
            for number in range(len(every)):
                task = group.create_task(one(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        failures = [outcome for outcome in found if isinstance(outcome, TierError)]
        if failures and len(failures) == len(found):
            raise failures[0]
        return found

    async def _told(self, name: str) -> LabelFields | None:
        """Return the fields of a stored label; None if the object is absent or not usable."""
        with suppress(FileNotFoundError):
            found = await self._store.get_async(name, options={"range": (0, LABEL_BYTES)})
            size = found.meta["size"]
            said = told(memoryview(await found.bytes_async()))
            return said if said is not None and size == LABEL_BYTES + said.length else None
        return None

    def _fits(self, size: int) -> bool:
        """Return whether a block's object may have this size."""
        return LABEL_BYTES < size <= LABEL_BYTES + self._size

    def _expired(self, said: LabelFields | None) -> bool:
        end_s = None if said is None else said.facts.expires_wall_s
        return end_s is not None and end_s <= self.context.clock.wall()

    # ---- the tier

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        outcomes = await self._each(self._get, reads, limit_s=self._limit_s)
        return [None if isinstance(one, TierError) else one for one in outcomes]

    async def _get(self, read: Read) -> bool:
        try:
            found = await self._store.get_async(self._name(read.key))
        except FileNotFoundError:
            return False
        if not self._fits(found.meta["size"]):  # do not download it: it may be huge
            read.came(b"", 0)
            return read.check()
        data = await found.bytes_async()
        arrived: bool = await self.context.run_blocking(self._arrive, read, data)
        return arrived

    def _arrive(self, read: Read, data: Buffer) -> bool:
        """Copy a block into its slot and check it, both without the GIL; return if it is good."""
        whole = memoryview(data)
        label, stored = whole[:LABEL_BYTES], whole[LABEL_BYTES:]
        if self._expired(told(label)):
            return False
        np.copyto(_array(read.view[: len(stored)]), _array(stored))
        read.came(label, len(stored))
        return read.check()

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        outcomes = await self._each(self._put, writes, limit_s=self._limit_s)
        failures = [one for one in outcomes if isinstance(one, TierError)]
        if failures and all(isinstance(one, TierFull) for one in failures):
            raise failures[0]
        return [not isinstance(one, TierError) for one in outcomes]  # a full store says so again

    async def _put(self, write: Write) -> None:
        name, body = self._name(write.key), await self.context.run_blocking(_body, write)
        if not write.replace:
            try:
                await self._create(name, body)
                return
            except AlreadyExistsError:
                if await self._serves(write.key):
                    return
        await self._forget(name)
        try:
            await self._create(name, body)
        except AlreadyExistsError:  # another engine has replaced it meanwhile
            if not await self._serves(write.key):
                raise

    async def _create(self, name: str, body: Any) -> None:
        await self._store.put_async(name, body, mode="create", use_multipart=False)

    async def _serves(self, key: BlockKey) -> bool:
        """Return whether, judged by its label, a get would accept the object stored for a block.

        False also if the object cannot be read, since it must then be replaced, too.
        """
        with suppress(*ERRORS):
            said = await self._told(self._name(key))
            own = said is not None and (said.key, said.namespace) == (key, self.context.namespace)
            return own and not self._expired(said)
        return False

    async def remove(self, blocks: Sequence[Ref]) -> None:
        await self._delete([self._name(block.key) for block in blocks])

    async def _delete(self, names: Sequence[str]) -> None:
        for outcome in await self._each(self._forget, names):
            if isinstance(outcome, TierError):
                raise outcome

    async def _forget(self, name: str) -> None:
        with suppress(FileNotFoundError):
            await self._store.delete_async(name)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        limit_s = self.probe_timeout_s or self.context.timeout_s
        limit_s = None if limit_s is None else limit_s * SHARE
        return [one is True for one in await self._each(self._has, blocks, self._probes, limit_s)]

    async def _has(self, block: Ref) -> bool:
        try:
            return self._fits((await self._store.head_async(self._name(block.key)))["size"])
        except FileNotFoundError:
            return False

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        if self._closed:
            raise _closed()
        seen = removed = 0
        try:
            async for page in self._store.list(self._space):
                # skip objects of other programs under the same prefix
                sizes = {one["path"]: one["size"] for one in page if _NAME.fullmatch(one["path"])}
                gone = list(sizes) if salt is None else await self._salted(sizes, salt)
                await self._delete(gone)
                seen, removed = seen + len(page), removed + len(gone)
                progress(seen, seen + len(page))
        except ERRORS as error:
            raise failure(error) from error
        return removed

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        if self._closed:
            raise _closed()
        own = self._prefix
        try:
            async for page in self._store.list(own):
                names = (one["path"] for one in page if _NAME.fullmatch(one["path"]))
                sizes = {one["path"]: one["size"] for one in page}
                chosen = {name: sizes[name] for name in names if name.startswith(own)}
                found = list(chosen) if salt is None else await self._salted(chosen, salt)
                yield [BlockKey(bytes.fromhex(name.removeprefix(own))) for name in found]
        except ERRORS as error:
            raise failure(error) from error

    async def _salted(self, sizes: Mapping[str, int], salt: bytes) -> list[str]:
        """Return the names of the blocks with this salt, and of those whose salt is unreadable."""
        own = self._prefix
        ours = [n for n, size in sizes.items() if n.startswith(own) and size > LABEL_BYTES]
        known: dict[str, LabelFields | None] = {}
        for name, said in zip(ours, await self._each(self._told, ours), strict=True):
            if isinstance(said, TierError):
                raise said
            known[name] = said
        every = ((name, known.get(name)) for name in sizes)
        return [name for name, said in every if said is None or said.facts.salt == salt]

    def describe(self) -> dict[str, str]:
        options = ", ".join(
            f"{key}={cleared(key, value)}" for key, value in self.options.options.items()
        )
        return {
            "url": self.options.url,
            "options": options or "none",
            "batch": f"{self.batch_max} blocks",
            "requests": f"{self.options.requests} at once",
        }

    async def aclose(self) -> None:
        self._closed = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._store = None  # the last reference: this closes the client's connections


def _array(buffer: Buffer) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(buffer, np.uint8)


def _body(write: Write) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a label followed by a copy of the block, made without the GIL."""
    body = np.empty(LABEL_BYTES + write.length, np.uint8)
    body[:LABEL_BYTES] = _array(write.label())
    np.copyto(body[LABEL_BYTES:], _array(write.view[: write.length]))
    return body


def _closed() -> TierError:
    return TierError("the tier is closed", temporary=False)


def _text(error: Exception) -> str:
    """Return the text of obstore's error, without its debug output and without secrets."""
    return masked(str(error).partition("\n\nDebug source")[0])


def failure(error: Exception) -> TierError:
    """Return an error of the library as the TierError that a level expects."""
    text = _text(error) or "no answer in time"
    if _FULL.search(text):
        return TierFull(text)
    wrong = (PermissionDeniedError, UnauthenticatedError, FileNotFoundError, NotImplementedError)
    return TierError(text, temporary=not isinstance(error, wrong))
