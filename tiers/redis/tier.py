"""The Redis tier: blocks as values of a Redis or Valkey server that many engines share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property, partial
from itertools import compress, pairwise
from math import inf
from typing import ClassVar

from kvladder.errors import TierError, TierFull, Unavailable
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.base import Tier
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import LABEL_BYTES, VERSION, Facts, LabelFields, Read, Ref, Write
from kvladder.tiers.redis.nodes import Closed, Entrance, Unfit, pairs, parse_info
from kvladder.tiers.redis.quota import STEP_KEYS, Charge, Quotas, labels, scan
from kvladder.tiers.redis.resp import (
    Command,
    CommandForm,
    Part,
    ReplyError,
    Target,
    encode,
    encode_around,
)
from kvladder.tiers.redis.servers import Outcome, Servers, first
from kvladder.tiers.redis.url import Address, RedisOptions
from kvladder.units import Size

OLDEST = (6, 2)
BATCH_BYTES = 64 << 20
BATCH_BLOCKS_MAX = 128
PROBE_BLOCKS_MAX = 16384
VALUE_BYTES_MAX = 512 << 20
"""Longest value that a server takes, unless its ``proto-max-bulk-len`` differs."""
VALUE_BYTES_MIN = 1 << 20
"""Smallest possible ``proto-max-bulk-len``."""
SHARE = 0.8
"""Share of a call's time for the servers of a cluster to answer. A server silent for longer costs
only its own blocks; the rest of the time serves to return the others' answers."""
PART_MS = 600_000
"""Milliseconds for which a block's part stays if the first part, written last, never follows."""
PREFIX = b"kvladder:"
SPACE_DIGITS = 32
STRLEN = CommandForm(b"STRLEN")
_NOTHING = memoryview(b"")
NO_CHARGES: Mapping[int, Charge] = {}
GAUGES_S = 10.0
GAUGES = {
    "server_used_bytes": "used_memory",
    "server_max_bytes": "maxmemory",
    "server_evicted": "evicted_keys",
}


