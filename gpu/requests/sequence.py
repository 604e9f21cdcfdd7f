"""Sequences: the tokens of running requests, and the blocks that hold their KV."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvladder.errors import NotHeld, NotReady
from kvladder.gpu.pool.stats import RequestStats
from kvladder.gpu.tree.names import DeviceSlot, Root, Ticket
from kvladder.keys import BlockKey
from kvladder.policy.retention import Retention

Extra = Sequence[tuple[int, bytes]]
"""``(token offset, content digest)`` of what tokens alone do not tell, see ``KeyScheme.chain``."""


class BlockCopy(NamedTuple):
    """Bytes that the engine has to copy before it runs the sequence again.

    Both slots are held until ``Sequences.copied`` is told.
    """

    source: DeviceSlot
    target: DeviceSlot
    tokens: int
    """How many leading tokens of the block; what follows them in the target is not used."""
    after: Ticket | None = None
    """A copy that has to land first, since it brings the source."""


class KVSequence:
    """One running sequence. Made and changed by ``Sequences`` alone; others read it."""

    __slots__ = (
        "cached", "closed", "computed", "copies", "extra", "first", "keys", "lost",
        "prompt_tokens", "purges", "resets", "retention", "root", "said", "stats", "stored",
        "storing", "table", "tokens", "waits",
    )  # fmt: skip

    def __init__(
        self, tokens: array[int], root: Root, *, retention: Retention | None, extra: Extra
    ) -> None:
        self.tokens = tokens
        """All tokens, those included whose KV is not there yet."""
        self.root = root
        self.retention = retention
        self.said: list[int | None] = []
        """What the retention names for each block of the prompt."""
        self.extra = extra
        self.prompt_tokens = len(tokens)
        self.table: list[DeviceSlot] = []
        """The slot of each block, for all tokens but those that wait for ``extend``.

        ``NO_SLOT`` for those before ``first``.
        """
        self.first = 0
        """How many leading blocks it does not hold: a window has passed them."""
        self.cached = 0
        """How many tokens of the prompt were served from the cache."""
        self.computed = 0
        """How many leading tokens have their KV in the blocks."""
        self.keys: list[BlockKey] = []
        """Of its whole blocks; those after the prompt's as far as they were stored."""
        self.stored = 0
        """How many leading blocks can be reused by others."""
        self.copies: list[BlockCopy] = []
        """To be done before the sequence runs."""
        self.waits: set[Ticket] = set()
        """Copies that still write its blocks."""
        self.stats = RequestStats(0, 0)
        self.storing = True
        """Whether its blocks are offered to others when they are full."""
        self.lost = False
        """Whether a block did not arrive: nothing can be done with the sequence but release it."""
        self.closed = False
        self.purges = self.resets = 0
        """How many of them its pool had seen when it began."""

    def copy(self) -> KVSequence:
        """Another sequence with the same state; the caller sees to the references."""
        other = KVSequence(self.tokens[:], self.root, retention=self.retention, extra=self.extra)
        for name in (
            "said", "prompt_tokens", "first", "cached", "computed", "stored", "stats", "storing",
            "purges", "resets",
        ):  # fmt: skip
            setattr(other, name, getattr(self, name))
        other.table, other.keys = self.table[:], self.keys[:]
        return other

    @property
    def held(self) -> list[DeviceSlot]:
        """The slots it holds, one reference each, in order."""
        return self.table[self.first :] if self.first else self.table

    @property
    def ready(self) -> bool:
        """Whether all cached bytes are in place, so that the engine may run it."""
        return not (self.waits or self.copies or self.lost or self.closed)

    def require_open(self) -> None:
        """Raise NotHeld if it was released."""
        if self.closed:
            raise NotHeld("the sequence was released")

    def require_ready(self) -> None:
        """Raise NotHeld if it was released, NotReady if its bytes are not in place."""
        self.require_open()
        if self.lost:
            raise NotReady("a block was lost on its way: release the sequence and begin anew")
        if self.waits or self.copies:
            raise NotReady("blocks of the sequence are not in place yet")


def packed(tokens: array[int]) -> bytes:
    """Token ids as 4 big-endian bytes each, so that their order is that of the ids."""
    words = tokens[:]
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def as_tokens(tokens: Sequence[int]) -> array[int]:
    """Token ids, each checked to be in ``0 .. 2**32 - 1``."""
    if isinstance(tokens, bytes | bytearray):
        hint = "a sequence of integers, such as a list or a NumPy array"
        kind = type(tokens).__name__
        raise ValueError(f"token ids as {kind}: expected {hint}")  # noqa: TRY004 - as all others
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are integers in 0 .. 2**32 - 1: {error}") from None
