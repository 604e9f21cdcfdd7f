"""KV events in the wire format of vLLM and SGLang: MessagePack, each event a map.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a batch
``[seconds since the epoch, [events], rank]``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

Hash = bytes | int
END: Final = (-1).to_bytes(8, signed=True)
"""The sequence number of the message that ends a replay."""
TOO_OFTEN: Final = b"refused: this address asks too often"
"""In place of a topic in that message: nothing was replayed, and later it may be."""


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of the events. On the wire each is a map, and ``type`` is its class's name."""


class BlockStored(Event):
    """These blocks are now in a medium."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    """Hash of the block before the first one; None if it begins a prompt, or is not known."""
    token_ids: list[int]
    """Tokens of all these blocks; empty if they are not known."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    ownership: str | None = None
    """Name of the level; None for the device's and the host's."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Further inputs of each block's content besides its tokens: adapter, images, cache salt."""


class BlockRemoved(Event):
    """These blocks are no longer in a medium."""

    block_hashes: list[Hash]
    medium: str | None
    ownership: str | None = None


class AllBlocksCleared(Event):
    """No medium holds any block announced before."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
