"""Types of ids on the device side, so that a logical node is never mistaken for a memory place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

from kvladder.keys import BlockKey

DeviceSlot = NewType("DeviceSlot", int)
"""Physical place for one block in the engine's KV tensors: ``0 .. blocks - 1``."""

NodeId = NewType("NodeId", int)
"""Logical id of a block in the prefix index, wherever its bytes are; never an address."""

Ticket = NewType("Ticket", int)
"""Id of a copy in flight, assigned by the component that copies."""

TOKEN_BYTES = 4
"""Bytes of a stored token id; big-endian, so that ids sort as bytes."""

NO_SLOT = DeviceSlot(-1)
NO_NODE = NodeId(-1)

NOWHERE = NodeId(0)
"""Parent of nodes without one; its counters mean nothing."""


Extra = Sequence[tuple[int, bytes]]
"""``(token offset, content digest)`` of content beyond tokens, see ``KeyScheme.chain``."""


class Root(NamedTuple):
    """Beginning of a prefix: the key that binds salt and LoRA adapter, and their names."""

    key: BlockKey
    salt: str = ""
    lora: str = ""
