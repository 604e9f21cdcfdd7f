"""Registers the connector with vLLM by name; each vLLM process loads this module at start."""

from __future__ import annotations

from contextlib import suppress

NAME = "KVLadderConnector"


def register() -> None:
    """Register the connector under its name; its module is imported only when it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # already registered
        KVConnectorFactory.register_connector(NAME, "kvladder.connectors.vllm", NAME)
