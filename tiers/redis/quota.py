"""Quotas of a Redis tier: what each tenant has on the servers, by counters that stand there."""

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
from kvladder.tiers.redis.resp import Command, Target, Wire, encode
from kvladder.tiers.redis.servers import Outcome, Servers
from kvladder.tiers.redis.url import Address, QuotaOptions

STEP_KEYS = 1000
"""How many keys a step looks at; in between the server serves others."""
Run = Callable[[Sequence[Command]], Awaitable[Sequence[Outcome]]]


async def scan(entrance: Entrance, wire: Wire, pattern: bytes) -> AsyncIterator[list[bytes]]:
    """The keys on a server that match, step by step, some steps empty."""
    cursor = -1
    while cursor:
        step = (max(0, cursor), b"MATCH", pattern, b"COUNT", STEP_KEYS)
        found = await entrance.reply(wire, b"SCAN", *step)
        try:
            cursor, names = int(found[0]), [bytes(name) for name in found[1]]
        except (TypeError, ValueError, IndexError) as error:
            raise TierError("SCAN: the reply is no step of a scan") from error
        yield names


async def labels(names: Sequence[bytes], run: Run) -> dict[bytes, LabelFields]:
    """What the labels tell under those of the keys where one lies."""
    if not names:
        return {}
    read = [memoryview(bytearray(LABEL_BYTES)) for _ in names]
    await run(
        [
            Command(name, encode(b"GETRANGE", name, 0, LABEL_BYTES - 1), Target(label, label[:0]))
            for name, label in zip(names, read, strict=True)
        ]
    )
    found = zip(names, map(told, read), strict=True)
    return {name: label for name, label in found if label is not None}


ALL = b"all"
"""The field with the bytes of the whole namespace; those of salts have 8 bytes as names."""
RETRY_MS = 60_000
"""How soon somebody may count again after a recount that failed."""
KNOWN_MAX = 1 << 16
"""Of how many salts an engine remembers what they have."""


class Charge(NamedTuple):
    """What a block that is stored comes to."""

    salt: bytes
    size: int
    """Bytes, the label among them."""
    old: LabelFields | None
    """The label of what it takes the place of."""


class Quotas:
    """What the blocks of a namespace and of each salt in it come to, and how much they may.

    Engines that share the servers add up, in a hash there, what they store and remove; a batch
    says so on its way and hears what all have. From time to time one of them counts the blocks:
    what the servers evicted or expired meanwhile, and what an engine that died had still to say,
    is put right then.

    Parameters
    ----------
    prefix:
        Of the namespace's keys.
    value_bytes:
        The most that a block takes.
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
        """Is there while nobody need count again."""
        self._known: dict[bytes, int] = {}
        self._owed: Counter[bytes] = Counter()
        """What the servers have not been told yet."""
        self._full: set[bytes] = set()
        """Salts that had nothing to spare when somebody asked."""
        self._fresh: set[bytes] | None = None
        """Blocks that were stored from here since a recount began, while one is under way."""
        for name, limit in (("namespace", options.namespace), ("tenant", options.tenant)):
            if limit is not None and limit < value_bytes:
                hint = f"expected at least a block, {value_bytes} bytes"
                raise ConfigError(str(limit), path=f"quota.{name}", hint=hint)

    def __bool__(self) -> bool:
        return self._options.namespace is not None or self._options.tenant is not None

    def describe(self) -> str:
        """The limits, for people."""
        parts = {"in all": self._options.namespace, "each salt": self._options.tenant}
        limits = [f"{limit} {what}" for what, limit in parts.items() if limit is not None]
        every = f", counted anew every {self._options.recount}"
        return ", ".join(limits) + every if limits else "none"

    @property
    def total_bytes(self) -> int:
        """What the namespace has, as last heard."""
        return max(0, self._known.get(ALL, 0) + self._owed[ALL])

    def spare(self, salt: bytes) -> float:
        """How many more blocks of this salt there may be; any number without a salt."""
        limit = self._options.tenant
        if limit is None or not salt:
            return inf
        used = self._known.get(salt, 0) + self._owed[salt]
        found = max(0, (limit - used) // self._value_bytes)
        if not found:
            self._full.add(salt)
        return found

    # ---- what this engine stores and removes

    async def run(
        self,
        commands: Sequence[Command],
        charges: Mapping[int, Charge],
        limit_s: float | None,
    ) -> Sequence[Outcome]:
        """Run commands that store blocks, and add in the same batch what they come to.

        ``charges`` are those of the commands that make blocks visible. Raises
        TierFull if they are more than the namespace may have.
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
                if outcomes[index] != b"OK":  # it was there already, or was not stored
                    self.add(salt, -size)
                elif old is not None:
                    self.remove(old)
        await self.settle()
        return outcomes

    def add(self, salt: bytes, count_bytes: int) -> None:
        """Blocks of a salt have come, or gone if that is negative."""
        for field in (ALL, salt) if salt else (ALL,):
            self._owed[field] += count_bytes

    def remove(self, old: LabelFields) -> None:
        """A block whose label told this has gone."""
        self.add(old.facts.salt, -LABEL_BYTES - old.length)

    async def settle(self) -> None:
        """Tell the servers what they have not been told yet."""
        if any(self._owed.values()):
            await self._tell(())

    async def refresh(self) -> None:
        """Hear how much the namespace has by now, and the salts that had nothing to spare."""
        full, self._full = self._full, set()
        await self._tell(full)

    async def _tell(
        self, salts: Iterable[bytes], commands: Sequence[Command] = (), limit_s: float | None = None
    ) -> Sequence[Outcome]:
        """Run commands, tell the servers all that is owed, and hear what these salts have."""
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
            if not isinstance(outcome, int):  # what failed is still owed
                self._owed[field] += count
                continue
            self._known.pop(field, None)
            if len(self._known) >= KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[field] = outcome
        return outcomes[: len(commands)]

    def forget(self) -> None:
        """The counters are gone, with all blocks."""
        self._known.clear()
        self._owed.clear()

    # ---- all that is there

    async def recount(self) -> None:
        """Count the blocks and put the counters right, if it is time and nobody else did.

        What others write meanwhile may count twice until the next time, what is removed meanwhile
        may count less.

        Raises
        ------
        TierError, OSError, ValueError
            A server could not be asked, or did not say what was asked; the counters are as they
            were, and somebody may try again after ``RETRY_MS``.
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
        """Make the counters what is found, from what they were."""
        found: Counter[bytes] = Counter()
        self._fresh = set()  # what is added from now on is not in these counters
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
            if dead:  # salts come and go
                gone = Command(self._counters, encode(b"HDEL", self._counters, *dead))
                await self._servers.run([gone])

    async def _count(self, address: Address, fresh: set[bytes], found: Counter[bytes]) -> None:
        """Add what lies on one server and is not fresh."""

        async def run(commands: Sequence[Command]) -> Sequence[Outcome]:
            async with asyncio.timeout(self._entrance.limit_s):
                return await wire.exchange(commands)

        with closing(await self._entrance.wire(address)) as wire:
            # newer servers can be asked not to take blocks that are looked at for used
            await run([Command(b"", encode(b"CLIENT", b"NO-TOUCH", b"ON"))])
            async for names in scan(self._entrance, wire, self._prefix + b"{*"):
                whole = [name for name in names if name.endswith(b"}") and name not in fresh]
                for its in (await labels(whole, run)).values():
                    size, salt = LABEL_BYTES + its.length, its.facts.salt
                    found.update({field: size for field in (ALL, salt) if field})
