"""The device's block pools over a cache: the one object that an embedded engine opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from kvladder.compose import open_manager
from kvladder.config.stack import StackConfig, load_config
from kvladder.device.port import TierPort
from kvladder.device.preempt import Preemption, Suspended
from kvladder.errors import ConfigError, LayoutError, PlanError
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages, Part, common_element
from kvladder.gpu.pool.events import PoolEvent, PoolEvents, Stored
from kvladder.gpu.pool.pool import BlockPool, Partial, PoolSettings
from kvladder.gpu.requests.groups import Group
from kvladder.gpu.requests.requests import Request, Requests
from kvladder.gpu.requests.sequence import Sequences
from kvladder.gpu.sizing.divide import Division, blocks_of, divide, pool_bytes
from kvladder.keys import KeyScheme, namespace
from kvladder.layout import Layout
from kvladder.lock import STEP
from kvladder.manager import CacheManager
from kvladder.metrics import Stats

Tensors = Mapping[str, torch.Tensor]
Allocate = Callable[[int, int], Tensors]
"""``allocate(group, blocks)``: the group's tensors, each ``[blocks, ...]``, by name."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """One group of a model's layers, as its engine describes it."""

    group: Group
    block_bytes: int
    """Of one block in all tensors of the group together."""


class DeviceCache:
    """Block pools on a device and the tiers below them. Calls come from one thread, the engine's.

    Made by ``open_device``. ``requests`` is what the engine runs on; ``tensors[g]`` is the memory
    of group ``g``, in which ``requests``' tables name the blocks. ``poll`` is called once a step.
    """

    def __init__(
        self,
        manager: CacheManager,
        port: TierPort,
        requests: Requests,
        tensors: Sequence[Tensors],
        events: PoolEvents,
        division: Division,
    ) -> None:
        self.manager = manager
        self.port = port
        self.requests = requests
        self.tensors = tuple(tensors)
        self.division = division
        self._events = events
        self.preemption = Preemption(
            port, requests, [share.block_bytes for share in division.shares]
        )

    @property
    def pools(self) -> list[BlockPool]:
        """By group."""
        return [one.pool for one in self.requests.sequences]

    def poll(self) -> None:
        """Take note of copies that ended and of what the tiers did; never waits."""
        self.port.poll()

    def wait(self, timeout_s: float) -> None:
        """Return when a copy ended, or soon, at the latest after ``timeout_s``; then poll."""
        self.port.wait(timeout_s)

    def suspend(self, request: Request) -> Suspended:
        """Have a running request give its device memory up, see ``Preemption.suspend``."""
        return self.preemption.suspend(request)

    def resume(self, suspended: Suspended, *, room: int | None = None) -> Request:
        """Go on with it, see ``Preemption.resume``."""
        return self.preemption.resume(suspended, room=room)

    def take_events(self) -> list[PoolEvent]:
        """What happened to which block since the last call, oldest first."""
        return self._events.take()

    def snapshot(self) -> list[Stored]:
        """The indexes of all pools as events that make them from nothing."""
        return [event for pool in self.pools for event in pool.snapshot()]

    def reset(self) -> None:
        """Forget everything that is cached, on the device and in the tiers."""
        for pool in self.pools:
            pool.reset()

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
        """Counters of the pools, by ``gpu`` and the group's name, and of the tiers; plain data."""
        found: Stats = {}
        for group, pool in zip(self.requests.groups, self.pools, strict=True):
            counts = {"capacity": pool.blocks, "free": pool.free, "cached": pool.cached}
            found[f"gpu.{group.name}"] = {**pool.stats.as_dict(), **counts}
        return {**found, **self.manager.stats()}

    def describe(self) -> str:
        """The resolved configuration, and how the device's memory is divided."""
        partial = self.pools[0].settings.partial
        return f"{self.manager.describe()}\n\ngpu: {self.division}\n  partial matches: {partial}"

    def check(self) -> None:
        """Assert every invariant on both sides; O(n), for tests."""
        self.port.check()

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
    groups: Sequence[DeviceGroup],
    allocate: Allocate,
    *,
    fields: Mapping[str, str],
    context: int,
    step: int | None = None,
    free_bytes: int | None = None,
    other_bytes: int = 0,
    peak_bytes: int = 0,
    reuse: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> DeviceCache:
    """Open pools and tiers as a YAML file or a mapping says; the caller closes what is returned.

    Parameters
    ----------
    groups:
        The model's layers; those of a group share one table of blocks.
    allocate:
        Called once per group with its number of blocks.
    fields:
        What names the model's bytes: model, weights, dtype ...
    context, step:
        Tokens of the longest request, and how many of a prompt are computed at a time (None: all);
        memory is divided by them.
    free_bytes, other_bytes, peak_bytes:
        Device memory that is free, what other caches take of it, and what a forward pass does.
        They are asked for where ``gpu.memory`` does not say how much the pools get.
    reuse:
        Whether blocks may be served to later requests, see ``CachePlan.no_reuse``.
    overrides:
        What the engine sets, above file and environment.

    Raises
    ------
    ConfigError
        A setting is wrong, two groups have one name, or the memory does not suffice; nothing
        stays open.
    """
    names = [one.group.name for one in groups]
    if not names or len(set(names)) < len(names):
        hint = "one or more, each with a name of its own, which is part of its blocks' keys"
        raise PlanError(f"groups {names}", hint=hint)
    config = load_config(source, overrides={"gpu": {}, **(overrides or {})})
    partial = _partial(config, groups)
    memory = _memory(config, groups, context, free_bytes, other_bytes, peak_bytes)
    pairs = [(one.group, one.block_bytes) for one in groups]
    division = divide(pairs, memory, context=context, step=step, shares=config.gpu.shares)
    widest = max(one.block_bytes for one in groups)
    tensors, parts = _allocate(groups, allocate, division)
    element = common_element(part.pages.element for part in parts.values())
    layout = Layout(groups[0].group.block_tokens, widest, fields, *element)
    manager = open_manager(config, layout, pools=True)
    events = PoolEvents(config.gpu.events)
    with ExitStack() as undo:
        undo.callback(manager.close)
        port = TierPort(manager, copier_for(parts, manager.arena))
        undo.callback(port.close)
        requests = make_pools(manager, port, division, events, partial=partial, reuse=reuse)
        undo.pop_all()
    return DeviceCache(manager, port, requests, tensors, events, division)


