"""The Mooncake tier: blocks as objects of a Mooncake Store, in the memory of its nodes.

Tested with mooncake-transfer-engine 0.3.13: see docs/how-to/mooncake.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from queue import SimpleQueue
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from kvladder.arena import Slot
from kvladder.errors import ConfigError, TierError, Unavailable
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.schema import Address, Settings
from kvladder.tiers.base import Tier
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import LABEL_BYTES, VERSION, Read, Ref, Write, told
from kvladder.units import Size

T = TypeVar("T")

BATCH_BYTES = 64 << 20
BATCH_BLOCKS_MAX = 64
PROBE_BLOCKS_MAX = 4096
LABEL_STRIDE = 1024
"""Bytes from one label to the next in the memory registered for labels."""
LOCAL_BUFFER = Size(16 << 20)
THREADS = 4
"""Most calls in flight: the number of the context's threads."""
LIST_TIMEOUT_S = 5.0
# error_code.h of the store
OK, NOT_THERE, THERE_ALREADY, NO_ROOM, LEASE_OVER = 0, -704, -705, -200, -707
NOT_READY = -703
"""Error for a block whose put has not ended. If the writer has died, it never will."""
ABSENT = frozenset({NOT_THERE, NOT_READY})
UNREAD = -1
"""Code for a block that was not requested yet; not an error of the store."""
MASTER_HINT = "check that mooncake_master runs there"


class MooncakeOptions(Settings, frozen=True, kw_only=True):
    """The settings of a Mooncake tier."""

    master: Address
    """Host and port of ``mooncake_master``."""
    metadata: str = "P2PHANDSHAKE"
    """URL of the metadata server; by default the nodes exchange metadata directly."""
    protocol: str = "tcp"
    """Transport between the nodes, as Mooncake names it."""
    devices: str = ""
    """RDMA devices, as Mooncake names them."""
    host: str = "127.0.0.1"
    """Address at which the nodes reach this machine."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=16, description="a number from 1 to 16")] = 1
    """Number of nodes that keep each block."""
    pin_priority: Annotated[
        int, msgspec.Meta(ge=0, le=PRIORITY_MAX + 1, description="a priority, or 101 for none")
    ] = PRIORITY_MAX + 1
    """Lowest priority of blocks that are soft-pinned, i.e. evicted after all others."""
    admin: Address | None = None
    """Host and port of the master's HTTP server, which lists names for a purge of one salt."""


