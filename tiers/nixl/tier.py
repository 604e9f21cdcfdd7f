"""The NIXL tier: blocks in other kvladder caches, on this machine or on others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, pairwise, repeat, starmap
from math import inf
from typing import Annotated, ClassVar, TypeVar, cast

import msgspec
from xxhash import xxh3_64_intdigest

from kvladder.arena import Arena
from kvladder.errors import ConfigError, PermissionDenied, TierError, Unavailable
from kvladder.keys import BlockKey
from kvladder.layout import PAGE_BYTES
from kvladder.schema import Address, Settings, masked
from kvladder.tiers.base import Tier
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import LABEL_BYTES, Read, Ref, Write
from kvladder.tiers.nixl.control import Dialled, Dialler
from kvladder.tiers.nixl.curve import KeyRing
from kvladder.tiers.nixl.line import Client, Connection, Line, greet
from kvladder.tiers.nixl.messages import BATCH_MAX, LOOKUP_MAX, VERSION
from kvladder.tiers.nixl.plane import INLINE_BYTES, NixlPlane, load, made
from kvladder.tiers.nixl.roster import FOLLOW_S, Entry, Roster, listed, require_url, run_of

T = TypeVar("T")

BATCH_BYTES = 64 << 20
PARTS, PART_BYTES_MIN = 4, 16 << 20
"""Most parts of a batch, and their least size: one part is checked while the next one travels."""
PIECES = 0.25
"""Share of a call's time after which no further piece of a put is begun."""
KNOWN_MAX = 1 << 16
"""Most blocks for which the tier remembers a peer that has them."""
_OF_ONE_MACHINE = {"all", "cma", "knem", "posix", "shm", "sm", "sysv", "xpmem"}
Part = tuple[Line, Sequence[int]]
"""A far end, and the indices of the call's blocks that it is asked for."""
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=256)]
SERVER_HINT = "check that kvladder serve runs there"


class NixlOptions(Settings, frozen=True, kw_only=True):
    """The settings of a NIXL tier."""

    servers: Addresses = ()
    """Host and port of each ``kvladder serve``; a block is put into one of them."""
    peers: Addresses = ()
    """Host and port of each engine with ``export:``; its blocks are read, and none is written."""
    roster: str = ""
    """URL of a Redis where servers and peers announce themselves; replaces both lists."""
    keys: str
    """Path of the file with this end's keys."""
    transports: str = "tcp"
    """Transports, as UCX names them: ``tcp``, or ``rc,tcp`` with RDMA."""
    interfaces: Annotated[str, msgspec.Meta(min_length=1)] = "all"
    """Network devices, as UCX names them; ``all``: those of UCX_NET_DEVICES, if it is set."""

    def __post_init__(self) -> None:
        named = [*self.servers, *self.peers]
        if self.roster:
            if named:
                what, hint = "cannot be combined with servers or peers", "leave out one of them"
                raise ConfigError(what, path="roster", hint=hint)
            require_url(self.roster)
        elif not named:
            what = "no servers, peers or roster"
            raise ValueError(f"{what}: expected host:port of one or more, or the URL of a Redis")
        for address in named:
            if named.count(address) > 1:
                raise ValueError(f"{address!r} is listed more than once")
        if found := _OF_ONE_MACHINE.intersection(self.transports.split(",")):
            what = "transports within one machine may still write after a call was abandoned"
            raise ValueError(f"transports: {', '.join(found)}: {what}: expected tcp, or rc,tcp")