def make_pools(
    manager: CacheManager,
    port: TierPort,
    division: Division,
    events: PoolEvents,
    *,
    partial: Partial,
    reuse: bool = True,
) -> Requests:
    """A pool for each group of ``division`` over the manager's tiers, and requests over them."""
    now = manager.ladder.clock.now
    alone = len(division.shares) == 1
    sequences: list[Sequences] = []
    for at, share in enumerate(division.shares):
        group = share.group
        chained = group.kind == "full"
        pool = BlockPool(
            PoolSettings(share.blocks, group.block_tokens, partial, chained=chained, group=at),
            now=now,
            below=port,
            events=events,
        )
        port.attach(at, pool)
        sequences.append(Sequences(pool, _scheme(manager, group, alone=alone)))
    return Requests([share.group for share in division.shares], sequences, reuse=reuse)


def _partial(config: StackConfig, groups: Sequence[DeviceGroup]) -> Partial:
    """What the setting comes to: partial matches are for one group that reads all tokens."""
    asked = config.gpu.partial
    possible = len(groups) == 1 and groups[0].group.kind == "full"
    if asked == "auto":
        return "take" if possible else "off"
    if asked != "off" and not possible:
        hint = "auto or off: blocks of several groups, windows and states are matched whole"
        raise config.source.explain(ConfigError(asked, path="gpu.partial", hint=hint))
    return asked


def _memory(
    config: StackConfig,
    groups: Sequence[DeviceGroup],
    context: int,
    free: int | None,
    other: int,
    peak: int,
) -> int:
    """Bytes for all pools."""
    gpu = config.gpu
    if gpu.memory_bytes is not None:
        return gpu.memory_bytes
    if free is None:
        hint = "a size such as 4 GiB, where the engine does not say how much is free"
        raise ConfigError("missing", path="gpu.memory", hint=hint)
    each = [one.block_bytes * blocks_of(context, one.group.block_tokens) for one in groups]
    return pool_bytes(
        free=free,
        fraction=gpu.fraction,
        other=other,
        peak=peak,
        max_tokens=gpu.max_tokens,
        token_bytes=-(-sum(each) // context),
    )


def _allocate(
    groups: Sequence[DeviceGroup], allocate: Allocate, division: Division
) -> tuple[list[Tensors], dict[int, Part]]:
    tensors: list[Tensors] = []
    parts: dict[int, Part] = {}
    for at, (one, share) in enumerate(zip(groups, division.shares, strict=True)):
        tensors.append(allocate(at, share.blocks))
        pages = BlockPages.of(tensors[-1], blocks=share.blocks)
        if pages.block_bytes != one.block_bytes:
            what = f"{one.group.name}: a block takes {pages.block_bytes} bytes in the tensors"
            raise LayoutError(what, hint=f"the group says {one.block_bytes}")
        parts[at] = Part(pages)
    return tensors, parts


def _scheme(manager: CacheManager, group: Group, *, alone: bool) -> KeyScheme:
    """Names of a group's blocks; those of several groups never meet."""
    space = manager.namespace
    if not alone or group.kind != "full":
        what = {"group": group.name, "kind": group.kind, "window": str(group.window)}
        space = namespace({"of": space.hex(), **what})
    return KeyScheme(space, block_tokens=group.block_tokens)
