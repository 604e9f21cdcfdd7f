"""A device's block pools over a cache: the one object that an embedded engine opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch

from kvladder.device.memory import PlanMemory
from kvladder.device.port import TierPort
from kvladder.device.preempt import Preemption, Suspended
from kvladder.device.rebalance import Rebalance
from kvladder.device.room import Room
from kvladder.gpu.copy.ranges import ranged
from kvladder.gpu.pool.events import PoolEvent, PoolEvents, PoolStored
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.requests.requests import Request, Requests
from kvladder.gpu.sizing.divide import Division
from kvladder.lock import STEP
from kvladder.manager import CacheManager
from kvladder.metrics import POOL, Stats
from kvladder.policy.eviction import PRIORITY_MIN
from kvladder.publishing.device import OnDevice
from kvladder.units import Size

Tensors = Mapping[str, torch.Tensor]


class DeviceCache:
    """Block pools on a device, and the tiers below them. All calls come from the engine's thread.

    ``open_device`` makes it. The engine runs its requests through ``requests``, and calls ``poll``
    once a step. ``memory`` has a view of each layer and state; the tables of ``requests`` index
    the blocks of these views. ``tensors[g]`` are the views of group ``g``.
    """

    def __init__(
        self,
        manager: CacheManager,
        port: TierPort,
        requests: Requests,
        tensors: Sequence[Tensors],
        events: PoolEvents,
        division: Division,
        memory: PlanMemory | None = None,
        told: OnDevice | None = None,
        table_bytes: int = 0,
    ) -> None:
        self._memory = memory
        self._told = told
        """Tells published events what the pools hold; None if none are published."""
        self.manager = manager
        self.port = port
        self.requests = requests
        self.tensors = tuple(tensors)
        self.division = division
        self._events = events
        self._room = Room(port, requests, self.tensors)
        self.preemption = Preemption(
            port, requests, [share.block_bytes for share in division.shares]
        )
        self.table_bytes = table_bytes
        """Device memory that the division leaves for the page tables of the registered arena."""
        self.rebalance: Rebalance | None = None
        """Moves memory between pools that share it."""
        if division.regions:
            self.rebalance = Rebalance(requests, division, self._room.move)
            manager.report("rebalance", self.rebalance.counts)
        requests.listen(self._released)
        for group, pool in zip(requests.groups, self.pools, strict=True):
            manager.report(f"{POOL}{group.name}", pool.counts)
        manager.report("preemption", self.preemption.counts)

    @property
    def memory(self) -> PlanMemory:
        """Memory of each layer, state and convolution. Pools opened without a plan have none."""
        assert self._memory is not None, "expected pools opened with a plan"
        return self._memory

    @property
    def pools(self) -> list[BlockPool]:
        """The block pools, by group."""
        return [one.pool for one in self.requests.sequences]

    def poll(self) -> None:
        """Process finished copies and changes in the tiers. Never waits."""
        with ranged("poll"):
            self.port.poll()
            for pool in self.pools:
                pool.mark()
            if self.rebalance is not None:
                self.rebalance.poll()

    def wait(self, timeout_s: float) -> None:
        """Wait until a copy has ended or something may have changed, at most ``timeout_s``.

        The caller polls afterwards.
        """
        self.port.wait(timeout_s)

    def suspend(self, request: Request) -> Suspended:
        """Suspend a running request and free its device memory, see ``Preemption.suspend``."""
        with ranged("suspend", len(request.tokens)):
            return self.preemption.suspend(request)

    def resume(self, suspended: Suspended, *, room: int | None = None) -> Request:
        """Resume a suspended request, see ``Preemption.resume``."""
        with ranged("resume"):
            return self.preemption.resume(suspended, room=room)

    def use_session(self, session: str, request: Request) -> None:
        """Make a request, and its whole computed blocks, belong to a session.

        Call it before the request is released. Raises ValueError if the session has ended.
        """
        sessions, runs = self.manager.sessions, request.runs
        sessions.use(session, runs, request.parts[0].root.salt)
        for part, run in zip(request.parts, runs, strict=True):
            sessions.brought(session, run[part.cached // part.block_tokens :])
        request.belongs(session)

    def _released(self, request: Request) -> None:
        """Note the blocks that a request outside any session used."""
        for run in request.runs if request.session is None else ():
            self.manager.sessions.met(None, run)

    def prefetch(self, session: str) -> None:
        """Fetch from the tiers to host the prefix that a session's next request begins with.

        Blocks in the pools are left out. For windows and states, only what later tokens read is
        fetched. It is a hint: without room nothing is fetched. Raises ValueError if the session
        has ended or is not known.
        """
        runs, salt = self.manager.sessions.last(session)
        for group, pool, run in zip(self.requests.groups, self.pools, runs, strict=True):
            read = run[group.first(len(run) * group.block_tokens) :]
            self.port.prefetch(read[len(pool.match(read)) :], salt)

    def end_session(self, session: str) -> None:
        """End a session: on the device, the blocks that only it used are evicted next.

        These are the blocks that it computed and no other request used. Levels with a threshold
        forget them at once. Raises as ``prefetch`` does.
        """
        owned = self.manager.sessions.owned(session)
        spare = {key for pool in self.pools for key in pool.in_use(owned)}
        keys = self.manager.end_session(session, spare=spare)
        for pool in self.pools:
            pool.reprioritize(keys, PRIORITY_MIN)

    def take_events(self) -> list[PoolEvent]:
        """Return the events of all blocks since the last call, oldest first."""
        return self._events.take()

    def snapshot(self) -> list[PoolStored]:
        """Return the contents of all pools, as events that rebuild their indexes from nothing."""
        return [event for pool in self.pools for event in pool.snapshot()]

    def reset(self) -> None:
        """Forget all cached blocks, on the device and in the tiers."""
        for pool in self.pools:
            pool.reset()

    def rename(self, mark: str) -> None:
        """Name blocks by this mark, too, from now on, after weights changed. See ``Requests``."""
        self.requests.rename(mark)
        if self._told is not None:
            self._told.rename()

    def purge(self, salt: str) -> None:
        """Forget every block of requests with this salt, on the device and in the tiers.

        Running and suspended requests keep their blocks, but these are not cached again. A durable
        tier has forgotten the blocks once ``manager.removals`` is 0. Raises ValueError if the salt
        is empty.
        """
        steps = self.manager.purge(salt)
        for pool in self.pools:
            pool.purge(salt)
        for _ in steps:
            pass

    def stats(self) -> Stats:
        """Return counters of tiers, pools (``gpu.`` and the group's name) and preemption."""
        return self.manager.stats()

    def describe(self) -> str:
        """Return the resolved configuration, and how the device's memory is divided."""
        matches = {pool.settings.partial for pool in self.pools} - {"off"}
        plan = None if self._memory is None else self._memory.plan
        why = (plan and plan.no_reuse) or "nothing is kept for later requests"
        reuse = "on" if self.requests.reuse else f"off: {why}"
        lines = [
            f"gpu: {self.division if plan is None else plan.described}",
            f"  reuse: {reuse}",
            f"  partial matches: {matches.pop() if matches else 'off'}",
        ]
        if self.table_bytes:
            size = Size(self.table_bytes).brief()
            lines.append(f"  page tables of the registered arena: up to {size} beside the pools")
        for group, pool in zip(self.requests.groups, self.pools, strict=True):
            if pool.blocks != pool.settings.blocks:
                began = pool.settings.blocks
                lines.append(f"  {group.name}: {pool.blocks} blocks now, {began} at the start")
        return "\n".join([self.manager.describe(), "", *lines])

    def check(self) -> None:
        """Assert every invariant on both sides; O(n), for tests."""
        self.port.check()
        if self.rebalance is not None:
            self.rebalance.check()

    def hand_down(self, *, timeout_s: float) -> bool:
        """Move idle cached blocks from the device to levels that outlive the engine.

        Moves no more blocks at a time than the arena takes without losing others. Returns False if
        that takes longer than ``timeout_s``, if the arena has no room, or if those levels fail.
        Blocks that had begun to leave are then in the arena, or get there with the next polls; the
        others are where they were. Blocks that no level admits are forgotten. Moves nothing if no
        level outlives the engine.
        """
        ladder, clock = self.manager.ladder, self.manager.ladder.clock
        most = max(1, self.manager.arena.slots // 2)
        end_s = clock.now() + timeout_s

        def flushed() -> bool:
            left_s = end_s - clock.now()
            written = left_s > 0 and self.manager.flush(timeout_s=left_s)
            return written and any(ladder.lasting().values())

        for pool in self.pools if ladder.lasting() else ():
            while flushed():
                leaving, room = self._leave(pool, most)
                if not leaving:
                    if not room and pool.idle:
                        return False
                    break
                while pool.leaving and (left_s := end_s - clock.now()) > 0:
                    self.wait(left_s)
                    self.poll()
            else:
                return False
        return True

    def _leave(self, pool: BlockPool, count: int) -> tuple[int, int]:
        """Start evicting up to ``count`` blocks of a pool, as far as the arena has room.

        Return how many began to leave, and the room found at the last attempt.
        """
        leaving = room = 0
        while leaving < count:
            with self.manager.ladder.lock:  # no other caller may take the room
                room = self.port.room(min(STEP, count - leaving))
                left = pool.evict(room)
            leaving += left
            if not left:
                break
        return leaving, room

    # ---- memory for other uses while the engine is idle

    def shrink(self, share: float = 0.0, *, timeout_s: float) -> int:
        """Give device memory back: pools keep ``share`` of their blocks, and at least one.

        The most valuable cached blocks stay on the device. The others go to tiers, as far as these
        take them within ``timeout_s``. Suspend or release running requests before. Requests that
        need more memory than is left raise OutOfBlocks until ``grow``. Returns the bytes given
        back.

        Raises
        ------
        PoolError
            A request holds blocks, or copies did not end in time; nothing was given back.
        LayoutError
            The engine's memory cannot be given back in part, or pools share it, see
            ``gpu.rebalance``.
        ValueError
            ``share`` is not in 0..1.
        """
        return self._room.shrink(share, timeout_s=timeout_s, leave=self._leave)

    def grow(self) -> int:
        """Allocate again what ``shrink`` gave back; return the number of bytes.

        Raises
        ------
        PoolError
            A request holds blocks, which cannot be used meanwhile.
        RuntimeError
            torch finds no memory on the device for it; the memory held before is still there.
        """
        return self._room.grow()

    def close(self, *, timeout_s: float | None = None) -> None:
        """End all copies, flush to durable levels, close everything; may be called again.

        Blocks that only the device holds are lost, see ``hand_down``. ``timeout_s`` bounds the
        flush; None takes the default.
        """
        self.port.close()
        self.preemption.close()
        self.manager.close(timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
