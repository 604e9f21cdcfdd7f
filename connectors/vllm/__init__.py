"""The connector for vLLM: ``"kv_connector_module_path": "kvladder.connectors.vllm"``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvladder.connectors.vllm.connector import KVLadderConnector as KVLadderConnector


def __getattr__(name: str) -> Any:
    if name == "KVLadderConnector":  # imported only when asked for, because it imports vLLM
        from kvladder.connectors.vllm.connector import KVLadderConnector

        return KVLadderConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
