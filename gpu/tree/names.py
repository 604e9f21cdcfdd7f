"""Types of the ids on the device side: a node's id cannot be mistaken for a place in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

from kvladder.keys import BlockKey

DeviceSlot = NewType("DeviceSlot", int)
"""A physical place for one block in the engine's KV tensors: ``0 .. blocks - 1``."""

NodeId = NewType("NodeId", int)
"""A block's logical id in the prefix index, wherever its bytes are; never an address."""

Ticket = NewType("Ticket", int)
"""Id of a copy in flight; the code that copies assigns it."""

TOKEN_BYTES = 4
"""Bytes of a stored token id; big-endian, so that token ids sort."""

NO_SLOT = DeviceSlot(-1)
NO_NODE = NodeId(-1)

NOWHERE = NodeId(0)
"""The parent of nodes that have none; its counters mean nothing."""


Extra = Sequence[tuple[int, bytes]]
"""``(token offset, content digest)`` of content other than tokens, see ``KeyScheme.chain``."""


class Root(NamedTuple):
    """The beginning of a prefix: the key that binds salt and LoRA adapter, and their names."""

    key: BlockKey
    salt: str = ""
    lora: str = ""