class RedisTier(Tier):
    """Blocks under ``kvladder:VERSION:NAMESPACE:{BLOCK}``; each value is a label, then the bytes.

    Values are written once and whole. Other engines may put into and remove from the same servers,
    even engines with another version of labels.
    """

    Options: ClassVar[type[RedisOptions]] = RedisOptions
    shared = True
    surveys = True
    overhead_bytes = LABEL_BYTES
    probe_max = PROBE_BLOCKS_MAX

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
            try:
                used, most, _ = (await self._said()).values()
            except TierError as error:
                warn(str(error))
        finally:
            await self.aclose()
        if 0 < most < capacity_bytes:
            warn(
                f"capacity is {Size(capacity_bytes).about()}, but the servers keep at most"
                f" {Size(most).about()} (maxmemory) and evict blocks beyond that"
            )
        if used and not most and self.options.quota.namespace is None:
            warn("no limit on the servers (maxmemory 0) and no quota: set one of the two")
        facts = {"servers": ", ".join(map(str, self.options.parsed.addresses))}
        if used:
            limit = f"of {Size(most).about()}" if most else "without a limit (maxmemory 0)"
            facts |= {"version": self._version, "memory": f"{Size(used).about()} used {limit}"}
        return facts

    async def _reached(self) -> None:
        """Check the servers for ``open`` or ``examine``; raise ConfigError or Unavailable."""
        try:
            await self._require_fit()
        except Unfit as error:
            raise error.wrong from error
        except TierError as error:
            raise Unavailable(str(error), path="url", hint="check that the server runs") from error

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_BLOCKS_MAX, fitting, context.capacity_blocks))
        self._limit_s, self._probe_limit_s = (
            None if timeout_s is None else timeout_s * SHARE
            for timeout_s in (context.timeout_s, self.probe_timeout_s or context.timeout_s)
        )
        space = context.namespace.hex()[:SPACE_DIGITS].encode()
        self._prefix = PREFIX + b"%d:%b:" % (VERSION, space)
        self._every_version = PREFIX + b"*%b:" % space
        self._size = context.layout.block_bytes
        self._ttls = [self.options.ttl_s(n) for n in range(PRIORITY_MAX + 1)]
        value_bytes = LABEL_BYTES + self._size
        options, entrance, servers = self.options.quota, self._entrance, self._servers
        self._quotas = Quotas(options, self._prefix, value_bytes, entrance, servers)
        await self._reached()

    async def _require_fit(self) -> None:
        """Check once that the servers match the settings, and learn the longest value they take."""
        if self._closed:
            raise Closed
        if self._fit:
            return
        async with self._fitting:
            if not self._fit:
                await self._check_servers()
                self._fit = True

    async def _check_servers(self) -> None:
        cluster = self.options.cluster
        some = self.options.parsed.addresses if cluster else await self._servers.addresses()
        self._version, self._value_max = await first(some, self._checked)

    async def _checked(self, address: Address) -> tuple[str, int]:
        """Return a server's version and the longest value it takes; raise Unfit on a mismatch."""
        value_max = VALUE_BYTES_MAX
        with closing(await self._entrance.wire(address)) as wire:
            version = self._version_of(address, wire.told)
            # the user may lack this right, or a service may lack the command or answer otherwise
            with suppress(TierError, KeyError, TypeError, ValueError):
                name = b"proto-max-bulk-len"
                told = pairs(await self._entrance.reply(wire, b"CONFIG", b"GET", name))
                value_max = max(int(told[name]), VALUE_BYTES_MIN)
        return version, value_max

    def _version_of(self, address: Address, info: Mapping[str, str]) -> str:
        """Return the server's version; raise Unfit if it is too old or not what settings say."""
        said = info.get("redis_version", "0")
        version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else said
        if tuple(int(n) for n in said.split(".") if n.isdecimal()) < OLDEST:
            raise Unfit(
                f"{address} is Redis {version}", hint="expected Redis 6.2, Valkey 7.2 or later"
            )
        is_cluster = (info.get("server_mode") or info.get("redis_mode")) == "cluster"
        if is_cluster and not self.options.cluster:
            raise Unfit(f"{address} is a node of a cluster", hint="set cluster: true")
        if self.options.cluster and not is_cluster:
            hint = "leave out cluster: true"
            raise Unfit(f"{address} is a standalone server", path="cluster", hint=hint)
        return version

    # ---- commands

    def _name(self, key: BlockKey) -> bytes:
        """Return the Redis key of a block. Its hash tag is the block, so clusters spread blocks."""
        return self._prefix + b"{" + key.hex().encode() + b"}"

    def _count(self, length: int) -> int:
        """Return the number of values for a block of ``length`` bytes: 1 unless it is too long."""
        return -(-(LABEL_BYTES + length) // self._value_max)

    def _span(self, part: int) -> slice:
        """Return the range of a block's bytes that a part holds; part 0 also holds the label."""
        begin = part * self._value_max - LABEL_BYTES
        return slice(max(0, begin), begin + self._value_max)

    @cached_property
    def _spans(self) -> Sequence[tuple[slice, CommandForm]]:
        """Byte range of a whole block in each of its parts, and the command that asks for it."""
        every: list[tuple[slice, CommandForm]] = []
        for part in range(self._count(self._size)):
            begin, end, _ = self._span(part).indices(self._size)
            size = end - begin + (0 if part else LABEL_BYTES)
            # the range ends one byte too far, so that a value that is too long is noticed
            every.append((slice(begin, end), CommandForm(b"GETRANGE", 0, size)))
        return every

    def _written(self, write: Write, name: bytes, part: int, replace: bool) -> Iterable[Part]:
        """Return the command that stores one part of a block.

        Part 0 is written last, since it makes the block visible.
        """
        label = b"" if part else write.label()
        body = write.view[: write.length][self._span(part)]
        ttl_ms = self._ttl_ms(write.facts)
        if part:
            ttl_ms = PART_MS if ttl_ms is None else min(ttl_ms, PART_MS)
        once: list[bytes | int] = [] if replace else [b"NX"]
        before, after = encode_around(
            b"SET",
            part_name(name, part),
            length=len(label) + len(body),
            after=once if ttl_ms is None else [*once, b"PX", ttl_ms],
        )
        return before + label, body, after

    def _lasting(self, write: Write) -> Iterable[Command]:
        """Yield commands that give the other parts of a stored block the first part's lifetime."""
        name, ttl_ms = self._name(write.key), self._ttl_ms(write.facts)
        for part in range(1, self._count(write.length)):
            key = part_name(name, part)
            parts = encode(b"PERSIST", key) if ttl_ms is None else encode(b"PEXPIRE", key, ttl_ms)
            yield Command(name, parts)

    def _ttl_ms(self, facts: Facts) -> int | None:
        """Return how long the server keeps a block, in milliseconds; None means no limit."""
        ttl_s = self._ttls[facts.priority]
        if facts.expires_wall_s is not None:
            left_s = facts.expires_wall_s - self.context.clock.wall()
            ttl_s = left_s if ttl_s is None else min(ttl_s, left_s)
        return None if ttl_s is None else max(1, int(ttl_s * 1000))

    async def _run(
        self,
        commands: Sequence[Command],
        charges: Mapping[int, Charge] = NO_CHARGES,
        limit_s: float | None = None,
    ) -> Sequence[Outcome]:
        """Run commands and return their outcomes, with server errors as TierErrors.

        If every outcome is a TierError, raise the first.
        """
        if not commands:
            return []
        self._ask_gauges()
        if charges:
            outcomes = await self._quotas.run(commands, charges, limit_s)
        else:
            outcomes = await self._servers.run(commands, limit_s)
        if [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            outcomes = [*map(_of_server, outcomes)]
            failures = [outcome for outcome in outcomes if isinstance(outcome, TierError)]
            if len(failures) == len(outcomes):
                raise failures[0]
        return outcomes

    async def _run_whole(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """Run commands; raise TierError if any of them was not answered."""
        outcomes = await self._run(commands)
        for outcome in outcomes:
            if isinstance(outcome, TierError):
                raise outcome
        return outcomes

    def _ask_gauges(self) -> None:
        """Refresh the gauges and quotas in the background, at most every ``GAUGES_S``."""
        now = self.context.clock.now()
        if self._asking is None and now - self._asked_s >= GAUGES_S:
            self._asked_s = now
            self._asking = asyncio.create_task(self._gauge(), name="kvladder-redis-info")

    async def _said(self) -> dict[str, int]:
        """Return the values of ``GAUGES``, summed over all servers."""
        found = dict.fromkeys(GAUGES, 0)
        for address in await self._servers.addresses():
            info = parse_info(await self._entrance.ask(address, b"INFO"))
            for name, field in GAUGES.items():
                found[name] += int(info.get(field, "0"))
        return found

    async def _gauge(self) -> None:
        try:
            self._gauges = await self._said()
            if self._quotas:
                async with asyncio.timeout(self._entrance.limit_s):
                    await self._quotas.refresh()
                await self._quotas.recount()
        except (TierError, OSError, ValueError, TypeError):
            pass  # keep the old values
        finally:
            self._asking = None

    # ---- the tier

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        await self._require_fit()
        spans = self._spans
        every = memoryview(bytearray(LABEL_BYTES * len(reads)))
        starts = range(0, len(every), LABEL_BYTES)
        beside = [every[start : start + LABEL_BYTES] for start in starts]
        commands: list[Command] = []
        for read, label in zip(reads, beside, strict=True):
            view, name = read.view, self._name(read.key)
            for part, (span, form) in enumerate(spans):
                head, body = _NOTHING if part else label, view[span]
                # check it at once: it is still in a CPU cache, and the next one is arriving
                whole = partial(_came, read, label) if len(spans) == 1 else None
                parts = form.encode(part_name(name, part))
                commands.append(Command(name, parts, Target(head, body, whole)))
        outcomes = await self._run(commands, limit_s=self._limit_s)
        owns = (outcomes[at : at + len(spans)] for at in range(0, len(outcomes), len(spans)))
        return [*map(_found, reads, beside, owns)]

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        await self._require_fit()
        outcomes = await self._put(writes)
        there = [write for write, outcome in zip(writes, outcomes, strict=True) if outcome is None]
        if there and (again := await self._unlike(there)):
            replaced = await self._put(again, replace=True)
            put = dict(zip([write.key for write in again], replaced, strict=True))
            outcomes = [put.get(w.key, o) for w, o in zip(writes, outcomes, strict=True)]
        return [outcome is not False for outcome in outcomes]

    async def _put(self, writes: Sequence[Write], *, replace: bool = False) -> list[bool | None]:
        """Return for each block whether it was stored; None if its key already had a value."""
        commands: list[Command] = []
        ends: list[int] = []
        for write in writes:
            name, anew = self._name(write.key), replace or write.replace
            commands += [
                Command(name, partial(self._written, write, name, part, anew))
                for part in reversed(range(self._count(write.length)))
            ]
            ends.append(len(commands))
        charges: dict[int, Charge] = {}
        if self._quotas:
            told = await self._told([write for write in writes if replace or write.replace])
            for write, last in zip(writes, (end - 1 for end in ends), strict=True):
                old, size = told.get(commands[last].key), LABEL_BYTES + write.length
                charges[last] = Charge(write.facts.salt, size, old)
        outcomes = await self._run(commands, charges, self._limit_s)
        if len(commands) == len(writes):  # the usual case: one value per block
            return [None if outcome is None else outcome == b"OK" for outcome in outcomes]
        stored = [outcome in (b"OK", None) for outcome in outcomes]
        whole = [all(stored[begin:end]) for begin, end in pairwise([0, *ends])]
        await self._run([c for write in compress(writes, whole) for c in self._lasting(write)])
        return [
            None if ok and outcomes[end - 1] is None else ok
            for ok, end in zip(whole, ends, strict=True)
        ]

    async def _unlike(self, writes: Sequence[Write]) -> list[Write]:
        """Return the blocks whose keys have a value of another type or of an impossible length.

        These values must be replaced. Any other value may be the block; a get will check it.
        """
        return [
            write
            for write, outcome in zip(writes, await self._lengths(writes), strict=True)
            if _is_of_another_type(outcome)
            or (isinstance(outcome, int) and not self._fits(outcome))
        ]

    async def _lengths(
        self, blocks: Sequence[Ref | Write], limit_s: float | None = None
    ) -> Sequence[Outcome]:
        names = [self._name(block.key) for block in blocks]
        return await self._run([Command(n, STRLEN.encode(n)) for n in names], limit_s=limit_s)

    def _fits(self, length: int) -> bool:
        """Return whether the first value of a block may have this length."""
        return LABEL_BYTES <= length <= LABEL_BYTES + self._size

    def spare(self, salt: bytes) -> float:
        found = self._quotas.spare(salt)
        if not found:
            self._ask_gauges()  # another engine may have removed blocks meanwhile
        return found

    async def remove(self, blocks: Sequence[Ref]) -> None:
        await self._require_fit()
        count = self._count(self._size)
        parts = {self._name(block.key): count for block in blocks}
        await self._unlink(parts, await self._told(blocks))

    async def _told(self, blocks: Sequence[Ref | Write]) -> dict[bytes, LabelFields]:
        """Read the labels of these blocks if there are quotas, to charge for them; else nothing."""
        if not self._quotas:
            return {}
        told = await labels([self._name(block.key) for block in blocks], self._run)
        return {name: label for name, label in told.items() if label is not None}

    async def _unlink(self, parts: Mapping[bytes, int], told: Mapping[bytes, LabelFields]) -> int:
        """Remove blocks, given the number of parts by key, and return how many were removed.

        Keys of single parts are no blocks, and do not count. ``told`` has the fields of labels by
        key, for the quotas.
        """
        outcomes = await self._run(
            [
                Command(
                    name, encode(b"UNLINK", name, *(name + b":%d" % n for n in range(1, count)))
                )
                for name, count in parts.items()
            ]
        )
        gone = [
            name for name, out in zip(parts, outcomes, strict=True) if isinstance(out, int) and out
        ]
        if self._quotas:
            for old in (told[name] for name in gone if name in told):
                self._quotas.remove(old)
            await self._quotas.settle()
        for outcome in outcomes:
            if isinstance(outcome, TierError):
                raise outcome
        return sum(name.endswith(b"}") for name in gone)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        await self._require_fit()
        outcomes = await self._lengths(blocks, self._probe_limit_s)
        return [isinstance(outcome, int) and self._fits(outcome) for outcome in outcomes]

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        await self._require_fit()
        seen = removed = 0
        # a purge of all blocks also removes the counters of the quotas
        pattern = self._every_version + (b"*" if salt is None else b"{*")
        owners = await self._servers.owners()
        addresses = await self._servers.addresses()
        total = sum([int(await self._entrance.ask(a, b"DBSIZE")) for a in addresses])
        for address in addresses:
            with closing(await self._entrance.wire(address)) as wire:
                async for names in scan(self._entrance, wire, pattern):
                    removed += await self._purge(names, salt)
                    seen += STEP_KEYS
                    progress(min(seen, total), total)
        if await self._servers.owners() != owners:
            raise TierError("slots moved during the purge, which has to run again")
        if salt is None:
            self._quotas.forget()
        return removed

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        await self._require_fit()
        size = len(self._prefix) + 1
        for address in await self._servers.addresses():
            with closing(await self._entrance.wire(address)) as wire:
                async for names in scan(self._entrance, wire, self._prefix + b"{*}"):
                    if salt is not None:
                        told = await labels(names, self._run_whole)
                        names = [name for name, label in told.items() if _may_be_of(label, salt)]
                    yield [BlockKey(bytes.fromhex(name[size:-1].decode())) for name in names]

    async def _purge(self, names: Sequence[bytes], salt: bytes | None) -> int:
        """Remove these keys, or with ``salt`` those of blocks whose labels name it, with all parts.

        Keys of other label versions, damaged labels and parts without a block are always removed,
        since their salt cannot be read. A part that a block no longer needs has a key of its own
        among ``names``.
        """
        if salt is None:
            return await self._unlink(dict.fromkeys(names, 1), {})
        blocks = {name: whole_name(name) for name in names if name.startswith(self._prefix)}
        told = await labels([*dict.fromkeys(blocks.values())], self._run_whole)
        own = [name for name, block in blocks.items() if _may_be_of(told.get(block), salt)]
        known = {name: label for name, label in told.items() if label is not None}
        longest = self._count(self._size)
        counts = {n: min(longest, self._count(label.length)) for n, label in known.items()}
        parts = {n: counts.get(n, longest) if n == blocks[n] else 1 for n in own}
        others = dict.fromkeys(set(names).difference(blocks), 1)
        return await self._unlink(parts | others, known)

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
        }

    async def aclose(self) -> None:
        self._closed = True
        self._servers.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})


