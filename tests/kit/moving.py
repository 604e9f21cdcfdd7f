"""Isolated tiers with far ends, clients and processes that die in mid-transfer."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.context import TierContext
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.label import Labels, Read, Ref, Write
from kvladder.tiers.mooncake.tier import MooncakeOptions, MooncakeTier
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from tests.kit.far import Far
from tests.kit.lanes import Case, Figures, Lane, cases
from tests.kit.mooncake import Mooncake
from tests.kit.puppet import Puppet, line
from tests.patience import PATIENCE_S, until

BLOCK_BYTES = 1 << 20
BLOCKS = 16
"""The number of blocks moved during the fault."""
SPARE = 2
"""The number of blocks, with slots of their own, that test whether it works again."""
TIMEOUT_S, ABANDON_S = 0.6, 0.3
TRY_S = PATIENCE_S / 10
"""The time limit for testing whether it works again."""
POISON = bytes([0xA5]) * BLOCK_BYTES
LAYOUT = Layout(block_tokens=4, block_bytes=BLOCK_BYTES)


class Stalls:
    """A thread that wants to run each millisecond, as an engine's own."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last_s = time.perf_counter()
        while not self._over.is_set():
            time.sleep(0.001)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s - 0.001)
            last_s = now_s

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._thread.join()


