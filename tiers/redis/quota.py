"""Quotas of a Redis tier: bytes stored by each tenant, in counters on the servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from math import inf
from typing import Any, NamedTuple

from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.tiers.label import LABEL_BYTES, LabelFields, told
from kvladder.tiers.redis.nodes import Entrance, pairs
from kvladder.tiers.redis.resp import Command, ReplyError, Target, Wire, encode
from kvladder.tiers.redis.servers import Outcome, Servers
from kvladder.tiers.redis.url import Address, QuotaOptions

STEP_KEYS = 1000
"""Keys that one step of a scan looks at; between steps the server serves other clients."""
Run = Callable[[Sequence[Command]], Awaitable[Sequence[Outcome]]]


async def scan(entrance: Entrance, wire: Wire, pattern: bytes) -> AsyncIterator[list[bytes]]:
    """Yield the matching keys on a server, step by step; a step may be empty."""
    cursor = -1
    while cursor:
        step = (max(0, cursor), b"MATCH", pattern, b"COUNT", STEP_KEYS)
        found = await entrance.reply(wire, b"SCAN", *step)
        try:
            cursor, names = int(found[0]), [bytes(name) for name in found[1]]
        except (TypeError, ValueError, IndexError) as error:
            raise TierError("SCAN: malformed reply") from error
        yield names


async def labels(names: Sequence[bytes], run: Run) -> dict[bytes, LabelFields | None]:
    """Read the labels stored under ``names``; None for a value without a valid label.

    Names without a value, and those for which a server did not answer, are left out.
    """
    if not names:
        return {}
    read = [memoryview(bytearray(LABEL_BYTES)) for _ in names]
    outcomes = await run(
        [
            Command(name, encode(b"GETRANGE", name, 0, LABEL_BYTES - 1), Target(label, label[:0]))
            for name, label in zip(names, read, strict=True)
        ]
    )
    found = zip(names, map(told, read), outcomes, strict=True)
    return {name: label for name, label, outcome in found if _is_value(outcome)}


def _is_value(outcome: Outcome) -> bool:
    """Return whether an answer tells that there is a value, be it of another type."""
    if isinstance(outcome, ReplyError):
        return outcome.code == "WRONGTYPE"
    return not isinstance(outcome, Exception) and outcome != 0


ALL = b"all"
"""Name of the field with the bytes of the whole namespace; a salt's field has an 8-byte name."""
RETRY_MS = 60_000
"""Milliseconds after a failed recount before an engine may retry."""
KNOWN_MAX = 1 << 16
"""Most counters that an engine remembers."""


class Charge(NamedTuple):
    """The cost of a stored block."""

    salt: bytes
    size: int
    """Bytes, including the label."""
    old: LabelFields | None
    """Label of the block that it replaces, or None."""