def part_name(name: bytes, part: int) -> bytes:
    """Return the key of a block's part; part 0 has the block's own key and holds the label."""
    return name + b":%d" % part if part else name


def whole_name(name: bytes) -> bytes:
    """Return the key of the block that a key, its own or one of its parts, belongs to."""
    return b"".join(name.partition(b"}")[:2])


def _may_be_of(label: LabelFields | None, salt: bytes) -> bool:
    """Return whether a block may be of a salt: its label names it, or cannot be read."""
    return label is None or label.facts.salt == salt


def _came(read: Read, label: memoryview, length: int) -> None:
    """Report a value of this length to the read, and check it; ignore an empty value."""
    if length:
        read.came(label, length - LABEL_BYTES)
        read.check()


def _found(read: Read, label: memoryview, own: Sequence[Outcome]) -> bool | None:
    """Return whether a block's values are the block; None if a server is down or not ready."""
    lengths = [outcome for outcome in own if isinstance(outcome, int)]
    if len(lengths) < len(own) and any(isinstance(outcome, TierError) for outcome in own):
        return None
    if len(lengths) == len(own) > 1 and lengths[0]:
        read.came(label, sum(lengths) - LABEL_BYTES)
    # length 0 means absent; anything else that did not arrive, e.g. of another type, is damaged
    return own[0] != 0 and read.check()


def _is_of_another_type(outcome: Outcome) -> bool:
    return isinstance(outcome, ReplyError) and outcome.code == "WRONGTYPE"


def _of_server(outcome: Outcome) -> Outcome:
    """Return the outcome, as a TierError if the error is about the server rather than a key."""
    if not isinstance(outcome, ReplyError) or _is_of_another_type(outcome):
        return outcome
    if outcome.code == "OOM":
        return TierFull(str(outcome))
    return TierError(str(outcome), temporary=outcome.code not in {"NOPERM", "NOAUTH"})