class NixlTier(Tier):
    """Blocks in other caches: servers, which take blocks, and peers, which are only read.

    Each far end has a line of its own, and bytes travel by writes alone. A block belongs to one
    of the connected servers, by rendezvous hashing; if that one is away, another takes its place.
    Peers are asked all at once. The tier remembers which peer has a block until the block is got.

    NIXL cannot cancel. Destroying an agent can, but holds the interpreter lock. So this tier
    always runs in a process of its own.
    """

    Options: ClassVar[type[NixlOptions]] = NixlOptions
    shared = True
    isolates = True
    overhead_bytes = LABEL_BYTES
    probe_max = LOOKUP_MAX

    def __init__(self, options: NixlOptions) -> None:
        self.options = options
        self.surveys = bool(options.servers or options.roster)  # peers are not the level's medium
        self._servers: list[Line] = []
        self._peers: list[Line] = []
        self._known: OrderedDict[BlockKey, Line] = OrderedDict()
        """Peer that had the block when last asked, by key, the oldest first."""
        self._roster: Roster | None = None
        self._following: asyncio.Task[None] | None = None
        self._dropped: set[asyncio.Task[None]] = set()
        self._unfit = 0
        """Number of far ends on the roster that cannot have or take this tier's blocks."""
        self._unread = 0
        """Number of failed reads of the roster."""
        self._closed = False

    # ---- opening and closing

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        del capacity_bytes
        load()
        options = self.options
        keys = KeyRing(options.keys, warn).keys
        arena = Arena.create(1, PAGE_BYTES)
        try:
            NixlPlane(arena, options.transports, options.interfaces).destroy()
        except TierError as error:
            what = f"{options.transports}, interfaces {options.interfaces}: {error}"
            hint = "check that the machine has these devices"
            raise Unavailable(what, path="transports", hint=hint) from error
        finally:
            arena.close()
        found = await listed(options.roster, keys.peers) if options.roster else {}
        addresses = [*options.servers, *options.peers, *(one.address for one in found.values())]
        silent: list[str] = []
        for address in addresses:
            why = ""
            for peer in keys.peers:
                try:
                    await greet(partial(Dialled, address, keys, peer))
                except TierError as error:
                    why = why or f"{address}: {error}"
                else:
                    break
            else:
                silent.append(why)
        if silent and len(silent) == len(addresses):
            where = "roster" if options.roster else "servers" if options.servers else "peers"
            raise Unavailable("; ".join(silent), path=where, hint=SERVER_HINT)
        for text in silent:
            warn(text)
        told = {"announced": ", ".join(found) or "none"} if options.roster else {}
        return {**self.describe(), **told}

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_MAX, fitting, context.capacity_blocks))
        await context.run_blocking(load)
        options = self.options
        ring = KeyRing(options.keys, context.say)
        plane = partial(NixlPlane, context.arena, options.transports, options.interfaces)

        async def renew() -> int:
            await context.run_blocking(ring.renew)
            return len(ring.keys.peers)

        client = Client(
            namespace=context.namespace,
            block_bytes=context.layout.block_bytes,
            plane=partial(made, context.run_blocking, plane),
            timeout_s=context.timeout_s,
            renew=renew,
        )

        def line(name: str, address: str) -> Line:
            return Line(address, client, Dialler(address, ring), context.say, name)

        self._line = line
        try:
            if options.roster:
                self._roster = Roster(options.roster, lambda: ring.keys.peers)
                await self._look(self._roster)
                self._following = asyncio.create_task(self._follow(self._roster, renew))
            self._servers += [line(address, address) for address in options.servers]
            self._peers += [line(address, address) for address in options.peers]
            await self._reached()
        except BaseException:
            await self.aclose()
            raise

    async def _reached(self) -> None:
        """Wait for each line's first attempt, and check the settings against the results.

        Raises
        ------
        ConfigError
            A far end refuses this client, or a server lets it only read, as an engine does.
        Unavailable
            The tier is required, and no server (without servers: no peer) is connected.
        """
        lines = [*self._servers, *self._peers]
        await asyncio.gather(*(line.tried() for line in lines))
        down = [line for line in lines if not line.is_up]
        for line in down:
            if not line.error.temporary and self._roster is None:
                raise ConfigError(
                    str(line.error), path="peers" if line in self._peers else "servers"
                )
        for line in self._servers:
            if line.is_up and not line.here.writable and self._roster is None:
                what = f"{line.address} takes no blocks from this client, which may only read there"
                raise ConfigError(what, path="servers", hint="list it under peers")
        far = self._servers or ([] if self._roster else lines)
        if self.context.required and {*far} <= {*down}:
            where = "roster" if self._roster else "servers" if self._servers else "peers"
            what = str(far[0].error) if far else "the roster lists no usable server"
            raise Unavailable(what, path=where, hint=SERVER_HINT)
        for line in down:
            self.context.say(
                f"{line.error} ({SERVER_HINT}): kvladder tries again in the background"
            )

    async def aclose(self) -> None:
        self._closed = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        lines = [*self._servers, *self._peers]
        await asyncio.gather(*self._dropped, *(line.aclose() for line in lines))
        if self._roster is not None:
            await self._roster.aclose()

    # ---- the roster

    async def _follow(self, roster: Roster, renew: Callable[[], Awaitable[object]]) -> None:
        """Follow the roster for ever; while it cannot be read, keep the last known far ends."""
        is_known = True
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await renew()
                await self._look(roster)
                is_known = True
            except (TierError, ConfigError) as error:
                self._unread += 1
                if is_known:
                    self.context.say(f"{error}: kvladder keeps using the far ends that it knows")
                is_known = False

    async def _look(self, roster: Roster) -> None:
        """Read the roster, and keep a line to each far end on it that can be used here.

        A connected far end stays even if it is no longer on the roster: it is alive and has blocks.
        """
        found = await roster.read()
        own, space = run_of(self.context.arena), self.context.namespace.hex()
        others = {name: entry for name, entry in found.items() if entry.run != own}
        fit = {name: entry for name, entry in others.items() if self._fits(entry, space)}
        self._unfit = len(others) - len(fit)
        for lines, writable in ((self._servers, True), (self._peers, False)):
            wanted = {name: e.address for name, e in fit.items() if e.writable is writable}
            for line in [*lines]:
                address = wanted.get(line.name)
                if address == line.address or (address is None and line.is_up):
                    wanted.pop(line.name, None)
                else:
                    lines.remove(line)
                    leaving = asyncio.create_task(line.aclose())
                    self._dropped.add(leaving)
                    leaving.add_done_callback(self._dropped.discard)
            lines += [self._line(*one) for one in wanted.items()]

    def _fits(self, entry: Entry, space: str) -> bool:
        """Return whether a far end speaks our protocol, and can have or take our blocks."""
        has_ours = entry.namespace in {"", space}
        is_large = entry.block_bytes >= self.context.layout.block_bytes
        return has_ours and is_large and entry.version == VERSION

    # ---- choice of far ends

    def _up(self) -> list[Line]:
        """Return the connected servers.

        Raises
        ------
        TierError
            The tier is closed, or it has servers and none is connected.
        """
        if self._closed:
            raise TierError("the tier is closed", temporary=False)
        up = [line for line in self._servers if line.is_up]
        if self._servers and not up:
            raise self._servers[0].error
        return up

    @staticmethod
    def _owner(key: BlockKey, servers: Sequence[Line]) -> Line:
        """Return which of ``servers`` a block belongs to, by rendezvous hashing."""
        if len(servers) == 1:
            return servers[0]
        return max(servers, key=lambda line: xxh3_64_intdigest(key + line.name.encode()))

    def _parts(self, pairs: Iterable[tuple[Line, int]]) -> list[Part]:
        """Group blocks by far end, and split each group into the parts in which it travels."""
        least, parts = -(-PART_BYTES_MIN // self.context.layout.slot_bytes), list[Part]()
        for line, numbers in _grouped(pairs).items():
            count = max(1, min(PARTS, len(numbers) // least))
            cuts = [len(numbers) * n // count for n in range(count + 1)]
            parts += [(line, numbers[start:end]) for start, end in pairwise(cuts)]
        return parts

    @staticmethod
    async def _each(
        parts: Sequence[Part], call: Callable[[Line, Sequence[int]], Awaitable[Sequence[T]]]
    ) -> list[Sequence[T] | None]:
        """Call ``call`` for each part at once; return its answer, or None where it failed.

        If all parts fail, raise the last error.
        """
        answers = await asyncio.gather(*starmap(call, parts), return_exceptions=True)
        found: list[Sequence[T] | None] = []
        error: TierError | None = None
        for (line, _), answer in zip(parts, answers, strict=True):
            if isinstance(answer, TierError):
                error = TierError(f"{line.address}: {answer}", temporary=answer.temporary)
                found.append(None)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        if error is not None and not any(answer is not None for answer in found):
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
            parts = self._parts(
                (ways[n][turn], n)
                for n in range(len(reads))
                if not results[n] and turn < len(ways[n])
            )
            found = await self._each(parts, partial(self._get, reads))
            for (_, numbers), come in zip(parts, found, strict=True):
                # a far end that failed may still have these blocks: None, not a miss
                for n, has_come in zip(numbers, come or repeat(None), strict=False):
                    results[n] = has_come or (None if has_come is None else results[n])
        return results

    def _ways(self, key: BlockKey, up: Sequence[Line]) -> list[Line]:
        """Return the far ends to ask for a block, one after the other."""
        known = self._known.pop(key, None)
        if known is not None and known.is_up:
            return [known]
        owner = [self._owner(key, up)] if up else []
        return owner + [line for line in self._peers if line.is_up]

    def _is_away(self, key: BlockKey, up: Sequence[Line]) -> bool:
        """Return whether the server that owns a block, among all servers, is not connected now."""
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
        """Run ``work``, which reads ``size`` bytes of slots; in a thread if they are many."""
        if size <= INLINE_BYTES:
            return work()
        result: T = await self.context.run_blocking(work)
        return result

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        up = self._up()
        if not up:
            return [False] * len(writes)  # there are only peers, which take no blocks
        if replaced := [write.key for write in writes if write.replace]:
            await _all([line.here.remove(replaced) for line in up])
        parts = self._parts((self._owner(write.key, up), n) for n, write in enumerate(writes))
        found = await self._each(parts, partial(self._put, writes))
        results = [False] * len(writes)
        for (_, numbers), stored in zip(parts, found, strict=True):
            for n, is_stored in zip(numbers, stored or (), strict=False):
                results[n] = is_stored
        return results

    async def _put(
        self, every: Sequence[Write], line: Line, numbers: Sequence[int]
    ) -> Sequence[bool]:
        """Put blocks into a server, in several pieces if it has no room for all at once."""
        begun_s, now = self.context.clock.now(), self.context.clock.now
        limit_s = inf if self.context.timeout_s is None else PIECES * self.context.timeout_s
        stored = dict(zip(numbers, await self._put_some(every, line, numbers), strict=True))
        while (
            later := [n for n, answer in stored.items() if answer is None]
        ) and now() < begun_s + limit_s:
            try:
                answers = await self._put_some(every, line, later)
            except TierError:
                break  # the earlier pieces are stored
            stored |= zip(later, answers, strict=True)
        return [bool(stored[n]) for n in numbers]

    async def _put_some(
        self, every: Sequence[Write], line: Line, numbers: Sequence[int]
    ) -> Sequence[bool | None]:
        writes = [every[n] for n in numbers]
        ahead = asyncio.create_task(self._labelled(writes))

        async def label(wanted: Sequence[int]) -> Sequence[bytes]:
            ahead.cancel()
            size = sum(writes[n].length for n in wanted)
            return await self._threaded(lambda: [writes[n].label() for n in wanted], size)

        try:
            return await line.here.put(
                [write.key for write in writes],
                [write.slot for write in writes],
                [write.length for write in writes],
                [write.facts for write in writes],
                label,
            )
        finally:
            ahead.cancel()

    @staticmethod
    async def _labelled(writes: Sequence[Write]) -> None:
        """Make labels ahead, while the far end looks for room."""
        for write in writes:
            if write.length <= INLINE_BYTES:
                write.label()
            await asyncio.sleep(0)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        self._up()
        if blocks:  # from all servers, since the owner of a block may have changed
            keys = [block.key for block in blocks]
            await _all(_writable(line, lambda far: far.remove(keys)) for line in self._servers)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        up, keys = self._up(), [block.key for block in blocks]
        if not keys:
            return []
        every = range(len(keys))
        parts: list[Part] = [(line, every) for line in self._peers if line.is_up]
        if len(up) == 1:
            parts.append((up[0], every))
        else:
            parts += _grouped((self._owner(key, up), n) for n, key in enumerate(keys) if up).items()
        found = await self._each(parts, partial(self._lookup, keys))
        results = [False] * len(keys)
        for (line, numbers), have in zip(parts, found, strict=True):
            for n in compress(numbers, have or b""):
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
        purges = (_writable(line, lambda far: far.purge(salt)) for line in self._servers)
        count = sum(await _all(purges))
        progress(count, count)
        return count

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the blocks that all servers have; peers' blocks are not this level's."""
        if not self._up():
            raise TierError("no server is connected")
        for line in [*self._servers]:
            if not line.here.surveys:
                _require_writable(line)
                raise TierError(f"{line.address} is of an older version", temporary=False)
            async for keys in line.here.survey(salt):
                yield [BlockKey(key) for key in keys]

    # ---- descriptions

    def gauges(self) -> Mapping[str, int]:
        lines = [*self._servers, *self._peers]
        return {
            "far_ends": len(lines),
            "far_ends_connected": sum(line.is_up for line in lines),
            "connections_broken": sum(line.breaks for line in lines),
            **self._of_roster(),
        }

    def _of_roster(self) -> dict[str, int]:
        if self._roster is None:
            return {}
        return {
            "far_ends_unfit": self._unfit,
            "roster_ignored": self._roster.ignored,
            "roster_failures": self._unread,
        }

    def describe(self) -> dict[str, str]:
        options = self.options
        who = {name: ", ".join(getattr(options, name)) or "none" for name in ("servers", "peers")}
        if options.roster:
            who = {"roster": masked(options.roster)}
        return {
            **who,
            "transports": options.transports,
            "interfaces": options.interfaces,
            "batch": f"{self.batch_max} blocks",
        }


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await all calls and return their results; if any fails, raise its error after all ended.

    An error that a later call may not have goes first.
    """
    answers = await asyncio.gather(*calls, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, PermissionDenied)):
        raise error
    return cast("list[T]", answers)


async def _writable(line: Line, call: Callable[[Connection], Awaitable[T]]) -> T:
    """Call a server; raise TierError if it is away, or lets this client remove nothing."""
    _require_writable(line)
    return await call(line.here)


def _require_writable(line: Line) -> None:
    """Raise PermissionDenied if a server lets this client only read."""
    if not line.here.writable:
        raise PermissionDenied(f"{line.address} does not let this client remove blocks")


def _grouped(pairs: Iterable[tuple[Line, int]]) -> dict[Line, list[int]]:
    """Group the indices of blocks by far end."""
    groups: dict[Line, list[int]] = {}
    for line, number in pairs:
        groups.setdefault(line, []).append(number)
    return groups