class Quotas:
    """Bytes and limits of a namespace's blocks, in all and by salt.

    Engines that share the servers add the bytes that they store and remove to counters in a hash
    there. Each batch of writes carries its additions and returns the new totals. From time to
    time one engine recounts the blocks. The recount corrects for blocks that the servers evicted
    or expired, and for additions that a crashed engine did not send.

    Parameters
    ----------
    prefix:
        Prefix of the namespace's keys.
    value_bytes:
        Most bytes that a block takes.
    """

    def __init__(
        self,
        options: QuotaOptions,
        prefix: bytes,
        value_bytes: int,
        entrance: Entrance,
        servers: Servers,
    ) -> None:
        self._options = options
        self._prefix = prefix
        self._entrance = entrance
        self._servers = servers
        self._value_bytes = value_bytes
        self._counters = prefix + b"bytes"
        self._turn = prefix + b"recount"
        """Key that exists until the next recount is due."""
        self._known: dict[bytes, int] = {}
        self._owed: Counter[bytes] = Counter()
        """Additions, by counter, that have not been sent to the servers yet."""
        self._full: set[bytes] = set()
        """Salts that had nothing to spare when ``spare`` was called."""
        self._fresh: set[bytes] | None = None
        """Keys stored by this engine since the running recount began; None without a recount."""
        for name, limit in (("namespace", options.namespace), ("tenant", options.tenant)):
            if limit is not None and limit < value_bytes:
                hint = f"expected at least one block, {value_bytes} bytes"
                raise ConfigError(str(limit), path=f"quota.{name}", hint=hint)

    def __bool__(self) -> bool:
        return self._options.namespace is not None or self._options.tenant is not None

    def describe(self) -> str:
        """Return the limits as text for users."""
        parts = {"in all": self._options.namespace, "each salt": self._options.tenant}
        limits = [f"{limit} {what}" for what, limit in parts.items() if limit is not None]
        every = f", recounted every {self._options.recount}"
        return ", ".join(limits) + every if limits else "none"

    @property
    def total_bytes(self) -> int:
        """Bytes of the namespace, as last heard, plus this engine's unsent additions."""
        return max(0, self._known.get(ALL, 0) + self._owed[ALL])

    def spare(self, salt: bytes) -> float:
        """Return how many more blocks of this salt may be stored; infinite without a salt."""
        limit = self._options.tenant
        if limit is None or not salt:
            return inf
        used = self._known.get(salt, 0) + self._owed[salt]
        found = max(0, (limit - used) // self._value_bytes)
        if not found:
            self._full.add(salt)
        return found

    # ---- additions of this engine

    async def run(
        self,
        commands: Sequence[Command],
        charges: Mapping[int, Charge],
        limit_s: float | None,
    ) -> Sequence[Outcome]:
        """Run commands that store blocks, and charge for the blocks in the same batch.

        ``charges`` are by index of the commands that make blocks visible. Raises TierFull if they
        exceed the namespace's quota.
        """
        limit, wanted = self._options.namespace, sum(charge.size for charge in charges.values())
        if limit is not None and self.total_bytes + wanted > limit:
            raise TierFull(f"the quota of the namespace, {limit}, is used up")
        if self._fresh is not None:
            self._fresh.update(commands[index].key for index in charges)
        for charge in charges.values():
            self.add(charge.salt, charge.size)
        outcomes: Sequence[Outcome] = [None] * len(commands)
        try:
            salts = [charge.salt for charge in charges.values()]
            outcomes = await self._tell(salts, commands, limit_s)
        finally:
            for index, (salt, size, old) in charges.items():
                if outcomes[index] != b"OK":  # not stored, or another engine had stored it
                    self.add(salt, -size)
                elif old is not None:
                    self.remove(old)
        await self.settle()
        return outcomes

    def add(self, salt: bytes, count_bytes: int) -> None:
        """Add bytes to the counters of the salt and of the namespace; negative for removals."""
        for field in (ALL, salt) if salt else (ALL,):
            self._owed[field] += count_bytes

    def remove(self, old: LabelFields) -> None:
        """Subtract a removed block, given the fields of its label."""
        self.add(old.facts.salt, -LABEL_BYTES - old.length)

    async def settle(self) -> None:
        """Send the additions that the servers have not been told yet."""
        if any(self._owed.values()):
            await self._tell(())

    async def refresh(self) -> None:
        """Fetch the current bytes of the namespace and of the salts that had nothing to spare."""
        full, self._full = self._full, set()
        await self._tell(full)

    async def _tell(
        self, salts: Iterable[bytes], commands: Sequence[Command] = (), limit_s: float | None = None
    ) -> Sequence[Outcome]:
        """Run commands, send all owed additions, and note the totals that the servers return."""
        owed = {field: 0 for field in (ALL, *salts) if field} | dict(self._owed)
        self._owed.clear()
        telling = [
            Command(self._counters, encode(b"HINCRBY", self._counters, field, count))
            for field, count in owed.items()
        ]
        try:
            outcomes = await self._servers.run([*commands, *telling], limit_s)
        except BaseException:
            self._owed.update(owed)
            raise
        for (field, count), outcome in zip(owed.items(), outcomes[len(commands) :], strict=True):
            if not isinstance(outcome, int):  # a failed addition is still owed
                self._owed[field] += count
                continue
            self._known.pop(field, None)
            if len(self._known) >= KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[field] = outcome
        return outcomes[: len(commands)]

    def forget(self) -> None:
        """Forget all counters, after a purge has removed them with all blocks."""
        self._known.clear()
        self._owed.clear()

    # ---- recounts

    async def recount(self) -> None:
        """Count the blocks and correct the counters, if a recount is due and no engine runs it.

        Blocks that other engines write meanwhile may count twice until the next recount. Blocks
        removed meanwhile may make the counters too small.

        Raises
        ------
        TierError, OSError, ValueError
            A server did not answer, or its answer makes no sense. The counters are unchanged, and
            an engine may retry after ``RETRY_MS``.
        """
        period_ms = int(self._options.recount * 1000)

        async def ask(name: bytes, key: bytes, *arguments: bytes | int) -> Any:
            async with asyncio.timeout(self._entrance.limit_s):
                (outcome,) = await self._servers.run([Command(key, encode(name, key, *arguments))])
            if isinstance(outcome, Exception):
                raise TierError(f"{name.decode()}: {outcome}")
            return outcome

        if await ask(b"SET", self._turn, b"1", b"NX", b"PX", period_ms) != b"OK":
            return
        try:
            await self._recount(pairs(await ask(b"HGETALL", self._counters)))
        except Exception:
            await ask(b"SET", self._turn, b"1", b"PX", min(period_ms, RETRY_MS))
            raise

    async def _recount(self, counted: Mapping[bytes, bytes]) -> None:
        """Correct the counters to what the servers hold; ``counted`` are their old values."""
        found: Counter[bytes] = Counter()
        self._fresh = set()  # blocks stored from now on are not in ``counted``
        try:
            for address in await self._servers.addresses():
                await self._count(address, self._fresh, found)
        finally:
            self._fresh = None
        for field in found.keys() | counted.keys():
            self._owed[field] += found[field] - int(counted.get(field, 0))
        dead = [field for field, count in counted.items() if not found[field] and not int(count)]
        async with asyncio.timeout(self._entrance.limit_s):
            await self.settle()
            if dead:  # salts without blocks would pile up
                gone = Command(self._counters, encode(b"HDEL", self._counters, *dead))
                await self._servers.run([gone])

    async def _count(self, address: Address, fresh: set[bytes], found: Counter[bytes]) -> None:
        """Add the bytes of the blocks on one server to ``found``, except those in ``fresh``."""

        async def run(commands: Sequence[Command]) -> Sequence[Outcome]:
            async with asyncio.timeout(self._entrance.limit_s):
                return await wire.exchange(commands)

        with closing(await self._entrance.wire(address)) as wire:
            # newer servers can be told that these reads do not make blocks recently used
            await run([Command(b"", encode(b"CLIENT", b"NO-TOUCH", b"ON"))])
            async for names in scan(self._entrance, wire, self._prefix + b"{*"):
                whole = [name for name in names if name.endswith(b"}") and name not in fresh]
                for its in filter(None, (await labels(whole, run)).values()):
                    size, salt = LABEL_BYTES + its.length, its.facts.salt
                    found.update({field: size for field in (ALL, salt) if field})
