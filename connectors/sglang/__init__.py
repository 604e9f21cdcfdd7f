"""The connector for SGLang: ``"module_path": "kvladder.connectors.sglang"``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvladder.connectors.sglang.storage import KVLadderStorage as KVLadderStorage


def __getattr__(name: str) -> Any:
    if name == "KVLadderStorage":  # imported on demand: it imports SGLang
        from kvladder.connectors.sglang.storage import KVLadderStorage

        return KVLadderStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
