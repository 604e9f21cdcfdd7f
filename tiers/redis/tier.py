"""The Redis tier: blocks as values of a Redis or Valkey server that many engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, pairwise
from math import inf
from typing import Any, ClassVar

from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.base import Item, Progress, Tier, TierContext
from kvladder.tiers.redis.nodes import Closed, Command, Entrance, Unfit, parse_info
from kvladder.tiers.redis.quota import STEP_KEYS, Quotas, heads, scan
from kvladder.tiers.redis.resp import Part, ReplyError, Target, encode, encode_around
from kvladder.tiers.redis.servers import Outcome, Servers
from kvladder.tiers.redis.url import Address, RedisOptions
from kvladder.tiers.redis.value import (
    HEADER_BYTES,
    ValueHeader,
    block_name,
    part_name,
    space_prefix,
)
from kvladder.units import Size

OLDEST = (6, 2)
BATCH_BYTES = 64 << 20
BATCH_BLOCKS_MAX = 128
PROBE_BLOCKS_MAX = 16384
VALUE_BYTES_MAX = 512 << 20
"""What a server takes unless ``proto-max-bulk-len`` says otherwise."""
VALUE_BYTES_MIN = 1 << 20
"""The least that ``proto-max-bulk-len`` may be."""
SHARE = 0.8
"""Of the time for a call: one of several servers that is silent so long costs no more than its own
blocks; what the others say is answered in the rest."""
PART_MS = 600_000
"""How long a part of a block stays if what makes the block visible is never written."""
_NOTHING = memoryview(b"")
NO_CHARGES: Mapping[int, tuple[bytes, int]] = {}
GAUGES_S = 10.0
GAUGES = {
    "server_used_bytes": "used_memory",
    "server_max_bytes": "maxmemory",
    "server_evicted": "evicted_keys",
}


class RedisTier(Tier):
    """Blocks under ``kvladder:{namespace}:{block}``, a value each, written once and whole.

    Others may put into and remove from the same servers. Whatever is found under a block's key is
    compared with the header that was written with it; what is not that block is a miss.
    """

    Options: ClassVar[type[RedisOptions]] = RedisOptions
    shared = True
    notes = True
    probe_max = PROBE_BLOCKS_MAX
    overhead_bytes = HEADER_BYTES

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.probe_timeout_s = options.probe_timeout
        self.probe_cache_s = options.probe_cache
        self._entrance = Entrance(options)
        self._servers = Servers(options, self._entrance)
        self._fit = False
        self._fitting = asyncio.Lock()
        self._version = "not known yet"
        self._value_max = VALUE_BYTES_MAX
        self._corrupt = 0
        self._gauges: dict[str, int] = {}
        self._asked_s = -inf
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        used = most = 0
        try:
            await self._reached()
            for address in await self._servers.addresses():
                info = parse_info(await self._entrance.ask(address, b"INFO"))
                used += int(info.get("used_memory", "0"))
                most += int(info.get("maxmemory", "0"))
        except TierError as error:
            warn(str(error))
        finally:
            await self.aclose()
        if 0 < most < capacity_bytes:
            warn(
                f"capacity is {Size(capacity_bytes).about()}, and the servers keep at most"
                f" {Size(most).about()} (maxmemory): they evict what is beyond it"
            )
        if used and not most and self.options.quota.namespace is None:
            warn("the servers have no limit (maxmemory 0), and blocks no quota: set one of them")
        facts = {"servers": ", ".join(map(str, self.options.parsed.addresses))}
        if used:
            limit = f"of {Size(most).about()}" if most else "without a limit (maxmemory 0)"
            facts |= {"version": self._version, "memory": f"{Size(used).about()} used {limit}"}
        return facts

    async def _reached(self) -> None:
        """Check the servers for the first time, while the settings can still be refused."""
        try:
            await self._require_fit()
        except Unfit as error:
            raise ConfigError(error.message, path=error.path, hint=error.hint) from error
        except TierError as error:
            if self.options.required:
                hint = "a server that runs, or required: false to start without it"
                raise ConfigError(str(error), path="url", hint=f"expected {hint}") from error
            raise

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_BLOCKS_MAX, fitting, context.capacity_blocks))
        self._limit_s, self._probe_limit_s = (
            None if timeout_s is None else timeout_s * SHARE
            for timeout_s in (context.timeout_s, self.probe_timeout_s or context.timeout_s)
        )
        self._prefix = space_prefix(context.namespace)
        self._size = context.layout.block_bytes
        self._ttls = [self.options.ttl_s(n) for n in range(PRIORITY_MAX + 1)]
        self._header = ValueHeader(context.namespace, self._size, verify=context.verify)
        self._quotas = Quotas(self.options.quota, self._prefix, HEADER_BYTES + self._size)
        with suppress(TierError):  # not there yet, and not required
            await self._reached()

    async def _require_fit(self) -> None:
        """Check, once, that the servers are what the settings say, and hear what they take."""
        if self._closed:
            raise Closed
        if self._fit:
            return
        async with self._fitting:
            if not self._fit:
                await self._check_servers()
                self._fit = True

    async def _check_servers(self) -> None:
        options = self.options
        where = options.parsed.addresses
        address = where[0] if options.cluster else (await self._servers.addresses())[0]
        wire, info = await self._entrance.wire(address)
        try:
            self._check_server(address, info)
            # a user without this right, or a service without this command or with an answer of
            # its own
            with suppress(TierError, TypeError, ValueError):
                name = b"proto-max-bulk-len"
                found: Any = await self._entrance.reply(wire, b"CONFIG", b"GET", name)
                told = dict(zip(found[::2], found[1::2], strict=False))
                self._value_max = max(int(told.get(name, VALUE_BYTES_MAX)), VALUE_BYTES_MIN)
        finally:
            wire.abort()

    def _check_server(self, address: Address, info: Mapping[str, str]) -> None:
        """Raise Unfit unless what a server says of itself is what the settings say."""
        self._version = info.get("redis_version", "")
        if "valkey_version" in info:
            self._version = f"Valkey {info['valkey_version']}"
        numbers = tuple(int(n) for n in info.get("redis_version", "0").split(".") if n.isdecimal())
        mode = info.get("server_mode") or info.get("redis_mode", "standalone")
        if numbers < OLDEST:
            raise Unfit(
                f"{address} is Redis {self._version}", hint="Redis 6.2, Valkey 7.2 or later"
            )
        if mode == "sentinel":
            raise Unfit(f"{address} is a Sentinel", hint="set sentinel to the master's name")
        if mode == "cluster" and not self.options.cluster:
            raise Unfit(f"{address} is a node of a cluster", hint="set cluster: true")
        if mode != "cluster" and self.options.cluster:
            hint = "leave out cluster: true"
            raise Unfit(f"{address} is a standalone server", path="cluster", hint=hint)

    # ---- commands

    def _count(self, length: int) -> int:
        """In how many values a block of so many bytes is kept: one, unless a server refuses it."""
        return -(-(HEADER_BYTES + length) // self._value_max)

    def _span(self, part: int) -> slice:
        """Which bytes of a block a value holds; before the first ones stands the header."""
        begin = part * self._value_max - HEADER_BYTES
        return slice(max(0, begin), begin + self._value_max)

    def _slot(self, item: Item) -> memoryview:
        return self.context.arena.view(item.slot)[: self._size]

    def _written(self, item: Item, name: bytes, part: int) -> Iterable[Part]:
        """What stores a block, or a part of it: the first comes last, before it nobody sees one."""
        payload = self._slot(item)[: item.length or self._size]
        header = b"" if part else self._header.write(item, payload)
        body = payload[self._span(part)]
        ttl_ms = self._ttl_ms(item)
        if part:
            ttl_ms = PART_MS if ttl_ms is None else min(ttl_ms, PART_MS)
        once: list[bytes | int] = [] if item.replace else [b"NX"]
        before, after = encode_around(
            b"SET",
            part_name(name, part),
            length=len(header) + len(body),
            after=once if ttl_ms is None else [*once, b"PX", ttl_ms],
        )
        return before + header, body, after

    def _lasting(self, item: Item) -> Iterable[Command]:
        """What has the other parts of a block last as long as the first, which is stored now."""
        name, ttl_ms = block_name(self._prefix, item.key), self._ttl_ms(item)
        for part in range(1, self._count(item.length or self._size)):
            key = part_name(name, part)
            parts = encode(b"PERSIST", key) if ttl_ms is None else encode(b"PEXPIRE", key, ttl_ms)
            yield Command(name, parts)

    def _ttl_ms(self, item: Item) -> int | None:
        """How long the server is to keep a block; None for good."""
        ttl_s = self._ttls[item.priority]
        if item.expires_wall_s is not None:
            left_s = item.expires_wall_s - self.context.clock.wall()
            ttl_s = left_s if ttl_s is None else min(ttl_s, left_s)
        return None if ttl_s is None else max(1, int(ttl_s * 1000))

    async def _run(
        self,
        commands: Sequence[Command],
        charges: Mapping[int, tuple[bytes, int]] = NO_CHARGES,
        limit_s: float | None = None,
    ) -> Sequence[Outcome]:
        """The outcomes; a TierError only if there is no other outcome."""
        if not commands:
            return []
        await self._require_fit()
        self._ask_gauges()
        outcomes = await self._quotas.run(self._servers, commands, charges, limit_s)
        failures = [failure for outcome in outcomes if (failure := _failure(outcome))]
        if len(failures) == len(outcomes):
            raise failures[0]
        return outcomes

    def _ask_gauges(self) -> None:
        """Have the servers say how they are, now and then, while nobody waits for it."""
        now = self.context.clock.now()
        if self._asking is None and now - self._asked_s >= GAUGES_S:
            self._asked_s = now
            self._asking = asyncio.create_task(self._gauge(), name="kvladder-redis-info")

    async def _gauge(self) -> None:
        found = dict.fromkeys(GAUGES, 0)
        try:
            for address in await self._servers.addresses():
                info = parse_info(await self._entrance.ask(address, b"INFO"))
                for name, field in GAUGES.items():
                    found[name] += int(info.get(field, "0"))
            self._gauges = found
            if self._quotas:
                async with asyncio.timeout(self._entrance.limit_s):
                    await self._quotas.refresh(self._servers)
                await self._quotas.recount(self._entrance, self._servers)
        except (TierError, OSError, ValueError, TypeError):
            pass  # the old ones have to do
        finally:
            self._asking = None

    # ---- the tier

    async def get(self, items: Sequence[Item]) -> Sequence[bool | None]:
        await self._require_fit()
        spans = [self._span(part) for part in range(self._count(self._size))]
        heads = [memoryview(bytearray(HEADER_BYTES)) for _ in items]
        whole: list[bool | None] = [False] * len(items)  # which of them are what they should be

        def check(number: int, length: int) -> None:
            item, stored = items[number], length - HEADER_BYTES
            fits = 0 <= stored <= self._size
            whole[number] = fits and self._header.check(
                heads[number], item, self._slot(item)[:stored]
            )

        commands: list[Command] = []
        for number, item in enumerate(items):
            slot, name = self._slot(item), block_name(self._prefix, item.key)
            for part, span in enumerate(spans):
                head, body = _NOTHING if part else heads[number], slot[span]
                # at once, while the next one comes and this one is still in a cache
                target = Target(head, body, partial(check, number) if len(spans) == 1 else None)
                # one byte more than there can be tells a value that is too long
                parts = encode(b"GETRANGE", part_name(name, part), 0, len(head) + len(body))
                commands.append(Command(name, parts, target))
        outcomes = await self._run(commands, limit_s=self._limit_s)
        for number in range(len(items)):
            own = outcomes[number * len(spans) : (number + 1) * len(spans)]
            lengths = [outcome for outcome in own if isinstance(outcome, int)]
            if any(map(_failure, own)):
                whole[number] = None  # its server is not there, or not ready
            elif len(lengths) < len(own):
                whole[number] = False
            elif len(spans) > 1:
                check(number, sum(lengths))
            self._corrupt += whole[number] is False and own[0] != 0
        return whole

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        await self._require_fit()
        outcomes = await self._put(items)
        there = [n for n, outcome in enumerate(outcomes) if outcome is None]
        if there and (again := await self._unlike([items[n] for n in there])):
            put = dict(zip([item.key for item in again], await self._put(again), strict=True))
            outcomes = [put.get(i.key, o) for i, o in zip(items, outcomes, strict=True)]
        return [outcome is not False for outcome in outcomes]

    async def _put(self, items: Sequence[Item]) -> list[bool | None]:
        """Of each block whether it was stored; None if something is there already."""
        commands: list[Command] = []
        ends: list[int] = []
        charges: dict[int, tuple[bytes, int]] = {}
        for item in items:
            name, length = block_name(self._prefix, item.key), item.length or self._size
            commands += [
                Command(name, partial(self._written, item, name, part))
                for part in reversed(range(self._count(length)))
            ]
            ends.append(len(commands))
            charges[len(commands) - 1] = item.salt, HEADER_BYTES + length
        replaced = await self._told([item for item in items if item.replace])
        outcomes = await self._run(commands, charges, self._limit_s)
        for end in ends:
            if outcomes[end - 1] == b"OK" and (old := replaced.get(commands[end - 1].key)):
                self._quotas.add(old[0], -HEADER_BYTES - old[1])
        if replaced:
            await self._quotas.settle(self._servers)
        stored = [outcome in (b"OK", None) for outcome in outcomes]
        whole = [all(stored[begin:end]) for begin, end in pairwise([0, *ends])]
        if len(commands) > len(items):
            await self._run([c for item in compress(items, whole) for c in self._lasting(item)])
        return [
            None if ok and outcomes[end - 1] is None else ok
            for ok, end in zip(whole, ends, strict=True)
        ]

    async def _unlike(self, items: Sequence[Item]) -> list[Item]:
        """Those of the blocks in whose place lies what has another type or an impossible length.

        They are to replace that. What could be the block is left to a get, which compares it.
        """
        found: list[Item] = []
        for item, outcome in zip(items, await self._lengths(items), strict=True):
            foreign = isinstance(outcome, ReplyError) and outcome.code == "WRONGTYPE"
            if foreign or (isinstance(outcome, int) and not self._fits(outcome)):
                self._corrupt += outcome != 0  # else it went meanwhile, or is empty
                found.append(item._replace(replace=True))
        return found

    async def _lengths(
        self, items: Sequence[Item], limit_s: float | None = None
    ) -> Sequence[Outcome]:
        names = [block_name(self._prefix, item.key) for item in items]
        return await self._run([Command(n, encode(b"STRLEN", n)) for n in names], limit_s=limit_s)

    def _fits(self, length: int) -> bool:
        """Whether the first value of a block may have this length."""
        return HEADER_BYTES <= length <= HEADER_BYTES + self._size

    def spare(self, salt: bytes) -> float:
        found = self._quotas.spare(salt)
        if not found:
            self._ask_gauges()  # by then others may have removed some
        return found

    async def remove(self, items: Sequence[Item]) -> None:
        await self._require_fit()
        count = self._count(self._size)
        parts = {block_name(self._prefix, item.key): count for item in items}
        await self._unlink(parts, await self._told(items))

    async def _told(self, items: Sequence[Item]) -> dict[bytes, tuple[bytes, int]]:
        """What the headers tell of what lies under these keys, if somebody has to count it."""
        names = [block_name(self._prefix, item.key) for item in items]
        return await heads(names, self._run) if self._quotas else {}

    async def _unlink(
        self, parts: Mapping[bytes, int], told: Mapping[bytes, tuple[bytes, int]]
    ) -> int:
        """Remove blocks of so many parts each, of which the headers told this; how many went."""
        outcomes = await self._run(
            [
                Command(name, encode(b"UNLINK", *(part_name(name, part) for part in range(count))))
                for name, count in parts.items()
            ]
        )
        gone = [
            name for name, out in zip(parts, outcomes, strict=True) if isinstance(out, int) and out
        ]
        if self._quotas:
            for salt, length in (told[name] for name in gone if name in told):
                self._quotas.add(salt, -HEADER_BYTES - length)
            await self._quotas.settle(self._servers)
        for outcome in outcomes:
            failure = _failure(outcome)
            if failure is not None:
                raise failure
        return len(gone)

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        outcomes = await self._lengths(items, self._probe_limit_s)
        return [isinstance(outcome, int) and self._fits(outcome) for outcome in outcomes]

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        await self._require_fit()
        seen = removed = 0
        addresses = await self._servers.addresses()
        total = sum([int(await self._entrance.ask(a, b"DBSIZE")) for a in addresses])
        for address in addresses:
            wire, _ = await self._entrance.wire(address)
            try:
                async for names in scan(self._entrance, wire, self._prefix):
                    removed += await self._purge(names, salt)
                    seen += STEP_KEYS
                    progress(min(seen, total), total)
            finally:
                wire.abort()
        if salt is None:  # nothing is left to be counted
            self._quotas.forget()
            await self._unlink({self._quotas.counters: 1, self._quotas.turn: 1}, {})
        return removed

    async def _purge(self, names: Sequence[bytes], salt: bytes | None) -> int:
        """Remove these keys, or those of them whose values name this salt, with their parts."""
        if salt is None:
            return await self._unlink(dict.fromkeys(names, 1), {})
        told = await heads(names, self._run)
        own = {name: length for name, (its, length) in told.items() if its == salt}
        parts = {name: self._count(length) for name, length in own.items()}
        return await self._unlink(parts, told)

    def corrupt_blocks(self) -> int:
        return self._corrupt

    def gauges(self) -> Mapping[str, int]:
        counted = {"namespace_bytes": self._quotas.total_bytes} if self._quotas else {}
        return {**self._gauges, **counted}

    def describe(self) -> dict[str, str]:
        url, options = self.options.parsed, self.options
        kind = "cluster" if options.cluster else f"master {options.sentinel}, from Sentinels"
        if not (options.cluster or options.sentinel):
            kind = "standalone"
        return {
            "servers": ", ".join(map(str, url.addresses)),
            "kind": kind,
            "version": self._version,
            "tls": "yes" if url.tls else "no",
            "connections": f"{options.connections} to each server",
            "batch": f"{self.batch_max} blocks",
            "value": f"at most {self._value_max} bytes",
            "quotas": self._quotas.describe(),
            "checksum": "xxh3-128" if self.context.verify else "none",
        }

    async def aclose(self) -> None:
        self._closed = True
        self._servers.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})


def _failure(outcome: Outcome) -> TierError | None:
    """What an outcome says about the server rather than about a key."""
    if isinstance(outcome, TierError):
        return outcome
    if not isinstance(outcome, ReplyError) or outcome.code == "WRONGTYPE":
        return None
    if outcome.code == "OOM":
        return TierFull(str(outcome))
    return TierError(str(outcome), temporary=outcome.code not in {"NOPERM", "NOAUTH"})
