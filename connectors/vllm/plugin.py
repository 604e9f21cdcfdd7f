"""Makes the connector known to vLLM by name; loaded in each of vLLM's processes at start."""

from __future__ import annotations

from contextlib import suppress

NAME = "KVLadderConnector"


def register() -> None:
    """Register the connector under its name; nothing else is imported before it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector(NAME, "kvladder.connectors.vllm", NAME)
