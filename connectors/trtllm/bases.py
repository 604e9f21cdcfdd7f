"""TensorRT-LLM's base classes for connectors; stand-ins where it is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

MODULES: Final = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Modules of the classes: in its main branch of 2026, and in its releases 1.x."""


class _Scheduler:
    """Stands in for ``KvCacheConnectorScheduler``, which otherwise has only abstract methods."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class _Worker:
    """Stands in for ``KvCacheConnectorWorker``, which otherwise has only abstract methods."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> None:
        return None


def _found() -> tuple[Any, Any]:
    for name in MODULES:
        try:
            module = import_module(name)
        except ImportError:
            continue
        return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
    return _Scheduler, _Worker


SchedulerBase: Any
WorkerBase: Any
SchedulerBase, WorkerBase = _found()


def rank() -> int:
    """Return this process's rank in the engine; 0 without TensorRT-LLM."""
    try:
        utils: Any = import_module("tensorrt_llm._utils")
    except ImportError:
        return 0
    return int(utils.mpi_rank())
