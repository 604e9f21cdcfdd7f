"""Names of things on the device side; a logical node can never pass for a place in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

from kvladder.keys import BlockKey

DeviceSlot = NewType("DeviceSlot", int)
"""A physical place for one block in the engine's KV tensors: ``0 .. blocks - 1``."""

NodeId = NewType("NodeId", int)
"""A block's logical id in the prefix index, wherever its bytes are; never an address."""

Ticket = NewType("Ticket", int)
"""Names a copy that is under way; given out by whoever copies."""

TOKEN_BYTES = 4
"""A token id, where it is kept; big-endian, so that they sort."""

NO_SLOT = DeviceSlot(-1)
NO_NODE = NodeId(-1)

NOWHERE = NodeId(0)
"""The parent of what has none; its counters mean nothing."""


Extra = Sequence[tuple[int, bytes]]
"""``(token offset, content digest)`` of what tokens alone do not tell, see ``KeyScheme.chain``."""


class Root(NamedTuple):
    """Where a prefix begins: the key that binds salt and LoRA adapter, and their names."""

    key: BlockKey
    salt: str = ""
    lora: str = ""
