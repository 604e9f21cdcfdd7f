"""Warms a cache after its engine has started: brings blocks up that will be asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from kvladder.errors import ConfigError
from kvladder.keys import KEY_BYTES, SALT_BYTES, BlockKey
from kvladder.lock import STEP
from kvladder.manager import CacheManager
from kvladder.tiers.ladder.records.terms import ANYWHERE
from kvladder.tiers.ladder.stack import TierStack

BLOCKS_MAX: Final = 1 << 16
"""Most blocks of one request."""
AT_ONCE: Final = 16
"""Blocks in flight at once for a warm start; requests may have the rest of the budget."""
PAUSE_S: Final = 0.02
"""Pause while requests wait for slots or reads."""
DEADLINE_S: Final = 10.0
_COUNTS: Final[tuple[str, ...]] = ("blocks", "brought", "here", "missing", "no_room")


class HotBlock(NamedTuple):
    """A block that is to be brought up: its key, and the digest of its salt, empty without one."""

    key: BlockKey
    salt: bytes = b""

    @classmethod
    def of(cls, text: str, where: str) -> HotBlock:
        """Read ``KEY`` or ``KEY:SALT``, both in hexadecimal digits.

        Raises
        ------
        ConfigError
            It is not such a name.
        """
        key, _, salt = text.partition(":")
        with suppress(ValueError):
            found = cls(BlockKey(bytes.fromhex(key)), bytes.fromhex(salt))
            if len(found.key) == KEY_BYTES and len(found.salt) in {0, SALT_BYTES}:
                return found
        hint = (
            f"expected {2 * KEY_BYTES} hexadecimal digits, and ':' and {2 * SALT_BYTES} of a salt"
        )
        raise ConfigError(repr(text[:80]), path=where, hint=hint)

    def __str__(self) -> str:
        return f"{self.key.hex()}:{self.salt.hex()}" if self.salt else self.key.hex()


class HotBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/hottest``: blocks that a cache used last, parents before children."""

    namespace: str
    blocks: list[str]


def hottest(manager: CacheManager, stack: TierStack, count: int) -> HotBlocks:
    """Return the blocks of host that were used last, at most ``count``; they stay as they are.

    The most valuable come first: among equal priorities, those used last. A block's parents come
    before it, since they are used after it.
    """
    index, found = stack.host.index, list[str]()
    with stack.lock:
        places = [*index.victims()][-count:][::-1]
    for start in range(0, len(places), STEP):
        with stack.lock:
            for place in places[start : start + STEP]:
                key = index.key_at(place)
                if key is not None:
                    found.append(str(HotBlock(key, index.meta(place).terms.salt)))
    return HotBlocks(namespace=manager.namespace.hex(), blocks=found)


class _TraceLine(msgspec.Struct):
    hash_ids: list[int | str] = []


def traced(lines: Iterator[str], where: str) -> list[str]:
    """Return the blocks of a trace, those that most requests ask for first.

    The trace is one of Mooncake's format with names of blocks as ``hash_ids``.

    Raises
    ------
    ConfigError
        It has other ids, such as those of a recording, which say nothing about names.
    """
    counts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            ids = msgspec.json.decode(line, type=_TraceLine).hash_ids
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(str(error), path=f"{where}, line {number}") from error
        for one in ids:
            if isinstance(one, int):
                hint = "expected hash_ids that are names of blocks, as /hottest has them"
                what = "ids of a recording say nothing about blocks"
                raise ConfigError(what, path=f"{where}, line {number}", hint=hint)
            counts[one] = counts.get(one, 0) + 1
    # a stable order keeps the blocks of a prompt, which are counted alike, in their order
    return sorted(counts, key=lambda one: -counts[one])[:BLOCKS_MAX]


class Warm:
    """Brings blocks into host memory while the cache serves. Its methods run on the cache's loop.

    At most ``AT_ONCE`` blocks are in flight. It pauses while requests wait for slots, and it stops
    when host has no free slot left: it never evicts what requests brought.
    """

    def __init__(self, manager: CacheManager, stack: TierStack) -> None:
        self._manager = manager
        self._stack = stack
        self._state = "off"
        self._counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._task: asyncio.Task[None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the progress: blocks asked for, brought up, in host before, missing, left out."""
        return {"state": self._state, **self._counts}

    def begin(self, blocks: Sequence[HotBlock]) -> None:
        """Begin to bring up blocks, the first one first.

        Raises
        ------
        ConfigError
            Another warm start is in progress.
        """
        if self._task is not None and not self._task.done():
            hint = "wait until it has ended, or stop it"
            raise ConfigError("another warm start is in progress", path="warm", hint=hint)
        self._counts = {**dict.fromkeys(_COUNTS, 0), "blocks": len(blocks)}
        self._state = "warming"
        self._task = asyncio.create_task(self._run(blocks), name="kvladder-warm")

    async def wait(self, within_s: float) -> None:
        """Wait until it has ended, or for ``within_s`` seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within_s)

    async def stop(self) -> None:
        """End a warm start where it is."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, blocks: Sequence[HotBlock]) -> None:
        try:
            for start in range(0, len(blocks), AT_ONCE):
                part = blocks[start : start + AT_ONCE]
                while self._stack.loader.crowded:  # noqa: ASYNC110 - requests go first
                    await asyncio.sleep(PAUSE_S)
                room = max(0, self._stack.shared.arena.free - self._stack.host.reserve_blocks)
                await self._bring(part[:room])
                if room < len(part):
                    self._counts["no_room"] += len(blocks) - start - room
                    break
            self._state = "done"
        except BaseException:
            self._state = "stopped"
            raise

    async def _bring(self, part: Sequence[HotBlock]) -> None:
        """Ask shared tiers about unknown blocks, and bring up what levels have."""
        host, loader = self._stack.host.index, self._stack.loader
        by_salt: dict[bytes, list[BlockKey]] = {}
        for key, salt in part:
            by_salt.setdefault(salt, []).append(key)
        for salt, keys in by_salt.items():
            rest = keys
            while rest:
                with self._stack.lock:
                    asks = loader.prober.may_know(rest[0], ANYWHERE)
                if asks and not self._manager.holding(rest[:1])[0]:
                    await loader.prober.ask(rest, salt, ANYWHERE)  # up to the first absent one
                rest = rest[1:]
        keys = [key for key, _ in part]
        with self._stack.lock:
            here = [key in host for key in keys]
        self._counts["here"] += sum(here)
        wanted = [key for key, is_here in zip(keys, here, strict=True) if not is_here]
        fetch = self._manager.fetch_set(wanted[:STEP], deadline_s=DEADLINE_S)
        try:
            while not fetch.done:  # noqa: ASYNC110 - a fetch is asked, as by an engine
                await asyncio.sleep(PAUSE_S)
        finally:
            fetch.release()
        with self._stack.lock:
            brought = sum(key in host for key in wanted)
        self._counts["brought"] += brought
        self._counts["missing"] += len(wanted) - brought

    def close(self) -> None:
        """End with the cache."""
        if self._task is not None:
            self._task.cancel()
