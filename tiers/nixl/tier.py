"""The NIXL tier: blocks in other kvladder caches, on this machine or on others."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Annotated, ClassVar, TypeVar, cast

import msgspec
from xxhash import xxh3_64_intdigest

from kvladder.arena import Arena
from kvladder.errors import ConfigError, TierError
from kvladder.keys import BlockKey
from kvladder.layout import PAGE_BYTES
from kvladder.schema import Settings
from kvladder.tiers.base import Progress, Tier, TierContext
from kvladder.tiers.label import LABEL_BYTES, Read, Ref, Write
from kvladder.tiers.nixl.messages import BATCH_MAX, LOOKUP_MAX
from kvladder.tiers.nixl.plane import NixlPlane, load

try:
    from kvladder.tiers.nixl.control import Dialled
    from kvladder.tiers.nixl.curve import read_keys
    from kvladder.tiers.nixl.line import Client, Line, greet
except ModuleNotFoundError as missing:
    raise ImportError(f"{missing}: install kvladder[nixl]") from missing

T = TypeVar("T")

BATCH_BYTES = 64 << 20
INLINE_BYTES = 256 << 10
"""Of blocks whose checksums are made on the loop: a thread would cost more."""
KNOWN_MAX = 1 << 16
"""Blocks of which it is remembered who has them."""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%a-z]+\]|[^\s:/\[\]]+):\d{1,5}")
_OF_ONE_MACHINE = {"all", "cma", "knem", "posix", "shm", "sm", "sysv", "xpmem"}
Addresses = Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]


class NixlOptions(Settings, frozen=True, kw_only=True):
    """What a configuration says about a NIXL tier."""

    servers: Addresses = ()
    """Host and port of each ``kvladder serve``; a block is put into one of them."""
    peers: Addresses = ()
    """Host and port of each engine with ``export:``, whose blocks are read and never written."""
    keys: str
    """The file with the keys of this end."""
    transports: str = "tcp"
    """How bytes travel, as UCX names it: ``tcp``, or ``rc,tcp`` with RDMA."""
    interfaces: str = ""
    """The network devices, as UCX names them; all if empty."""
    required: bool = True
    """Whether the engine does not start while none of the servers can be reached."""

    def __post_init__(self) -> None:
        named = [*self.servers, *self.peers]
        if not named:
            raise ValueError("names neither servers nor peers: expected host:port of one at least")
        for address in named:
            if not _ADDRESS.fullmatch(address) or named.count(address) > 1:
                raise ValueError(f"{address!r}: expected host:port, each of them once")
        if found := _OF_ONE_MACHINE.intersection(self.transports.split(",")):
            what = "a transport of one machine, with which bytes come after a call was given up"
            raise ValueError(f"transports: {', '.join(found)} is {what}: expected tcp, or rc,tcp")


class NixlTier(Tier):
    """Other caches, each behind a line of its own; bytes come and go by writes alone.

    A block of servers belongs to one of those that are connected, by rendezvous hashing: another
    one takes it while that is away. Peers are asked all at once, and who has a block is remembered
    until it is got. NIXL cannot cancel, and the end of an agent, which can, holds the interpreter
    lock: so this tier always runs in a process of its own.
    """

    Options: ClassVar[type[NixlOptions]] = NixlOptions
    shared = True
    isolates = True
    probe_max = LOOKUP_MAX

    def __init__(self, options: NixlOptions) -> None:
        self.options = options
        self._servers: list[Line] = []
        self._peers: list[Line] = []
        self._known: OrderedDict[BlockKey, Line] = OrderedDict()
        """The peer that had a block when it was asked."""
        self._closed = False

    # ---- the beginning and the end

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        del capacity_bytes
        load()
        options = self.options
        keys = read_keys(options.keys)
        arena = Arena.create(1, PAGE_BYTES)
        try:
            NixlPlane(arena, options.transports, options.interfaces).destroy()
        except TierError as error:
            what = f"{options.transports} over {options.interfaces or 'any interface'}: {error}"
            raise ConfigError(what, path="transports") from error
        finally:
            arena.close()
        for address in (*options.servers, *options.peers):
            try:
                await greet(partial(Dialled, address, keys))
            except TierError as error:
                warn(f"{address}: {error}")
        return self.describe()

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_MAX, fitting, context.capacity_blocks))
        await context.run_blocking(load)
        options = self.options
        keys = read_keys(options.keys)
        plane = partial(NixlPlane, context.arena, options.transports, options.interfaces)
        client = Client(
            namespace=context.namespace,
            block_bytes=context.layout.block_bytes,
            plane=partial(context.run_blocking, plane),
            timeout_s=context.timeout_s,
        )
        for lines, addresses in ((self._servers, options.servers), (self._peers, options.peers)):
            for address in addresses:
                dial = partial(Dialled, address, keys)
                lines.append(Line(address, client, dial, context.say))
        try:
            await self._reached()
        except BaseException:
            await self.aclose()
            raise

    async def _reached(self) -> None:
        """Wait for the first attempts, and see what they say of the settings."""
        lines = [*self._servers, *self._peers]
        await asyncio.gather(*(line.tried() for line in lines))
        down = [line for line in lines if not line.is_up]
        for line in down:
            if not line.error.temporary:
                raise ConfigError(
                    str(line.error), path="peers" if line in self._peers else "servers"
                )
        for line in self._servers:
            if line.is_up and not line.here.writable:
                what = f"{line.address} is an engine, whose blocks are only read"
                raise ConfigError(what, path="servers", hint="expected it among the peers")
        if self._servers and self.options.required and {*self._servers} <= {*down}:
            hint = "expected a kvladder serve that runs, or required: false to start without it"
            raise ConfigError(str(self._servers[0].error), path="servers", hint=hint)

    async def aclose(self) -> None:
        self._closed = True
        lines = [*self._servers, *self._peers]
        await asyncio.gather(*(line.aclose() for line in lines))

    # ---- which far end

    def _up(self) -> list[Line]:
        """The servers that can be asked; raises TierError if there are none, or if it is closed."""
        if self._closed:
            raise TierError("the tier is closed", temporary=False)
        up = [line for line in self._servers if line.is_up]
        if self._servers and not up:
            raise self._servers[0].error
        return up

    @staticmethod
    def _owner(key: BlockKey, servers: Sequence[Line]) -> Line:
        """The server that a block belongs to."""
        if len(servers) == 1:
            return servers[0]
        return max(servers, key=lambda line: xxh3_64_intdigest(key + line.address.encode()))

    @staticmethod
    async def _each(
        groups: Mapping[Line, Sequence[int]],
        call: Callable[[Line, Sequence[int]], Awaitable[Sequence[T]]],
    ) -> dict[Line, Sequence[T]]:
        """What far ends answer of their blocks, those that do; an error if there are none."""
        answers = await asyncio.gather(
            *(call(line, numbers) for line, numbers in groups.items()), return_exceptions=True
        )
        found: dict[Line, Sequence[T]] = {}
        error: TierError | None = None
        for line, answer in zip(groups, answers, strict=True):
            if isinstance(answer, TierError):
                error = TierError(f"{line.address}: {answer}", temporary=answer.temporary)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[line] = answer
        if error is not None and not found:
            raise error
        return found

    # ---- the calls

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        up = self._up()
        ways = [self._ways(read.key, up) for read in reads]
        results: list[bool | None] = [
            None if self._is_away(read.key, up) else False for read in reads
        ]
        for turn in range(max(map(len, ways), default=0)):
            groups = _grouped(
                (ways[n][turn], n)
                for n in range(len(reads))
                if not results[n] and turn < len(ways[n])
            )
            found = await self._each(groups, partial(self._get, reads))
            for line, numbers in groups.items():
                come = found.get(line, [None] * len(numbers))  # there, as far as anybody knows
                for n, has_come in zip(numbers, come, strict=True):
                    results[n] = has_come or (None if has_come is None else results[n])
        return results

    def _ways(self, key: BlockKey, up: Sequence[Line]) -> list[Line]:
        """Who is asked for a block, one after the other."""
        known = self._known.pop(key, None)
        if known is not None and known.is_up:
            return [known]
        owner = [self._owner(key, up)] if up else []
        return owner + [line for line in self._peers if line.is_up]

    def _is_away(self, key: BlockKey, up: Sequence[Line]) -> bool:
        """Whether the server that a block belongs to otherwise is not there now."""
        return len(up) < len(self._servers) and self._owner(key, self._servers) not in up

    async def _get(
        self, every: Sequence[Read], line: Line, numbers: Sequence[int]
    ) -> list[bool | None]:
        reads = [every[n] for n in numbers]
        got = await line.here.get([read.key for read in reads], [read.slot for read in reads])
        come: list[Read] = []
        for at, (read, length) in enumerate(zip(reads, got.lengths, strict=True)):
            if length:
                read.came(got.labels[at * LABEL_BYTES : (at + 1) * LABEL_BYTES], length)
                come.append(read)
        await self._threaded(lambda: [read.check() for read in come], sum(got.lengths))
        return [length > 0 for length in got.lengths]

    async def _threaded(self, work: Callable[[], T], size: int) -> T:
        """Do what reads so many bytes of slots, in a thread if they are many."""
        if size <= INLINE_BYTES:
            return work()
        result: T = await self.context.run_blocking(work)
        return result

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        up = self._up()
        if not up:
            return [False] * len(writes)  # peers are read only
        if replaced := [write.key for write in writes if write.replace]:
            await self._remove(replaced, up)
        groups = _grouped((self._owner(write.key, up), n) for n, write in enumerate(writes))
        found = await self._each(groups, partial(self._put, writes))
        results = [False] * len(writes)
        for line, stored in found.items():
            for n, is_stored in zip(groups[line], stored, strict=True):
                results[n] = is_stored
        return results

    async def _put(
        self, every: Sequence[Write], line: Line, numbers: Sequence[int]
    ) -> Sequence[bool]:
        writes = [every[n] for n in numbers]

        async def label(wanted: Sequence[int]) -> Sequence[bytes]:
            size = sum(writes[n].length for n in wanted)
            return await self._threaded(lambda: [writes[n].label() for n in wanted], size)

        return await line.here.put(
            [write.key for write in writes],
            [write.slot for write in writes],
            [write.length for write in writes],
            [write.facts for write in writes],
            label,
        )

    async def remove(self, blocks: Sequence[Ref]) -> None:
        self._up()
        if blocks:  # from all servers: which of them has what, may have changed
            await self._remove([block.key for block in blocks], self._servers)

    async def _remove(self, keys: Sequence[BlockKey], servers: Sequence[Line]) -> None:
        async def removed(line: Line) -> None:
            await line.here.remove(keys)

        await _all(map(removed, servers))

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        up, keys = self._up(), [block.key for block in blocks]
        if not keys:
            return []
        every = range(len(keys))
        groups: dict[Line, Sequence[int]] = {line: every for line in self._peers if line.is_up}
        if len(up) == 1:
            groups[up[0]] = every
        else:
            groups |= _grouped((self._owner(key, up), n) for n, key in enumerate(keys) if up)
        found = await self._each(groups, partial(self._lookup, keys))
        results = [False] * len(keys)
        for line, have in found.items():
            for n in compress(groups[line], have):
                results[n] = True
                if line in self._peers:
                    self._known[keys[n]] = line
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return results

    async def _lookup(
        self, every: Sequence[BlockKey], line: Line, numbers: Sequence[int]
    ) -> Sequence[int]:
        keys = every if len(numbers) == len(every) else [every[n] for n in numbers]
        return await line.here.lookup(keys)

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        self._up()

        async def purged(line: Line) -> int:
            return await line.here.purge(salt)

        count = sum(await _all(map(purged, self._servers)))
        progress(count, count)
        return count

    # ---- what it says of itself

    def gauges(self) -> Mapping[str, int]:
        lines = [*self._servers, *self._peers]
        return {
            "far_ends": len(lines),
            "far_ends_connected": sum(line.is_up for line in lines),
            "connections_broken": sum(line.breaks for line in lines),
        }

    def describe(self) -> dict[str, str]:
        options = self.options
        return {
            "servers": ", ".join(options.servers) or "none",
            "peers": ", ".join(options.peers) or "none",
            "transports": options.transports,
            "interfaces": options.interfaces or "all",
            "batch": f"{self.batch_max} blocks",
        }


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What they return; if one fails its error, when all have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("list[T]", answers)


def _grouped(pairs: Iterable[tuple[Line, int]]) -> dict[Line, list[int]]:
    """Numbers by whom they go to."""
    groups: dict[Line, list[int]] = {}
    for line, number in pairs:
        groups.setdefault(line, []).append(number)
    return groups
