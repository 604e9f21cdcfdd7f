"""SGLang's radix cache with stand-ins for the modules that it imports but does not use.

The usual import loads model configurations, which need a torchvision that fits this torch. The tree
does not need them: its pools are only annotations and its metrics are off, so stand-ins replace
these modules.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "0.5.23"
PLACE = Path(os.environ.get("KVLADDER_SGLANG", Path(sys.prefix) / "sglang"))
"""Folder of ``pip install --no-deps --target PLACE sglang orjson``."""

_STAND_INS: dict[str, dict[str, Any]] = {
    "sglang": {"__path__": [str(PLACE / "sglang")]},
    "sglang.srt.mem_cache.allocator": {"BaseTokenToKVPoolAllocator": object},
    "sglang.srt.mem_cache.memory_pool": {"ReqToTokenPool": object},
    "sglang.srt.observability.metrics_collector": {
        "STAT_LOGGER_ROLE_RADIX_CACHE": "",
        "RadixCacheMetricsCollector": None,
        "radix_cache_metric_labels": None,
        "resolve_collector_class": None,
    },
}


class Absent(Exception):
    """Raised if SGLang cannot be used here; the message says why."""


class _Freed:
    """Counts the tokens that the tree frees, in place of SGLang's allocator."""

    device = "cpu"

    def __init__(self) -> None:
        self.tokens = 0

    def free_segment(self, value: Any, *, start_pos: int) -> None:
        self.tokens += len(value)


class SglangTree:
    """SGLang's Python radix cache with pages of ``page`` tokens."""

    def __init__(self, page: int) -> None:
        self._cache: Any
        self._radix, self._base = _modules()
        self.freed = _Freed()
        self._cache = self._radix.RadixCache.create_simulated(
            mock_allocator=self.freed, page_size=page
        )

    def key(self, tokens: Sequence[int]) -> Any:
        """Return tokens as a key of the tree."""
        return self._radix.RadixKey(token_ids=array("q", tokens))

    def insert(self, key: Any, value: Any) -> None:
        """Cache a prefix; ``value`` is an int64 tensor with one slot per token."""
        self._cache.insert(self._base.InsertParams(key=key, value=value))

    def match(self, key: Any) -> int:
        """Return the number of tokens of the longest cached prefix."""
        found = self._cache.match_prefix(self._base.MatchPrefixParams(key=key))
        tokens: int = found.device_prefix_len
        return tokens

    def evict(self, tokens: int) -> None:
        """Evict at least this many tokens."""
        self._cache.evict(self._base.EvictParams(num_tokens=tokens))


def _modules() -> tuple[ModuleType, ModuleType]:
    if not (PLACE / "sglang").is_dir():
        raise Absent(f"SGLang is not in {PLACE}")
    if str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))
    for name, contents in _STAND_INS.items():
        if name not in sys.modules:
            module = ModuleType(name)
            vars(module).update(contents)
            sys.modules[name] = module
    try:
        radix = import_module("sglang.srt.mem_cache.radix_cache")
        return radix, import_module("sglang.srt.mem_cache.base_prefix_cache")
    except ImportError as error:
        raise Absent(f"SGLang cannot be imported: {error}") from error