class Mover:
    """An isolated tier over an arena with blocks to move."""

    def __init__(self, tier: IsolatedTier, space: str) -> None:
        self.tier = tier
        self.arena = Arena.create(BLOCKS + SPARE, LAYOUT.slot_bytes)
        slots = self.arena.lease(BLOCKS + SPARE) or []
        self.slots, self.spare = slots[:BLOCKS], slots[BLOCKS:]
        self._pool = BlockingPool(2, "trials")
        self._namespace = LAYOUT.namespace(salt=space)
        self._labels = Labels(self._namespace, BLOCK_BYTES, verify=True)
        self.numbers = itertools.count(1)

    async def open(self) -> None:
        """Have the tier open."""
        arguments = self.arena, LAYOUT, self._namespace, 1 << 16, SystemClock(), self._pool.run
        await self.tier.open(TierContext(*arguments, timeout_s=TIMEOUT_S))

    @staticmethod
    def _key(number: int, slot: Slot) -> BlockKey:
        return BlockKey(hashlib.sha256(b"%d %d" % (number, slot)).digest())

    def data(self, number: int, slot: Slot) -> bytes:
        """Return the bytes of this slot's block under a number."""
        return hashlib.blake2b(self._key(number, slot)).digest() * (BLOCK_BYTES // 64)

    async def put(self, number: int, slots: Sequence[Slot]) -> Sequence[bool]:
        """Store a block of each slot."""
        writes: list[Write] = []
        for slot in slots:
            ref, view = Ref(self._key(number, slot), NO_PLACE), self.arena.view(slot)
            view[:BLOCK_BYTES] = self.data(number, slot)
            writes.append(Write(self._labels, *ref, slot, view))
        return await self.tier.put(writes)

    async def get(self, number: int, slots: Sequence[Slot]) -> list[bool]:
        """Return which of the blocks arrive, each with the right bytes."""
        self.poison(slots)
        refs = (Ref(self._key(number, slot), NO_PLACE) for slot in slots)
        reads = [
            Read(self._labels, *ref, slot, self.arena.view(slot))
            for ref, slot in zip(refs, slots, strict=True)
        ]
        come = [
            bool(came) and read.check()
            for came, read in zip(await self.tier.get(reads), reads, strict=True)
        ]
        for slot in itertools.compress(slots, come):
            assert self.arena.view(slot)[:BLOCK_BYTES] == self.data(number, slot)
        return come

    async def works(self) -> bool:
        """Return whether a stored block is read back."""
        number = next(self.numbers)
        with suppress(TierError, TimeoutError):
            async with asyncio.timeout(TRY_S):
                await self.put(number, self.spare)
                return all(await self.get(number, self.spare))
        return False

    def poison(self, slots: Iterable[Slot]) -> None:
        """Fill slots with bytes that no block has."""
        for slot in slots:
            self.arena.view(slot)[:BLOCK_BYTES] = POISON

    def changed(self) -> int:
        """Return how many bytes are no longer poison."""
        views = (bytes(self.arena.view(slot)[:BLOCK_BYTES]) for slot in self.slots)
        return sum(BLOCK_BYTES - view.count(POISON[:1]) for view in views if view != POISON)

    async def aclose(self) -> None:
        """End it."""
        await self.tier.aclose()
        self._pool.close(timeout_s=5)
        self.arena.release([*self.slots, *self.spare])
        self.arena.close()


class TierLane(Lane):
    """One far end and one client of it, a tier without a cache."""

    def __init__(self, folder: Path, figures: Figures, turn: asyncio.Lock) -> None:
        super().__init__(folder, figures, turn)
        self.mover = Mover(self.make(), folder.name)

    async def open(self) -> None:
        await self.mover.open()
        await self.ready()

    async def aclose(self) -> None:
        await self.mover.aclose()

    @abstractmethod
    def make(self) -> IsolatedTier:
        """Return the tier; its servers run from now on."""

    @abstractmethod
    def victim(self, name: str) -> int:
        """Return a running process."""

    @abstractmethod
    def after(self, case: Case) -> None:
        """Restart the killed process; any thread may call it."""

    @abstractmethod
    def check(self) -> None:
        """Assert that the processes without a fault live, and hold nothing for others."""

    @property
    def child(self) -> int:
        """The process of the tier; 0 while it is being started."""
        return self.mover.tier.gauges()["process"]

    async def ready(self) -> None:
        """Wait until a stored block is read back."""
        async with asyncio.timeout(PATIENCE_S):
            while not (self.child and await self.mover.works()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)

    async def trial(self, case: Case, delay_s: float) -> None:
        """Move blocks, and cause the fault in between."""
        mover, number = self.mover, next(self.mover.numbers)
        if case.call == "get":
            with suppress(TierError):
                await mover.put(number, mover.slots)
        async with self.turn:
            pid, stalls = self.victim(case.victim), Stalls()
            call = asyncio.create_task(getattr(mover, case.call)(number, mover.slots))
            began_s = time.perf_counter()
            await asyncio.sleep(delay_s)
            if pid:
                os.kill(pid, signal.Signals[case.fault])
            await asyncio.wait({call}, timeout=TIMEOUT_S - delay_s)
            waited_s = time.perf_counter() - began_s  # a level continues without it from here on
            call.cancel()
            await asyncio.wait({call})  # another owner may have the slots now
            held_s = time.perf_counter() - began_s - waited_s
            stalls.close()
        if not call.cancelled() and not isinstance(call.exception(), TierError):
            call.result()
        mover.poison(mover.slots)
        if case.fault == "SIGSTOP" and pid:
            with suppress(ProcessLookupError):  # the process of a tier is dead by now
                os.kill(pid, signal.SIGCONT)
        worst = self.figures
        worst.wait_s = max(worst.wait_s, waited_s - TIMEOUT_S)
        worst.held_s = max(worst.held_s, held_s)
        worst.stall_s = max(worst.stall_s, stalls.longest_s)

    async def recover(self, case: Case) -> None:
        """Make it work again; nothing may be written to the earlier slots in between."""
        await asyncio.to_thread(self.after, case)
        await self.ready()
        await asyncio.to_thread(self.check)
        self.figures.late_bytes += self.mover.changed()
        self.figures.trials[case] += 1


class NixlLane(TierLane):
    """A server of kvladder's."""

    @classmethod
    def cases(cls) -> list[Case]:
        return cases("nixl", ("server", "child", "client"))

    def make(self) -> IsolatedTier:
        self.far = Far(self.folder, slots=160, block_bytes=BLOCK_BYTES)
        self.far.__enter__()
        options = NixlOptions(servers=(self.far.address,), keys=self.far.keys, interfaces="lo")
        return IsolatedTier(NixlTier, options, abandon_s=ABANDON_S)

    def victim(self, name: str) -> int:
        return self.far.process.pid if name == "server" else self.child

    def after(self, case: Case) -> None:
        if case.victim == "server" and case.fault == "SIGKILL":
            self.far.kill()
            self.far.start()

    def check(self) -> None:
        assert self.far.process.poll() is None
        self._until_free()

    def _until_free(self, *, clients: float = math.inf) -> None:
        """Wait until the far end holds nothing and has at most this number of clients."""

        def is_free() -> bool:
            held = self.far("counts")
            return not held["granted"] and not held["pinned"] and held["clients"] <= clients

        until(is_free, every_s=0.01)

    async def trial(self, case: Case, delay_s: float) -> None:
        if case.victim == "client":
            self.mover.poison(self.mover.slots)
            await asyncio.to_thread(self._client, case, delay_s)
        else:
            await super().trial(case, delay_s)

    def _client(self, case: Case, delay_s: float) -> None:
        """Another engine is struck; the far end has its slots back."""
        arguments = [self.far.address, self.far.keys, case.call]
        engine = Puppet("tests.kit.moving", arguments, self.folder / "client.log", name="client")
        time.sleep(delay_s)
        struck = [engine.process.pid, engine.ready]
        for pid in struck:
            with suppress(ProcessLookupError):  # the process of a tier ends with its engine
                os.kill(pid, signal.Signals[case.fault])
        began_s = time.perf_counter()
        self._until_free(clients=1)
        self.figures.gone_s = max(self.figures.gone_s, time.perf_counter() - began_s)
        for pid in struck if case.fault == "SIGSTOP" else ():
            os.kill(pid, signal.SIGCONT)
        self.check()
        engine.kill()

    def close(self) -> None:
        self.far.kill()


def client() -> None:
    """Be an engine that moves blocks until it is struck."""
    address, keys, call = sys.argv[1:]

    async def run() -> None:
        tier = IsolatedTier(NixlTier, NixlOptions(servers=(address,), keys=keys, interfaces="lo"))
        mover = Mover(tier, f"client {os.getpid()}")
        await mover.open()
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the first calls of a busy machine may take longer than they may
                with suppress(TierError):
                    await mover.put(0, mover.slots)
                    break
        print(line(tier.gauges()["process"]), flush=True)
        while True:
            with suppress(TierError):
                if call == "get":
                    await mover.get(0, mover.slots)
                else:
                    await mover.put(next(mover.numbers), mover.slots)

    asyncio.run(run())


class MooncakeLane(TierLane):
    """A store of Mooncake's with one node."""

    @classmethod
    def cases(cls) -> list[Case]:
        return cases("mooncake", ("node", "child", "master"))

    def make(self) -> IsolatedTier:
        self.store = Mooncake(self.folder, memory=256 << 20)
        self.store.__enter__()
        options = MooncakeOptions(master=self.store.master)
        return IsolatedTier(MooncakeTier, options, abandon_s=ABANDON_S)

    def victim(self, name: str) -> int:
        store = self.store
        others = {"node": store.nodes[-1].process.pid, "master": store.pid}
        return others.get(name, self.child)

    def after(self, case: Case) -> None:
        if case.fault == "SIGKILL" and case.victim == "node":
            self.store.nodes.pop().kill()
            self.store.add()
        elif case.fault == "SIGKILL" and case.victim == "master":
            self.store.__exit__()
            self.store.start()

    def check(self) -> None:
        assert self.store.nodes[-1].process.poll() is None

    def close(self) -> None:
        self.store.__exit__()
