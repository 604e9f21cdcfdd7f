"""Registers ``--radix-cache-backend kvladder``; SGLang calls it in each of its processes.

In processes that compute, it also begins to watch the weights, because they may change before
kvladder is attached.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

NAME = "kvladder"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer"


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
        _begin_answers()


def _begin_answers() -> None:
    """Add outcomes of hints to answers; in a version of SGLang without these, do nothing."""
    module, _, name = STREAMER.partition(":")
    with suppress(ImportError, AttributeError):
        from kvladder.connectors.sglang.hints import tell_in_answers

        tell_in_answers(getattr(import_module(module), name))


def _tree(context: Any) -> Any:
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from kvladder.connectors.sglang.tree import KVLadderRadixCache

    return create_unified_radix_cache(context, cache_class=KVLadderRadixCache)
