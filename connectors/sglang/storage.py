"""SGLang's storage below its host pool: kvladder's stack of levels.

    --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvladder", "interface_v1": 1,
        "module_path": "kvladder.connectors.sglang", "class_name": "KVLadderStorage",
        "config": "stack.yaml"}'

A page of SGLang's is a block of ours, and its digest is the block's key. Whatever a model keeps
besides keys and values has pages, and so blocks, of its own. SGLang has one thread each for
lookups, reads and writes. These may wait, but if one hangs it delays all requests. Other calls come
from its scheduler's thread, which must not wait.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from threading import Lock
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvladder.compose import open_manager
from kvladder.config.stack import StackConfig
from kvladder.connectors.sglang import identity
from kvladder.connectors.sglang.node import Node, drained, join
from kvladder.connectors.sglang.options import CALL_S, DEADLINE_MAX, parse
from kvladder.connectors.sglang.pieces import PageBatch, PageRun
from kvladder.connectors.sglang.pools import KV, RankPool, pool_of, require_stored
from kvladder.connectors.sglang.served import WatchedPages
from kvladder.connectors.sglang.weights import watch
from kvladder.connectors.vllm.reports.log import late_levels
from kvladder.errors import ConfigError, LayoutError
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.runtime import SystemClock

logger = logging.getLogger("kvladder.sglang")

T = TypeVar("T")

ANNOUNCED_MAX: Final = 1 << 14
"""Largest number of announced priorities, each remembered until its batch is written."""
SALTS_MAX: Final = 1 << 17
"""Largest number of remembered salts of pages; the pages announced last are kept."""
CALLS_MAX: Final = 1 << 10
"""Largest number of calls with figures that wait until SGLang asks for them."""
PAGE_TOKENS_FEW: Final = 16
PHASES: Final = 3
"""Calls that SGLang needs to move one batch of a model that keeps more than keys and values."""


class KVLadderStorage(HiCacheStorage):  # type: ignore[misc]
    """Stores the pages of one rank, in a stack that a server's ranks on one machine share.

    ``storage_config`` is SGLang's, ``kwargs`` are empty.

    Raises
    ------
    ConfigError
        The settings are wrong, or the engine is not supported.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any]) -> None:
        self._ranks = storage_config
        self._settings = parse(storage_config.extra_config or {})
        identity.require_named(self._settings.model.fingerprint)
        _require_shared(storage_config, self._settings)
        self._pools: dict[str, RankPool] = {}
        """Pools by name; the first has keys and values."""
        self._node: Node | None = None
        """Stack in use; None before the host pools are known, and once weights have changed."""
        self._node_to_close: Node | None = None
        self._slot_bytes = 0
        """Bytes of a slot of the stack; 0 before it is open."""
        self._lock = Lock()
        self._announced: OrderedDict[str, int | None] = OrderedDict()
        """Priority of each batch about to be stored, by its first page.

        If there are other pools, also by the last page of what was announced together.
        """
        self._salts: OrderedDict[str, str] = OrderedDict()
        """Salt by page, if it has one. Each page is listed: SGLang may read from any of them on."""
        self.watched = WatchedPages()
        """Reports of requests about their pages."""
        self._gets: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)
        self._sets: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)

    @property
    def manager(self) -> CacheManager | None:
        """Manager of the stack, on the rank that owns it while it is in use; else None."""
        return self._node.manager if self._node is not None else None

    # ---- once, on the scheduler's thread

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of keys and values.

        Raises
        ------
        ConfigError
            Weights may have changed since SGLang's cache was filled, or cannot be read.
        LayoutError
            The pool cannot be used.
        """
        super().register_mem_pool_host(mem_pool_host)
        watch.begin(is_late=not identity.is_starting())
        watch.require_known(self._settings.model.fingerprint)
        self._pools = {KV: pool_of(mem_pool_host, KV, self._ranks, 0)}

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take another pool; does nothing if it has a pool of this name.

        If the stack is already open, the pool's pages must fit into its slots, and no codec may
        distinguish kinds of pages.

        Raises
        ------
        LayoutError
            The pool cannot be used.
        """
        name = str(host_pool_name)
        if name in self._pools:
            return
        pool = pool_of(host_pool, name, self._ranks, len(self._pools))
        require_stored(pool, self._ranks)
        if 0 < self._slot_bytes < pool.page_bytes:
            what = f"the pool {name!r} was added after the stack opened"
            what += f", and its pages have {pool.page_bytes} bytes"
            hint = f"expected at most {self._slot_bytes} bytes, the size of a slot of the arena"
            raise LayoutError(what, hint=hint)
        if self.manager is not None and self.manager.kinds:
            what = f"the pool {name!r} was added after the stack opened"
            hint = "leave out codecs that are limited to some kinds of layers"
            raise LayoutError(f"{what}, and a codec is limited to some kinds of layers", hint=hint)
        self._pools[name] = pool

    def on_host_pools_registered(self) -> None:
        """Open the stack for pages of these pools, or use that of another rank.

        Raises
        ------
        ConfigError
            The stack cannot be opened; says where, what and what instead.
        """
        settings, ranks = self._settings, self._ranks
        layout = identity.layout_of([*self._pools.values()], ranks, settings.model.fingerprint)
        self._node = self._node_to_close = join(
            identity.address_of(ranks, layout, settings),
            lambda: open_manager(settings, layout, instance=ranks.pp_rank),
            identity.ranks_of(ranks) - 1,
        )
        self._slot_bytes = layout.slot_bytes
        watch.tell(self, settings.model.fingerprint)
        if self.manager is None:
            logger.info("kvladder is ready: this rank uses the stack of another rank")
            return
        logger.info("kvladder is ready: %s", "\n".join(settings.summary(layout)))
        logger.debug("kvladder's settings\n%s", self.manager.describe())
        for text in _warnings(settings, layout.block_tokens):
            logger.warning("%s", text)

    def weights_change(self) -> None:
        """Serve and store nothing from now on: page names still refer to the earlier weights."""
        if self._node is not None:
            self._node = None
            logger.warning("the weights change: kvladder caches nothing until it is attached again")

    # ---- what SGLang asks for, in pages of one prefix

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        node, batch = self._node, self._batch(self._pools[KV], keys)
        if node is None:
            return 0
        begun_s, found = SystemClock().now(), node.reach(batch)
        report = self.watched.of(batch.names)
        if report is not None:
            report.waited_s += SystemClock().now() - begun_s
            report.found += found
            if found < len(keys) and self.manager is not None:
                report.cause = self.manager.commands.cause(batch.names[found])
        return found

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the prefixes that all pools can serve, and each pool's longest prefix."""
        there = self.batch_exists(keys)
        served, longest = set(range(1, there + 1)), {KV: there} if there else {}
        asked: Sequence[Any] = pool_transfers or ()
        for transfer in asked:
            own = self._served(transfer, keys[:there])
            if own:
                longest[transfer.name] = max(own)
            served &= own
        return PoolTransferResult(max(served, default=0), longest, sorted(served))

    def _served(self, transfer: Any, keys: Sequence[str]) -> set[int]:
        """Return the prefix lengths for which a pool holds every page that would be read."""
        node, batch = self._node, self._batch(self._pools[str(transfer.name)], keys)
        if node is None or not keys:
            return set()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, node.reach(batch) + 1))
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            raise ValueError(f"unknown hit policy: {transfer.hit_policy}")
        window, run, found = max(1, len(transfer.keys or ())), 0, set[int]()
        for length, is_here in enumerate(node.holding(batch), 1):
            run = run + 1 if is_here else 0
            if run >= min(window, length):
                found.add(length)
        return found

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        pool = self._pools[KV]
        return self._moved(pool, self._batch(pool, keys), host_indices, up=True)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        found: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool = self._pools[str(transfer.name)]
            batch = self._batch(pool, transfer.keys or ())
            found[transfer.name] = self._moved(pool, batch, transfer.host_indices, up=True)
        return found

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages; return True for each page that is done.

        False means that a page found no slot, and stops SGLang from offering the pages behind it.
        Pages that no level wants get True, since those behind them may be wanted.
        """
        with self._lock:
            priority = self._announced.pop(keys[0], None)
            self._announced.pop(keys[-1], None)
        pool = self._pools[KV]
        return self._moved(pool, self._batch(pool, keys, priority), host_indices, up=False)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Do as ``batch_set_v1``, which SGLang calls afterwards for keys and values."""
        found: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool = self._pools[str(transfer.name)]
            keys: Sequence[str] = transfer.keys or ()
            priority = self._announced.get(keys[-1]) if keys else None
            batch = self._batch(pool, keys, priority)
            found[transfer.name] = self._moved(pool, batch, transfer.host_indices, up=False)
        return found

    @property
    def page(self) -> int:
        """Number of tokens of a page."""
        return self._pools[KV].page

    def runs(self, keys: Sequence[str]) -> list[list[BlockKey]]:
        """Return the names of a prompt's pages, by pool: those of keys and values come first.

        Of other pools only the held ones are named: they do not keep each page of a prompt.
        """
        runs: list[list[BlockKey]] = []
        for pool in self._pools.values():
            names = [BlockKey(name) for name in pool.names(keys)]
            if runs and self.manager is not None:
                held = self.manager.holding(names)
                names = [name for name, is_held in zip(names, held, strict=True) if is_held]
            runs.append(names)
        return runs

    def _batch(self, pool: RankPool, keys: Sequence[str], priority: int | None = None) -> PageBatch:
        """Return a batch of a pool's pages; its calls share the time that SGLang allows a batch."""
        phases = PHASES if len(self._pools) > 1 else 1
        return PageBatch(
            pool.names(keys),
            salt=self._salts.get(keys[0], "") if keys else "",
            within_s=CALL_S / phases,
            deadline_s=float(min(self._settings.fetch.deadline_s, DEADLINE_MAX / phases)),
            priority=priority,
            group=pool.group,
        )

    def _moved(
        self, pool: RankPool, batch: PageBatch, rows: torch.Tensor | None, *, up: bool
    ) -> list[bool]:
        """Copy pages between a pool's rows and slots; return whether each page is done.

        Without a stack no page is read, and all saves count as done.
        """
        node, begun_s, total, copied = self._node, SystemClock().now(), len(batch.keys), 0
        done = 0 if up else total
        report = self.watched.of(batch.names) if up and pool.name == KV else None
        if node is not None:
            done = 0
            if rows is not None and 0 < len(rows) == total * pool.page:

                def copy(piece: PageRun) -> None:
                    nonlocal copied
                    pool.copy(node.arena, piece, rows, up=up)
                    copied += len(piece.slots)
                    if report is not None:
                        report.levels.update(piece.sources)

                pieces = node.fetch(batch) if up else node.save(batch)
                with closing(pieces):
                    done = drained(pieces, copy)
        if report is not None:
            report.waited_s += SystemClock().now() - begun_s
            left = batch.names[done : done + 1]
            if left and self.manager is not None and not self.manager.holding(left)[0]:
                # a lookup counts pages that a shared level may have, which has answered by now
                report.cause = self.manager.commands.cause(left[0])
        if pool.name == KV and self._ranks.enable_storage_metrics:
            calls = self._gets if up else self._sets
            calls.append((copied, SystemClock().now() - begun_s))
        return [at < done for at in range(total)]

    def announce(self, keys: Sequence[str], *, priority: int | None, salt: str) -> None:
        """Remember the priority and the salt of pages that are about to be stored.

        With None for the priority, pages that are held already keep theirs.
        """
        lasts = keys[-1:] if len(self._pools) > 1 else ()  # pages of other pools end there
        firsts = keys[::STORAGE_BATCH_SIZE]  # SGLang moves this many at once
        self._remember(self._announced, (*firsts, *lasts), priority, ANNOUNCED_MAX)
        self.announce_salt(keys, salt)

    def announce_salt(self, keys: Sequence[str], salt: str) -> None:
        """Remember the salt of pages that are about to be stored or read. It never changes."""
        if salt:
            self._remember(self._salts, keys, salt, SALTS_MAX)

    def _remember(
        self, by_page: OrderedDict[str, T], keys: Sequence[str], told: T, most: int
    ) -> None:
        """Note ``told`` for pages; beyond ``most`` entries the oldest are dropped."""
        with self._lock:
            for key in keys:
                by_page[key] = told
                by_page.move_to_end(key)
            while len(by_page) > most:
                by_page.popitem(last=False)

    # ---- at any time, on the scheduler's thread

    def get_stats(  # pyright: ignore[reportIncompatibleMethodOverride] - its own gives nothing
        self,
    ) -> StorageMetrics:
        """Return the pages and GB/s of the calls since the last time."""
        gets, sets = _taken(self._gets), _taken(self._sets)
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in gets],
            backup_pgs=[pages for pages, _ in sets],
            prefetch_bandwidth=[self._speed(*call) for call in gets],
            backup_bandwidth=[self._speed(*call) for call in sets],
        )

    def _speed(self, pages: int, seconds: float) -> float:
        return pages * self._pools[KV].page_bytes / max(seconds, 1e-9) / 1e9

    def clear(self) -> None:
        """Remove every page of this model from every level."""
        if self._node_to_close is not None:
            self._node_to_close.clear()

    def close(self) -> None:
        """Close the stack. May be called again. SGLang does not call it when it is terminated."""
        node, self._node, self._node_to_close = self._node_to_close, None, None
        if node is not None:
            node.close()

    # ---- SGLang's first generation of calls, which ``interface_v1`` replaces

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, *_: Any, **__: Any) -> None:
        return None

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[torch.Tensor | None]:
        return [None] * len(keys)

    def set(self, key: str, *_: Any, **__: Any) -> bool:
        return False

    def batch_set(self, keys: list[str], *_: Any, **__: Any) -> bool:
        return False