class MooncakeTier(Tier):
    """Objects ``kvladder:{version}:{namespace}:{block}``: a label, then the stored bytes.

    Bytes go straight from and to slots, whose memory is registered with the store. The store's
    calls block and cannot be cancelled. If a node hangs, they never return, and its data may
    arrive later. So this tier always runs in a process of its own.
    """

    Options: ClassVar[type[MooncakeOptions]] = MooncakeOptions
    shared = True
    surveys = True
    isolates = True
    overhead_bytes = LABEL_BYTES
    probe_max = PROBE_BLOCKS_MAX

    def __init__(self, options: MooncakeOptions) -> None:
        self.options = options
        self._store: Any = None
        self._configs: tuple[Any, Any]
        self._labels: mmap.mmap
        self._areas: SimpleQueue[int] = SimpleQueue()
        """Free areas of ``_labels``, as offsets; a call uses one for the labels of its batch."""
        self._shorter = False
        """True if the last get found blocks stored with fewer bytes than a whole block."""
        self._closed = False

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        del capacity_bytes
        _library()
        if not self.options.admin:
            warn("admin is not set: the master's HTTP server is needed to purge one salt")
        host, _, port = self.options.master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), LIST_TIMEOUT_S).close()
        except OSError as error:
            what = f"no master answers at {self.options.master}: {error.strerror or error}"
            raise Unavailable(what, path="master", hint=MASTER_HINT) from error
        return {"master": self.options.master}

    async def open(self, context: TierContext) -> None:
        self.context = context
        fitting = BATCH_BYTES // context.layout.slot_bytes
        self.batch_max = max(1, min(BATCH_BLOCKS_MAX, fitting, context.capacity_blocks))
        self._prefix = f"kvladder:{VERSION}:{context.namespace.hex()[:32]}:"
        await context.run_blocking(self._open)

    def _open(self) -> None:
        library, options, arena = _library(), self.options, self.context.arena
        common, pinned = library.ReplicateConfig(), library.ReplicateConfig()
        common.replica_num = pinned.replica_num = options.replicas
        pinned.soft_pin_action = library.SoftPinAction.ENABLE
        self._configs = common, pinned
        store = library.MooncakeDistributedStore()
        code = store.setup(
            f"{options.host}:{_free_port(options.host)}",
            options.metadata,
            0,  # bytes of memory that this client offers to the store
            int(LOCAL_BUFFER),
            options.protocol,
            options.devices,
            options.master,
        )
        if code:
            what = f"the master at {options.master} cannot be reached: error {code}"
            raise Unavailable(what, path="master", hint=MASTER_HINT)
        self._labels = mmap.mmap(-1, THREADS * self.batch_max * LABEL_STRIDE)
        self._labels_at = ctypes.addressof(ctypes.c_char.from_buffer(self._labels))
        for address, size in (
            (arena.address, arena.size_bytes),
            (self._labels_at, len(self._labels)),
        ):
            if code := store.register_buffer(address, size):
                raise TierError(f"{size} bytes of memory cannot be registered: error {code}")
        for number in range(THREADS):
            self._areas.put(number * self.batch_max * LABEL_STRIDE)
        self._store = store

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a call of the store in a thread; raise TierError if the tier is closed."""
        if self._closed:
            raise TierError("the tier is closed", temporary=False)
        result: T = await self.context.run_blocking(function, *arguments)
        return result

    @contextmanager
    def _area(self) -> Generator[int]:
        """Lend an area for the labels of a batch; wait until one is free."""
        area = self._areas.get()
        try:
            yield area
        finally:
            self._areas.put(area)

    def _name(self, key: BlockKey) -> str:
        return self._prefix + key.hex()

    def _parts(self, at: int, slot: Slot, length: int) -> tuple[list[int], list[int]]:
        """Return the addresses and the lengths of a block's label and bytes."""
        arena = self.context.arena
        return (
            [self._labels_at + at, arena.address + slot * arena.slot_bytes],
            [LABEL_BYTES, length],
        )

    def _label(self, at: int) -> memoryview:
        return memoryview(self._labels)[at : at + LABEL_BYTES]

    # ---- the calls, each with its function for a thread

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        return await self._run(self._get, reads) if reads else []

    def _get(self, reads: Sequence[Read]) -> list[bool | None]:
        whole = self.context.layout.block_bytes
        with self._area() as area:
            places = [area + n * LABEL_STRIDE for n in range(len(reads))]
            guessed = {} if self._shorter else dict.fromkeys(range(len(reads)), whole)
            codes = dict.fromkeys(range(len(reads)), UNREAD) | self._fill(reads, places, guessed)
            # the store needs the exact size, and codecs make blocks shorter
            others = [n for n, code in codes.items() if code < 0 and code not in ABSENT]
            sizes = {n: self._store.get_size(self._name(reads[n].key)) for n in others}
            codes |= {n: size for n, size in sizes.items() if size < 0}
            lengths = {n: size - LABEL_BYTES for n, size in sizes.items() if size >= 0}
            sure = {n: size for n, size in lengths.items() if 0 < size <= whole}
            untried = {n: size for n, size in sure.items() if guessed.get(n) != size}
            codes |= self._fill(reads, places, untried)
            if sure:
                self._shorter = min(sure.values()) < whole
            for n, code in codes.items():
                if code > LABEL_BYTES:
                    reads[n].came(self._label(places[n]), code - LABEL_BYTES)
                    reads[n].check()  # now, while it is in a CPU cache
                elif n in lengths and n not in sure:
                    reads[n].came(bytes(1), 0)  # no block has this size
                    reads[n].check()
                    codes[n] = NOT_THERE
        if all(code < 0 and code not in ABSENT for code in codes.values()):
            if LEASE_OVER in codes.values():
                raise TierError(
                    "reads take longer than the master's --default_kv_lease_ttl: increase it"
                )
            raise TierError(f"no node answers: error {codes[0]}")
        said = {True: True, False: None}  # a silent node's blocks may be there later
        return [False if codes[n] in ABSENT else said[codes[n] >= 0] for n in range(len(reads))]

    def _fill(
        self, reads: Sequence[Read], places: Sequence[int], lengths: Mapping[int, int]
    ) -> dict[int, int]:
        """Read blocks of known lengths; return the bytes read of each, or an error below 0."""
        if not lengths:
            return {}
        parts = [self._parts(places[n], reads[n].slot, size) for n, size in lengths.items()]
        names = [self._name(reads[n].key) for n in lengths]
        codes = self._store.batch_get_into_multi_buffers(
            names, [at for at, _ in parts], [sizes for _, sizes in parts]
        )
        return dict(zip(lengths, codes, strict=True))

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        return await self._run(self._put, writes) if writes else []

    def _put(self, writes: Sequence[Write]) -> list[bool]:
        codes: dict[int, int] = {}
        with self._area() as area:
            parts: list[tuple[list[int], list[int]]] = []
            for n, write in enumerate(writes):
                at = area + n * LABEL_STRIDE
                self._label(at)[:] = write.label()
                parts.append(self._parts(at, write.slot, write.length))
            for pinned, config in enumerate(self._configs):
                chosen = [
                    n
                    for n, write in enumerate(writes)
                    if (write.facts.priority >= self.options.pin_priority) == bool(pinned)
                    and not write.replace
                ]
                if chosen:
                    names = [self._name(writes[n].key) for n in chosen]
                    where, sizes = zip(*(parts[n] for n in chosen), strict=True)
                    answer = self._store.batch_put_from_multi_buffers(
                        names, list(where), list(sizes), config
                    )
                    codes |= zip(chosen, answer, strict=True)
            for n, write in enumerate(writes):
                if write.replace:  # rare, so the cost of a copy does not matter
                    stored = bytes(write.view[: write.length])
                    codes[n] = self._store.upsert_parts(
                        self._name(write.key), write.label(), stored
                    )
        if not {OK, THERE_ALREADY, NO_ROOM}.intersection(codes.values()):
            raise TierError(f"no node answers: error {codes[0]}")
        return [codes[n] in {OK, THERE_ALREADY} for n in range(len(writes))]

    async def remove(self, blocks: Sequence[Ref]) -> None:
        if blocks:
            await self._run(self._remove, [self._name(block.key) for block in blocks])

    def _remove(self, names: list[str]) -> None:
        with self._area():
            codes = self._store.batch_remove(names, True)  # True: even while a lease is held
        failed = [code for code in codes if code != OK and code not in ABSENT]
        if failed:
            raise TierError(
                f"{len(failed)} of {len(names)} blocks were not removed: error {failed[0]}"
            )

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        if not blocks:
            return []
        return await self._run(self._contains, [self._name(block.key) for block in blocks])

    def _contains(self, names: list[str]) -> list[bool]:
        with self._area():
            codes = self._store.batch_is_exist(names)
        if all(code < 0 for code in codes):
            raise TierError(f"the master does not answer: error {codes[0]}")
        return [code == 1 for code in codes]

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        if salt is None:
            count = await self._run(self._purge_all)
            progress(count, count)
            return count
        names = [name for name in await self._run(self._list) if name.startswith(self._prefix)]
        gone = 0
        for start in range(0, len(names), self.batch_max):
            gone += await self._run(self._purge, names[start : start + self.batch_max], salt)
            progress(min(start + self.batch_max, len(names)), len(names))
        return gone

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        own = self._prefix
        names = [name for name in await self._run(self._list) if name.startswith(own)]
        for start in range(0, len(names), self.batch_max):
            part = names[start : start + self.batch_max]
            found = part if salt is None else await self._run(self._salted, part, salt)
            yield [BlockKey(bytes.fromhex(name.removeprefix(own))) for name in found]

    def _purge_all(self) -> int:
        with self._area():
            count: int = self._store.remove_by_regex(f"^{self._prefix}.*", True)
        if count < 0:
            raise TierError(f"the master does not answer: error {count}")
        return count

    def _list(self) -> list[str]:
        """Return all names that the master knows."""
        if not self.options.admin:
            what = "set admin to the master's HTTP server, which lists the blocks"
            raise TierError(f"one salt cannot be purged: {what}", temporary=False)
        url = f"http://{self.options.admin}/get_all_keys"
        try:
            with urlopen(url, timeout=LIST_TIMEOUT_S) as answer:
                listed: bytes = answer.read()
                return listed.decode().split("\n")
        except (URLError, OSError, UnicodeDecodeError) as error:
            raise TierError(f"{url} does not list the blocks: {error}") from error

    def _purge(self, names: list[str], salt: bytes) -> int:
        """Remove the blocks whose labels name the salt, and those without a valid label."""
        chosen = self._salted(names, salt)
        if chosen:
            self._remove(chosen)
        return len(chosen)

    def _salted(self, names: list[str], salt: bytes) -> list[str]:
        """Return the blocks whose labels name the salt, and those without a valid label."""
        with self._area() as area:
            at, each = self._labels_at + area, [[n * LABEL_STRIDE] for n in range(len(names))]
            sizes = [[LABEL_BYTES]] * len(names)
            (codes,) = self._store.get_into_ranges(
                [at], [names], [each], [[[0]] * len(names)], [sizes]
            )
            labels = [bytes(self._label(area + n * LABEL_STRIDE)) for n in range(len(names))]
            short = [
                code < 0 and 0 <= self._store.get_size(name) < LABEL_BYTES
                for name, (code,) in zip(names, codes, strict=True)
            ]
        chosen: list[str] = []
        for name, label, cut, (code,) in zip(names, labels, short, codes, strict=True):
            if code == LABEL_BYTES:
                found = told(label)
                if found is None or found.facts.salt == salt:
                    chosen.append(name)
            elif cut:
                chosen.append(name)
            elif code not in ABSENT:
                raise TierError(f"a label cannot be read: error {code}")
        return chosen

    def describe(self) -> dict[str, str]:
        options = self.options
        return {
            "master": options.master,
            "protocol": options.protocol,
            "replicas": str(options.replicas),
            "batch": f"{self.batch_max} blocks",
        }

    async def aclose(self) -> None:
        self._closed = True  # the store ends with its process: closing it during a call crashes


def _library() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # affects only this tier's own process
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be imported: {error}",
            path="type",
            hint="install kvladder[mooncake], and the system's packages libibverbs1 and"
            " libnl-route-3-200",
        ) from error


def _free_port(host: str) -> int:
    """Return a port of ``host`` that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
