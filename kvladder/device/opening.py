"""Opens a device cache: applies the settings to a plan, allocates it, and makes its pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kvladder.compose import open_manager
from kvladder.config.settings import GpuConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.device.cache import DeviceCache, Tensors
from kvladder.device.memory import Allocate, PlanMemory
from kvladder.device.port import TierPort
from kvladder.errors import ConfigError, LayoutError, PlanError
from kvladder.gpu.copy.cuda import copier_for, numa_node
from kvladder.gpu.copy.pages import BlockPages, RankShare, common_element
from kvladder.gpu.copy.registration import table_bytes
from kvladder.gpu.pool.events import PoolEvents
from kvladder.gpu.pool.pool import BlockPool, Partial, PoolSettings
from kvladder.gpu.requests.requests import Requests
from kvladder.gpu.requests.sequence import Sequences
from kvladder.gpu.sizing.divide import Division
from kvladder.gpu.sizing.groups import Group
from kvladder.gpu.sizing.plan import CachePlan
from kvladder.keys import KeyScheme, namespace
from kvladder.layout import Kind, Layout
from kvladder.manager import CacheManager
from kvladder.publishing.device import OnDevice

Forward = Callable[[PlanMemory], int]
"""Runs the largest forward pass over memory for one sequence; returns the other bytes it took."""


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
    return open_pools(
        config,
        plan.division,
        memory.tensors,
        fields={**fields, "places": places, **_windows(gpu.windows)},
        reuse=not plan.no_reuse,
        memory=memory,
        tables=tables,
    )


def open_pools(
    config: StackConfig,
    division: Division,
    tensors: Sequence[Tensors],
    *,
    fields: Mapping[str, str],
    reuse: bool = True,
    memory: PlanMemory | None = None,
    tables: int = 0,
) -> DeviceCache:
    """Open pools of these sizes over allocated memory; ``tensors`` has the tensors of each pool.

    ``tables`` is the device memory left for the page tables of the registered arena.
    """
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
    return DeviceCache(manager, port, requests, tensors, events, division, memory, told, tables)


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
