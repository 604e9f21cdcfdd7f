"""A device's block pools over a cache: the one object that an embedded engine opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from kvladder.compose import open_manager
from kvladder.config.settings import GpuConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.device.memory import Allocate, PlanMemory
from kvladder.device.port import TierPort
from kvladder.device.preempt import Preemption, Suspended
from kvladder.device.rebalance import Rebalance
from kvladder.device.room import Room
from kvladder.errors import ConfigError, LayoutError, PlanError
from kvladder.gpu.copy.cuda import copier_for, numa_node
from kvladder.gpu.copy.pages import BlockPages, RankShare, common_element
from kvladder.gpu.copy.ranges import ranged
from kvladder.gpu.copy.registration import table_bytes
from kvladder.gpu.pool.events import PoolEvent, PoolEvents, PoolStored
from kvladder.gpu.pool.pool import BlockPool, Partial, PoolSettings
from kvladder.gpu.requests.requests import Request, Requests
from kvladder.gpu.requests.sequence import Sequences
from kvladder.gpu.sizing.divide import Division
from kvladder.gpu.sizing.groups import Group
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.keys import KeyScheme, namespace
from kvladder.layout import Kind, Layout
from kvladder.lock import STEP
from kvladder.manager import CacheManager
from kvladder.metrics import POOL, Stats
from kvladder.policy.eviction import PRIORITY_MIN
from kvladder.publishing.device import OnDevice
from kvladder.units import Size

Tensors = Mapping[str, torch.Tensor]
Forward = Callable[[PlanMemory], int]
"""Runs the largest forward pass over memory for one sequence; returns the other bytes it took."""


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
        self.table_bytes = 0
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


def open_device(
    source: str | Path | Mapping[str, Any],
    plan: CachePlan,
    *,
    fields: Mapping[str, str],
    device: torch.device | str = "cpu",
    allocate: Allocate | None = None,
    sequences: int | None = None,
    free_bytes: int | None = None,
    peak_bytes: int = 0,
    forward: Forward | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DeviceCache:
    """Open a plan's pools over the tiers that a file or a mapping configures.

    The caller closes the result.

    Parameters
    ----------
    plan:
        The resources that the model keeps: collected, or already checked or grouped. It is sized
        and allocated here.
    fields:
        Values that identify the model's bytes: model, weights, dtype ...
    device, allocate:
        See ``PlanMemory``.
    sequences:
        Number of sequences at a time, which sizes memory outside pools; None for all that fit.
    free_bytes, peak_bytes:
        Bytes of free device memory, and how many of them a forward pass takes. Required if
        ``gpu.memory`` does not set the size of the cache. On CUDA, the page tables of the
        registered arena are subtracted.
    forward:
        Measures ``peak_bytes`` instead. It is called if ``gpu.memory`` does not set the size, with
        memory for one sequence. That memory is then sized anew.
    overrides:
        Settings of the engine; they override file and environment.

    Raises
    ------
    ConfigError
        A setting is wrong, handlers disagree, nothing is pooled, or the memory does not suffice;
        nothing stays open.
    """
    config = load_config(source, overrides={"gpu": {}, **(overrides or {})})
    gpu = config.gpu
    with config.source.explained():
        _group(gpu, plan, device)
        on_cuda = torch.device(device).type == "cuda"
        tables = table_bytes(config.arena_bytes) if on_cuda else 0
        left = None if free_bytes is None else free_bytes - tables
        _size(config, plan, sequences, left, peak_bytes)
        measured = config.gpu.memory_bytes is None and forward is not None
        memory = PlanMemory(plan, device=device, allocate=allocate, least=measured)
        if measured and forward is not None:
            memory.resize(forward(memory))
    assert plan.division is not None
    places = ";".join(f"{one.name} {one.shape} {one.dtype}" for p in plan.pools for one in p.places)
    cache = open_pools(
        config,
        plan.division,
        memory.tensors,
        fields={**fields, "places": places, **_windows(gpu.windows)},
        reuse=not plan.no_reuse,
        memory=memory,
    )
    cache.table_bytes = tables
    return cache


def open_pools(
    config: StackConfig,
    division: Division,
    tensors: Sequence[Tensors],
    *,
    fields: Mapping[str, str],
    reuse: bool = True,
    memory: PlanMemory | None = None,
) -> DeviceCache:
    """Open pools of these sizes over allocated memory; ``tensors`` has the tensors of each pool."""
    reuse = reuse and config.gpu.reuse
    partial = _partial(config, [share.group for share in division.shares], reuse=reuse)
    names = [share.group.name for share in division.shares]
    if len(set(names)) < len(names):
        hint = "give each group its own name: it is part of the keys of its blocks"
        raise PlanError(f"groups {names}", hint=hint)
    parts: dict[int, RankShare] = {}
    for at, (share, held) in enumerate(zip(division.shares, tensors, strict=True)):
        pages = BlockPages.of(held, blocks=division.places(share))
        if pages.block_bytes > share.block_bytes:
            what = f"{share.group.name}: a block takes {pages.block_bytes} bytes in the tensors"
            raise LayoutError(what, hint=f"expected at most {share.block_bytes}, as the group says")
        parts[at] = RankShare(pages)
    widest = max(share.block_bytes for share in division.shares)
    element = common_element(part.pages.element for part in parts.values())
    kinds: tuple[Kind, ...] = tuple(share.group.kind for share in division.shares)
    layout = Layout(division.shares[0].group.block_tokens, widest, fields, *element, kinds)
    node = numa_node(parts[0].pages.device)
    events = PoolEvents(config.gpu.events)
    told = _told(config, division, events)
    nodes = () if node is None else (node,)
    manager = open_manager(config, layout, pools=True, nodes=nodes, device=told)
    with ExitStack() as undo:
        undo.callback(manager.close)
        port = TierPort(manager, copier_for(parts, manager.arena))
        undo.callback(port.close)
        requests = make_pools(manager, port, division, events, partial=partial, reuse=reuse)
        undo.pop_all()
    return DeviceCache(manager, port, requests, tensors, events, division, memory, told)


def _told(config: StackConfig, division: Division, events: PoolEvents) -> OnDevice | None:
    """Return the listener to the pools' blocks if events are published, else None.

    It listens to the first group with full attention: only its blocks show how long a prefix is.
    """
    if config.events.publish is None:
        return None
    for number, share in enumerate(division.shares):
        if share.group.kind == "full":
            told = OnDevice(number, share.group.block_tokens)
            events.listen(number, told.hear)
            return told
    return None


def make_pools(
    manager: CacheManager,
    port: TierPort,
    division: Division,
    events: PoolEvents,
    *,
    partial: Partial,
    reuse: bool = True,
) -> Requests:
    """Make a pool over the manager's tiers for each group of ``division``; return their requests.

    If the arena has no slots, the pools have no tiers below.
    """
    now = manager.ladder.clock.now
    alone = len(division.shares) == 1
    sequences: list[Sequences] = []
    for at, (share, first) in enumerate(zip(division.shares, division.firsts(), strict=True)):
        group = share.group
        chained = group.kind == "full"
        matched = "off" if group.kind == "state" else partial
        pool = BlockPool(
            PoolSettings(
                share.blocks,
                group.block_tokens,
                matched,
                chained=chained,
                group=at,
                first=first,
                places=division.places(share),
            ),
            now=now,
            below=port if manager.arena.slots else None,
            events=events,
        )
        port.attach(at, pool)
        sequences.append(Sequences(pool, _scheme(manager, group, alone=alone)))
    return Requests([share.group for share in division.shares], sequences, reuse=reuse)


def _partial(config: StackConfig, groups: Sequence[Group], *, reuse: bool) -> Partial:
    """Return how pools match partial blocks, as the setting says.

    It is ``off`` without reuse, or if states end with every block. Raises ConfigError if the
    setting asks for partial matches then.
    """
    asked = config.gpu.partial
    if not reuse:
        if asked not in {"auto", "off"}:
            hint = "expected auto or off: later requests cannot reuse this model's blocks"
            raise config.source.explain(ConfigError(asked, path="gpu.partial", hint=hint))
        return "off"
    checkpoint = max((one.block_tokens for one in groups if one.kind == "state"), default=1)
    possible = any(one.block_tokens > checkpoint for one in groups if one.kind != "state")
    if asked == "auto":
        return "take" if possible else "off"
    if asked != "off" and not possible:
        hint = f"expected auto or off: states are reused at multiples of {checkpoint} tokens only"
        raise config.source.explain(ConfigError(asked, path="gpu.partial", hint=hint))
    return asked


def _group(gpu: GpuConfig, plan: CachePlan, device: torch.device | str) -> None:
    """Bring a plan to the phase ``group``, with the settings ``gpu`` applied."""
    if gpu.dtype != "auto":
        _require_type(gpu.dtype, device)
    if plan.phase == "collect":
        plan.adapt(dtype=gpu.dtype, windows=gpu.windows).check()
    elif gpu.dtype != "auto" or gpu.windows:
        path = "gpu.windows" if gpu.windows else "gpu.dtype"
        hint = "leave it out: the engine has already checked its plan"
        raise ConfigError("has no effect here", path=path, hint=hint)
    if plan.phase == "check":
        plan.group()
    if not plan.pools:
        alone = ", ".join(one.name for one in plan.alone)
        hint = "expected a layer of paged KV, or a state"
        what = f"nothing can be pooled; allocated separately: {alone}"
        raise PlanError(what, path="plan", hint=hint)


def _require_type(dtype: str, device: torch.device | str) -> None:
    """Raise ConfigError unless the device supports numbers of a type."""
    kind: torch.dtype = getattr(torch, "float8_e4m3fn" if dtype == "fp8" else dtype)
    try:
        _one(device, kind).float()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        what = f"{dtype} on {device}: {error}"
        hint = "expected auto, or a type that the device supports"
        raise ConfigError(what, path="gpu.dtype", hint=hint) from error


def _one(device: torch.device | str, kind: torch.dtype) -> torch.Tensor:
    return torch.ones(1, device=device).to(kind)


def _windows(windows: Sequence[int]) -> dict[str, str]:
    """Return the key fields that separate blocks made with these windows from the model's own."""
    return {"windows": ",".join(map(str, windows))} if windows else {}


def _size(
    config: StackConfig, plan: CachePlan, sequences: int | None, free: int | None, peak: int
) -> None:
    """Divide the memory that the settings give a plan, or their share of the free memory."""
    gpu = config.gpu
    if gpu.memory_bytes is not None:
        plan.size(gpu.memory_bytes, sequences=sequences, shares=gpu.shares, rebalance=gpu.rebalance)
    elif free is None:
        hint = "expected a size such as 4 GiB: the engine does not report its free memory"
        raise ConfigError("missing", path="gpu.memory", hint=hint)
    else:
        plan.size(
            free,
            fraction=gpu.fraction,
            sequences=sequences,
            peak=peak,
            max_tokens=gpu.max_tokens,
            shares=gpu.shares,
            rebalance=gpu.rebalance,
        )


def _scheme(manager: CacheManager, group: Group, *, alone: bool) -> KeyScheme:
    """Return the scheme of a group's keys. Keys of different groups never coincide."""
    space = manager.namespace
    if not alone or group.kind != "full":
        what = {"group": group.name, "kind": group.kind, "window": str(group.window)}
        space = namespace({"of": space.hex(), **what})
    return KeyScheme(space, block_tokens=group.block_tokens)