def _taken(calls: deque[tuple[int, float]]) -> list[tuple[int, float]]:
    """Remove and return the calls so far; other threads may append meanwhile."""
    return [calls.popleft() for _ in range(len(calls))]


def _require_shared(ranks: Any, settings: StackConfig) -> None:
    """Raise ConfigError if pages that only one rank stores cannot reach ranks on other machines."""
    if not ranks.is_mla_model or not identity.is_spread(ranks):
        return
    if not any(level.make.shared and level.when == "commit" for level in settings.levels):
        raise ConfigError(
            "with latent attention, one rank of SGLang stores the pages for the ranks on all"
            " machines, but no shared tier has when: commit",
            path="tiers",
            hint="expected a tier that machines share, such as redis, with when: commit",
        )


def _warnings(settings: StackConfig, page_tokens: int) -> Iterator[str]:
    """Yield warnings about settings that SGLang allows but that are hardly intended.

    The stack has warnings of its own when it starts.
    """
    late = late_levels(settings)
    if late:
        yield (
            "SGLang ends its processes without waiting: blocks that"
            f" {settings.host.name} has not passed on to {' and '.join(late)} are lost."
            " Use when: commit for that tier."
        )
    if page_tokens < PAGE_TOKENS_FEW:
        yield (
            f"--page-size is {page_tokens}: each page is looked up, checked and copied separately."
            " Use --page-size 64."
        )
