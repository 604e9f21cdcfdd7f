"""Prioritized LRU as the cache policy of vLLM's own CPU tier.

    "kv_connector_extra_config": {"eviction_policy": "PrioritizedLRUPolicy",
        "cache_policy_module_path": "kvladder.connectors.vllm_native.policy", ...}

A request sets its priority with ``kv_transfer_params={"kvladder": {"priority": 80}}``. Without it
the priority is 35.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PrioritizedLRU

_PLACE = "chunk_id"


class PrioritizedLRUPolicy(CachePolicy):  # type: ignore[misc]
    """Evicts the lowest priority first, then the least recently used; each operation is O(1).

    Blocks that a transfer uses are not in the order. They return as the most recently used.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order = PrioritizedLRU()
        self._blocks: dict[OffloadKey, Any] = {}
        self._keys: dict[int, OffloadKey] = {}
        """Keys by handle, which is the block's place in vLLM's memory."""
        self._priority: dict[OffloadKey, int] = {}
        """Priorities of blocks that a request has given one."""
        self._wanted: dict[OffloadKey, int] = {}
        """Priorities of the blocks that will be inserted next."""

    def get(self, key: OffloadKey) -> Any | None:
        return self._blocks.get(key)

    def insert(  # pyright: ignore[reportIncompatibleMethodOverride] - vLLM passes by position
        self, key: OffloadKey, block: Any, /
    ) -> None:
        self._blocks[key] = block
        self._keys[_place(block)] = key
        if key in self._wanted:
            self._priority[key] = self._wanted.pop(key)
        if block.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        block = self._blocks.pop(key)
        del self._keys[_place(block)]
        self._priority.pop(key, None)
        if _place(block) in self._order:
            self._order.remove(_place(block))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Remember the priority of the request's new blocks until they are inserted."""
        priority = _priority(req_context)
        self._wanted = {} if priority is None else dict.fromkeys(keys, priority)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        priority = _priority(req_context)
        for key in reversed(list(keys)):
            block = self._blocks.get(key)
            if block is None:
                continue
            handle = _place(block)
            if priority is not None and priority != self._priority.get(key, PRIORITY_DEFAULT):
                self._priority[key] = priority
                if handle in self._order:
                    self._order.remove(handle)
                    self._order.push(handle, priority)
            elif handle in self._order:
                self._order.touch(handle)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.touch(order_request_keys(key_groups, req_context), req_context)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, Any]] | None:
        chosen: list[OffloadKey] = []
        for handle in self._order:
            if len(chosen) == n:
                break
            key = self._keys[handle]
            if key not in protected:
                chosen.append(key)
        if len(chosen) < n:
            return None
        evicted = [(key, self._blocks[key]) for key in chosen]
        for key in chosen:
            self.remove(key)
        return evicted

    def clear(self) -> None:
        self._order = PrioritizedLRU()
        self._blocks.clear()
        self._keys.clear()
        self._priority.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        handle = _place(self._blocks[key])
        self._order.push(handle, self._priority.get(key, PRIORITY_DEFAULT))

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._order.remove(_place(self._blocks[key]))


def _place(block: Any) -> int:
    """Return a block's place in vLLM's memory: a unique number below the capacity."""
    place: int = getattr(block, _PLACE)
    return place


def _is_dict(thing: object) -> bool:
    return isinstance(thing, dict)


def _priority(req_context: ReqContext) -> int | None:
    """Return the priority that a request gives its blocks; None if it is missing or invalid."""
    params: Any = (req_context.kv_transfer_params or {}).get("kvladder")
    given: object = cast("dict[str, object]", params).get("priority") if _is_dict(params) else None
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= PRIORITY_MAX:
        return given
    return None
