"""KV events as vLLM and SGLang put them on the wire: MessagePack, each event a map.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a batch
``[seconds since the epoch, [events], rank]``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

Hash = bytes | int
END: Final = (-1).to_bytes(8, signed=True)
"""The sequence number of the message that ends a replay."""


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of the events; a map with its class's name as ``type``."""


class BlockStored(Event):
    """These blocks are in a medium from now on."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    """Of the first of them."""
    token_ids: list[int]
    """Of all of them, or none if nobody knows them any more."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    ownership: str | None = None
    """The level, where a medium has several."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """By block, what its content depends on beside its tokens: adapter, images, cache salt."""


class BlockRemoved(Event):
    """These blocks are not in a medium any more."""

    block_hashes: list[Hash]
    medium: str | None
    ownership: str | None = None


class AllBlocksCleared(Event):
    """No medium holds anything of what was announced before."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message tells."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
