"""Registers ``--radix-cache-backend kvladder``; SGLang calls it in each of its processes.

In processes that compute, it also begins to watch the weights, because they may change before
kvladder is attached.
"""

from __future__ import annotations

from typing import Any

NAME = "kvladder"


def register() -> None:
    """Register the tree under its name. The tree is imported only when it is used."""
    from sglang.srt.mem_cache.registry import (
        get_radix_cache_factory,
        register_radix_cache_backend,
    )

    if get_radix_cache_factory(NAME) is None:
        register_radix_cache_backend(NAME, _tree)
    from kvladder.connectors.sglang.weights import is_scheduler, watch

    if is_scheduler():
        watch.begin()


def _tree(context: Any) -> Any:
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from kvladder.connectors.sglang.hints import begin_answers
    from kvladder.connectors.sglang.tree import KVLadderRadixCache

    begin_answers()
    return create_unified_radix_cache(context, cache_class=KVLadderRadixCache)
