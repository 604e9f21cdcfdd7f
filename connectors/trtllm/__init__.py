"""The connector for TensorRT-LLM: ``connector_module: kvladder.connectors.trtllm``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvladder.connectors.trtllm.scheduler import KVLadderScheduler as KVLadderScheduler
    from kvladder.connectors.trtllm.worker import KVLadderWorker as KVLadderWorker


def __getattr__(name: str) -> Any:
    if name == "KVLadderScheduler":  # imported on demand: it imports TensorRT-LLM
        from kvladder.connectors.trtllm.scheduler import KVLadderScheduler

        return KVLadderScheduler
    if name == "KVLadderWorker":
        from kvladder.connectors.trtllm.worker import KVLadderWorker

        return KVLadderWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
