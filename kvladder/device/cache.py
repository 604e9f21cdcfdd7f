"""The device's block pools over a cache: the one object that an embedded engine opens."""

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
from kvladder.gpu.pool.events import PoolEvent, PoolEvents, PoolStored
from kvladder.gpu.pool.pool import BlockPool, Partial, PoolSettings
from kvladder.gpu.requests.groups import Group
from kvladder.gpu.requests.requests import Request, Requests
from kvladder.gpu.requests.sequence import Sequences
from kvladder.gpu.sizing.divide import Division
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.keys import KeyScheme, namespace
from kvladder.layout import Kind, Layout
from kvladder.lock import STEP
from kvladder.manager import CacheManager
from kvladder.metrics import POOL, Stats
from kvladder.policy.eviction import PRIORITY_MIN
from kvladder.publishing.device import OnDevice

Tensors = Mapping[str, torch.Tensor]
Forward = Callable[[PlanMemory], int]
"""Runs a pass of the most tokens over memory for one sequence: the bytes that it took besides."""


class DeviceCache:
    """Block pools on a device and the tiers below them. Calls come from one thread, the engine's.

    Made by ``open_device``. ``requests`` is what the engine runs on; ``memory`` has the views of
    each layer and state, in which ``requests``' tables name the blocks; ``tensors[g]`` are those of
    group ``g``. ``poll`` is called once a step.
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
        """What the pools hold, for events that are published."""
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
        """Where each layer, state and convolution lies; not of pools that were opened without."""
        assert self._memory is not None, "opened without a plan"
        return self._memory

    @property
    def pools(self) -> list[BlockPool]:
        """By group."""
        return [one.pool for one in self.requests.sequences]

    def poll(self) -> None:
        """Take note of copies that ended and of what the tiers did; never waits."""
        with ranged("poll"):
            self.port.poll()
            for pool in self.pools:
                pool.mark()
            if self.rebalance is not None:
                self.rebalance.poll()

    def wait(self, timeout_s: float) -> None:
        """Return when a copy ended, or soon, at the latest after ``timeout_s``; then poll."""
        self.port.wait(timeout_s)

    def suspend(self, request: Request) -> Suspended:
        """Have a running request give its device memory up, see ``Preemption.suspend``."""
        with ranged("suspend", len(request.tokens)):
            return self.preemption.suspend(request)

    def resume(self, suspended: Suspended, *, room: int | None = None) -> Request:
        """Go on with it, see ``Preemption.resume``."""
        with ranged("resume"):
            return self.preemption.resume(suspended, room=room)

    def use_session(self, session: str, request: Request) -> None:
        """Have a request belong to a session: its whole blocks do, as far as they are computed.

        Called before the request is released. Raises ValueError if the session has ended.
        """
        sessions, runs = self.manager.sessions, request.runs
        sessions.use(session, runs, request.parts[0].root.salt)
        for part, run in zip(request.parts, runs, strict=True):
            sessions.brought(session, run[part.cached // part.block_tokens :])
        request.belongs(session)

    def _released(self, request: Request) -> None:
        """Note what a request used that belongs to no session."""
        for run in request.runs if request.session is None else ():
            self.manager.sessions.met(None, run)

    def prefetch(self, session: str) -> None:
        """Have the tiers bring to host what the next request of a session begins with.

        That is what the pools have not, of windows and states what is read behind its blocks. A
        hint: where there is no room nothing comes. Raises ValueError if the session has ended, or
        nobody knows of it.
        """
        runs, salt = self.manager.sessions.last(session)
        for group, pool, run in zip(self.requests.groups, self.pools, runs, strict=True):
            read = run[group.first(len(run) * group.block_tokens) :]
            self.port.prefetch(read[len(pool.match(read)) :], salt)

    def end_session(self, session: str) -> None:
        """End a session: the blocks that it computed and no other request used are the next to go.

        On the device; levels with a threshold forget them at once. Raises as ``prefetch`` does.
        """
        owned = self.manager.sessions.owned(session)
        spare = {key for pool in self.pools for key in pool.in_use(owned)}
        keys = self.manager.end_session(session, spare=spare)
        for pool in self.pools:
            pool.reprioritize(keys, PRIORITY_MIN)

    def take_events(self) -> list[PoolEvent]:
        """What happened to which block since the last call, oldest first."""
        return self._events.take()

    def snapshot(self) -> list[PoolStored]:
        """The indexes of all pools as events that make them from nothing."""
        return [event for pool in self.pools for event in pool.snapshot()]

    def reset(self) -> None:
        """Forget everything that is cached, on the device and in the tiers."""
        for pool in self.pools:
            pool.reset()

    def rename(self, mark: str) -> None:
        """Name blocks by this mark, too, from now on: that of other weights. See ``Requests``."""
        self.requests.rename(mark)
        if self._told is not None:
            self._told.rename()

    def purge(self, salt: str) -> None:
        """Forget every block of requests with this salt, on the device and in the tiers.

        Requests that run or are suspended keep theirs, and do not make them known again. A durable
        tier has forgotten the blocks once ``manager.removals`` is 0. Raises ValueError if the salt
        is empty.
        """
        steps = self.manager.purge(salt)
        for pool in self.pools:
            pool.purge(salt)
        for _ in steps:
            pass

    def stats(self) -> Stats:
        """Counters of the tiers, the pools (``gpu.`` and the group's name) and preemption."""
        return self.manager.stats()

    def describe(self) -> str:
        """The resolved configuration, and how the device's memory is divided."""
        matches = {pool.settings.partial for pool in self.pools} - {"off"}
        plan = None if self._memory is None else self._memory.plan
        why = (plan and plan.no_reuse) or "nothing is kept for later requests"
        reuse = "on" if self.requests.reuse else f"off: {why}"
        lines = [
            f"gpu: {self.division if plan is None else plan.described}",
            f"  reuse: {reuse}",
            f"  partial matches: {matches.pop() if matches else 'off'}",
        ]
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
        """Have what is cached and held by nobody leave the device for levels that outlive it.

        As many blocks at a time as the arena takes without losing others. False if that took
        longer than ``timeout_s``, the arena has no room, or those levels fail: then what had begun
        to leave is in the arena, or gets there with the next polls, and the rest is where it was.
        What no level admits is forgotten. Nothing is moved if no level outlives the engine.
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
        """Have up to ``count`` blocks begin to leave a pool, as far as the arena has room.

        How many do, and the room that there was for the last of them.
        """
        leaving = room = 0
        while leaving < count:
            with self.manager.ladder.lock:  # so that nobody else takes the room
                room = self.port.room(min(STEP, count - leaving))
                left = pool.evict(room)
            leaving += left
            if not left:
                break
        return leaving, room

    # ---- memory for others while this is idle

    def shrink(self, share: float = 0.0, *, timeout_s: float) -> int:
        """Give device memory back: pools keep this share of their blocks, and one at least.

        What is cached and worth most stays, on the device as far as there is room, else in tiers as
        far as they take it within ``timeout_s``. Requests that run have to be suspended or released
        before. Requests that need more than is left raise OutOfBlocks until ``grow``. How many
        bytes were given back.

        Raises
        ------
        PoolError
            A request holds blocks, or copies did not end in time; nothing was given back.
        LayoutError
            The engine's memory is not so that a part of it can be given back, or is shared by
            pools, see ``gpu.rebalance``.
        ValueError
            ``share`` is not in 0..1.
        """
        return self._room.shrink(share, timeout_s=timeout_s, leave=self._leave)

    def grow(self) -> int:
        """Take back what ``shrink`` gave; how many bytes.

        Raises
        ------
        PoolError
            A request holds blocks, which could not be used meanwhile.
        RuntimeError
            The device has no memory for it, as torch says; what there was before is still there.
        """
        return self._room.grow()

    def close(self, *, timeout_s: float | None = None) -> None:
        """End all copies, flush to durable levels, close everything; may be called again.

        What is cached on the device alone is lost, see ``hand_down``. ``timeout_s`` bounds the
        flush; None takes the usual one.
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
    """Open what a plan says over tiers as a file or a mapping says; the caller closes it.

    Parameters
    ----------
    plan:
        What the model keeps, collected, or checked and grouped, too; sized and allocated here.
    fields:
        What names the model's bytes: model, weights, dtype ...
    device, allocate:
        See ``PlanMemory``.
    sequences:
        How many run at a time, for what is allocated by itself; None for as many as fit.
    free_bytes, peak_bytes:
        Device memory that is free, and what of it a forward pass takes. They are asked for where
        ``gpu.memory`` does not say how much the cache gets.
    forward:
        Measures ``peak_bytes`` instead: it is called where ``gpu.memory`` does not say it, with
        memory for one sequence, which is then sized anew.
    overrides:
        What the engine sets, above file and environment.

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
        _size(config, plan, sequences, free_bytes, peak_bytes)
        measured = config.gpu.memory_bytes is None and forward is not None
        memory = PlanMemory(plan, device=device, allocate=allocate, least=measured)
        if measured and forward is not None:
            memory.resize(forward(memory))
    assert plan.division is not None
    places = ";".join(f"{one.name} {one.shape} {one.dtype}" for p in plan.pools for one in p.places)
    return open_pools(
        config,
        plan.division,
        memory.tensors,
        fields={**fields, "places": places, **_windows(gpu.windows)},
        reuse=not plan.no_reuse,
        memory=memory,
    )


def open_pools(
    config: StackConfig,
    division: Division,
    tensors: Sequence[Tensors],
    *,
    fields: Mapping[str, str],
    reuse: bool = True,
    memory: PlanMemory | None = None,
) -> DeviceCache:
    """Open pools of these sizes over memory that is there; ``tensors`` are those of each."""
    reuse = reuse and config.gpu.reuse
    partial = _partial(config, [share.group for share in division.shares], reuse=reuse)
    names = [share.group.name for share in division.shares]
    if len(set(names)) < len(names):
        hint = "each with a name of its own, which is part of its blocks' keys"
        raise PlanError(f"groups {names}", hint=hint)
    parts: dict[int, RankShare] = {}
    for at, (share, held) in enumerate(zip(division.shares, tensors, strict=True)):
        pages = BlockPages.of(held, blocks=division.places(share))
        if pages.block_bytes > share.block_bytes:
            what = f"{share.group.name}: a block takes {pages.block_bytes} bytes in the tensors"
            raise LayoutError(what, hint=f"the group says {share.block_bytes}")
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
    """Return what hears of the pools' blocks where events are published.

    It hears of the first group with full attention, whose blocks say how long a prefix is.
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
    """A pool for each group of ``division`` over the manager's tiers, and requests over them.

    Without slots in the arena there are no tiers.
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
    """What the setting comes to: nothing is matched in part where states end with every block."""
    asked = config.gpu.partial
    if not reuse:
        if asked not in {"auto", "off"}:
            hint = "auto or off: this model keeps something that is not paged"
            raise config.source.explain(ConfigError(asked, path="gpu.partial", hint=hint))
        return "off"
    checkpoint = max((one.block_tokens for one in groups if one.kind == "state"), default=1)
    possible = any(one.block_tokens > checkpoint for one in groups if one.kind != "state")
    if asked == "auto":
        return "take" if possible else "off"
    if asked != "off" and not possible:
        hint = f"auto or off: what states serve ends at a multiple of {checkpoint} tokens"
        raise config.source.explain(ConfigError(asked, path="gpu.partial", hint=hint))
    return asked


def _group(gpu: GpuConfig, plan: CachePlan, device: torch.device | str) -> None:
    """Have a plan be grouped, as the settings have it."""
    if gpu.dtype != "auto":
        _require_type(gpu.dtype, device)
    if plan.phase == "collect":
        plan.adapt(dtype=gpu.dtype, windows=gpu.windows).check()
    elif gpu.dtype != "auto" or gpu.windows:
        path = "gpu.windows" if gpu.windows else "gpu.dtype"
        hint = "leave it out: the engine has checked its plan already"
        raise ConfigError("has no effect here", path=path, hint=hint)
    if plan.phase == "check":
        plan.group()
    if not plan.pools:
        alone = ", ".join(one.name for one in plan.alone)
        hint = "a layer of paged KV, or a state whose pool it joins"
        raise PlanError(f"nothing is pooled: {alone} are by themselves", path="plan", hint=hint)


def _require_type(dtype: str, device: torch.device | str) -> None:
    """Raise ConfigError unless the device can have numbers of a type."""
    kind: torch.dtype = getattr(torch, "float8_e4m3fn" if dtype == "fp8" else dtype)
    try:
        _one(device, kind).float()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        what = f"{dtype} on {device}: {error}"
        raise ConfigError(what, path="gpu.dtype", hint="auto, or a type that it has") from error


def _one(device: torch.device | str, kind: torch.dtype) -> torch.Tensor:
    return torch.ones(1, device=device).to(kind)


def _windows(windows: Sequence[int]) -> dict[str, str]:
    """What tells the blocks of layers behind such windows from those behind the model's own."""
    return {"windows": ",".join(map(str, windows))} if windows else {}


def _size(
    config: StackConfig, plan: CachePlan, sequences: int | None, free: int | None, peak: int
) -> None:
    """Divide what the settings give a plan, or their part of what is free."""
    gpu = config.gpu
    if gpu.memory_bytes is not None:
        plan.size(gpu.memory_bytes, sequences=sequences, shares=gpu.shares, rebalance=gpu.rebalance)
    elif free is None:
        hint = "a size such as 4 GiB, where the engine does not say how much is free"
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
    """Names of a group's blocks; those of several groups never meet."""
    space = manager.namespace
    if not alone or group.kind != "full":
        what = {"group": group.name, "kind": group.kind, "window": str(group.window)}
        space = namespace({"of": space.hex(), **what})
    return KeyScheme(space, block_tokens=group.block_tokens)
