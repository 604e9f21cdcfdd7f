"""SGLang's own radix tree, extended to tell the storage the priority and the salt of pages.

Without it the storage knows neither, because SGLang passes it pages, not requests.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvladder.connectors.sglang.hints import TreeHints, notes_of
from kvladder.connectors.sglang.storage import KVLadderStorage
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX

logger = logging.getLogger("kvladder.sglang")

NODES_MAX: Final = 1 << 16
"""Largest number of priorities of nodes, each remembered until its node is written."""
HOOKS: Final = (
    "match_prefix",
    "checkpoint_into_tree",
    "_execute_and_commit_kv_backup",
    "write_backup_storage",
    "_finish_write_through_ack",
    "drain_storage_control_queues",
    "release_session",
    "release_radix_session",
)
"""Methods of the tree that are overridden."""
QUESTIONS: Final = ("build_storage_backup_spec", "prefetch_anchor_info")
"""Methods of the tree's core that are called."""


def priority_of(request: Any) -> int | None:
    """Return the priority of a request's pages, 1 to 100, or None if the request gives none.

    A hint to pin or retain them counts before the request's own priority.

    Without a priority, SGLang's value is 0, or an end of the 64-bit range if SGLang schedules by
    priority.
    """
    notes = notes_of(request)
    if notes is not None and notes.hints is not None and notes.hints.ranked is not None:
        return notes.hints.ranked[0]
    said = request.priority
    return said if isinstance(said, int) and 0 < said <= PRIORITY_MAX else None


class KVLadderRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """Announces priority and salt of pages to the storage before they are written there.

    It also sees the hints of requests at their start and at their end.

    All calls come from the scheduler's thread. If a node is split before it is written, its
    priority is lost.
    """

    _request_priority: int | None = None
    """Priority of the request that is inserting its pages, if it gives one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._priorities: dict[Any, int] = {}
        """Priority by node, until the node is written to the storage."""
        missing = [name for name in HOOKS if not hasattr(UnifiedRadixCache, name)]
        missing += [name for name in QUESTIONS if not hasattr(self.tree_core, name)]
        self._can_tell = not missing
        self._hints = TreeHints(is_bigram=bool(getattr(self.tree_core, "is_eagle", False)))
        if missing:
            logger.warning(
                "the tree of this version of SGLang lacks %s, so kvladder does not know priorities"
                " and salts of requests: all pages have priority %d and no salt",
                ", ".join(missing),
                PRIORITY_DEFAULT,
            )

    def match_prefix(self, params: Any) -> Any:
        request, storage = params.req, self._storage
        if storage is not None:
            self._hints.meet(storage)
        if request is not None and storage is not None and notes_of(request) is None:
            self._hints.arrived(storage, request, params.key)
        return super().match_prefix(params)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        with self._inserting(priority_of(req)):
            below: Any = super()
            below.checkpoint_into_tree(req, up_to=up_to, **kwargs)
        storage = self._storage
        if storage is not None and req.finished():
            self._hints.finished(storage, req, up_to)

    def release_session(self, session_id: str) -> None:
        super().release_session(session_id)
        self._release(session_id)

    def release_radix_session(self, session_id: str) -> Any:
        released: Any = super().release_radix_session(session_id)
        self._release(session_id)
        return released

    def _release(self, session: str) -> None:
        storage = self._storage
        if storage is not None:
            self._hints.released(storage, session)

    @contextmanager
    def _inserting(self, priority: int | None) -> Generator[None]:
        self._request_priority = priority
        try:
            yield
        finally:
            self._request_priority = None

    def _execute_and_commit_kv_backup(self, action: Any, *args: Any, **kwargs: Any) -> Any:
        if self._request_priority is not None:
            self._priorities.update(dict.fromkeys(action.node_ids, self._request_priority))
            while len(self._priorities) > NODES_MAX:
                del self._priorities[next(iter(self._priorities))]
        return super()._execute_and_commit_kv_backup(action, *args, **kwargs)

    @property
    def _storage(self) -> KVLadderStorage | None:
        """The storage, if it is ours and this SGLang's tree has all that we call."""
        storage = getattr(self.cache_controller, "storage_backend", None)
        return storage if self._can_tell and isinstance(storage, KVLadderStorage) else None

    def drain_storage_control_queues(self) -> None:
        storage = self._storage
        if storage is not None:
            self._hints.meet(storage)
            # Draining this queue starts reading the pages found for a request.
            controller: Any = self.cache_controller
            for found in controller.prefetch_hit_queue.queue.copy():
                if found.token_ids.cache_salt:
                    storage.announce_salt(found.hash_value, found.token_ids.cache_salt)
        super().drain_storage_control_queues()

    def write_backup_storage(self, node_id: Any) -> None:
        priority = self._priorities.pop(node_id, None)
        storage = self._storage
        if storage is not None:
            spec = self.tree_core.build_storage_backup_spec(node_id, False)
            if spec is not None and spec.hash_value:
                _, salt = self.tree_core.prefetch_anchor_info(node_id)
                storage.announce(spec.hash_value, priority=priority, salt=salt or "")
        super().write_backup_storage(node_id)

    def _finish_write_through_ack(self, ack_id: int) -> None:
        storage, pipeline = self._storage, self.buffer_pipeline
        if storage is not None and pipeline is not None:
            # If the host pool only stages pages, they go to the storage from here.
            entry: Any = pipeline.ongoing_write_through[ack_id]
            for keys in entry.keys_by_pool.values():
                storage.announce_salt(keys, entry.intent.snapshot.key.cache_salt or "")
        super()._finish_write_through_ack(ack_id)
