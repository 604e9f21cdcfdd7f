"""A sequence: the tokens of a running request, and the blocks of one pool that hold their KV."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from kvladder.errors import NotHeld, NotReady
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.retain import Retain
from kvladder.gpu.pool.serving import BlockCopy as BlockCopy
from kvladder.gpu.pool.serving import Served
from kvladder.gpu.pool.stats import RequestStats
from kvladder.gpu.tree.names import NO_SLOT, DeviceSlot, Root, Ticket
from kvladder.keys import BlockKey, KeyScheme
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.retention import Retention

Extra = Sequence[tuple[int, bytes]]
"""``(token offset, content digest)`` of what tokens alone do not tell, see ``KeyScheme.chain``."""


class KVSequence:
    """One running sequence. ``Sequences`` alone calls what changes it; others read it."""

    __slots__ = (
        "block_tokens", "cached", "closed", "computed", "copies", "epoch", "extra", "first", "keys",
        "lost", "prompt_tokens", "retention", "root", "said", "stats", "stored", "storing", "table",
        "tokens", "waits",
    )  # fmt: skip

    def __init__(
        self,
        tokens: array[int],
        root: Root,
        block_tokens: int,
        epoch: tuple[int, int],
        keys: list[BlockKey],
        *,
        retention: Retention | None,
        extra: Extra,
        prompt_tokens: int,
        storing: bool,
    ) -> None:
        self.tokens = tokens
        """All tokens, those included whose KV is not there yet."""
        self.root = root
        self.block_tokens = block_tokens
        self.epoch = epoch
        """Of its pool when it began, see ``BlockPool.epoch``."""
        self.retention = retention
        self.said: list[int | None] = []
        """What the retention names for each block of the prompt."""
        if retention is not None:
            self.said = retention.explicit(block_tokens, prompt_tokens)
        self.extra = extra
        self.prompt_tokens = prompt_tokens
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
        self.keys = keys
        """Of its whole blocks; those after the prompt's as far as they were stored."""
        self.stored = 0
        """How many leading blocks can be reused by others."""
        self.copies: list[BlockCopy] = []
        """To be done before the sequence runs."""
        self.waits: set[Ticket] = set()
        """Copies that still write its blocks."""
        self.stats = RequestStats(0, 0)
        self.storing = storing
        """Whether its blocks are offered to others when they are full."""
        self.lost = False
        """Whether a block did not arrive: nothing can be done with the sequence but release it."""
        self.closed = False

    def copy(self) -> KVSequence:
        """Another sequence with the same state; the caller sees to the references."""
        other = KVSequence(
            self.tokens[:],
            self.root,
            self.block_tokens,
            self.epoch,
            self.keys[:],
            retention=None,
            extra=self.extra,
            prompt_tokens=self.prompt_tokens,
            storing=self.storing,
        )
        for name in ("retention", "said", "first", "cached", "computed", "stored", "stats"):
            setattr(other, name, getattr(self, name))
        other.table = self.table[:]
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

    # ---- what its blocks are

    def name(self, scheme: KeyScheme, end: int) -> None:
        """Make the keys of those whole blocks before block ``end`` that have none yet."""
        have, size = len(self.keys), self.block_tokens
        if have < end:
            self.keys += scheme.chain(
                self.tokens[have * size : end * size],
                parent=self.keys[-1] if have else self.root.key,
                extra=self._extra(have * size, end * size),
            )

    def tail(self, scheme: KeyScheme) -> Content:
        """The block that is cut short, as far as it is computed; those before it have keys."""
        at, end = self.computed // self.block_tokens, self.computed
        begin, parent = at * self.block_tokens, self.keys[at - 1] if at else self.root.key
        tokens, extra = self.tokens[begin:end], self._extra(begin, end)
        key = scheme.tail(tokens, parent=parent, extra=extra)
        return Content([key], self.root, parent, packed(tokens), self._limits(at, at))

    def _extra(self, begin: int, end: int) -> Extra:
        """What there is at tokens ``[begin, end)``, counted from ``begin``."""
        return [(at - begin, content) for at, content in self.extra if begin <= at < end]

    def content(
        self, first: int, end: int, tokens: int | None = None, *, labels: bool = True
    ) -> Content:
        """Its blocks from ``first`` up to ``end``, which have keys, for a pool.

        With the token ids up to that end or token ``tokens``, unless no ``labels`` are wanted.
        """
        size = self.block_tokens
        until = end * size if tokens is None else tokens
        return Content(
            self.keys[first:end],
            self.root,
            self.keys[first - 1] if first else self.root.key,
            packed(self.tokens[first * size : until]) if labels else b"",
            self._limits(first, end),
        )

    def _limits(self, first: int, end: int) -> dict[int, int] | None:
        """By position from block ``first`` on, how many tokens come before the first extra."""
        if not self.extra:
            return None
        limits: dict[int, int] = {}
        for offset, _ in sorted(self.extra):
            block, within = divmod(offset, self.block_tokens)
            if first <= block <= end:
                limits.setdefault(block - first, within)
        return limits

    def wanted(self, first: int, end: int, *, cached: bool = False) -> list[Retain | None] | None:
        """What it asks for its blocks; of ``cached`` ones only what it says itself."""
        if self.retention is None:
            return None
        asked = self.retention.of_blocks(
            range(first, end), block_tokens=self.block_tokens, prompt_tokens=self.prompt_tokens
        )
        wanted: list[Retain | None] = []
        for block, (priority, duration_s) in enumerate(asked, first):
            if block < len(self.said):
                silent = self.said[block] is None
                silent = silent and (cached or priority == PRIORITY_DEFAULT)
            else:
                silent = priority == PRIORITY_DEFAULT and duration_s is None
            wanted.append(None if silent else Retain(priority, duration_s))
        return wanted

    # ---- what becomes of it

    def serve(self, served: Served) -> None:
        """Begin with what was cached, and the slots for the rest."""
        self.table, self.copies, self.stored, self.cached, self.stats = served
        self.computed = self.cached
        self.first = self.stored - self.stats.reused

    def restore(self, here: Sequence[DeviceSlot], given: Sequence[DeviceSlot]) -> None:
        """Have other slots from now on: some that still hold its blocks, the rest to be filled."""
        self.table = [NO_SLOT] * self.first + [*here, *given]
        self.stored = self.first + len(here)

    def grow(self, tokens: array[int], slots: Iterable[DeviceSlot]) -> None:
        """Go on with these tokens, in slots behind the others."""
        self.table.extend(slots)
        self.tokens.extend(tokens)

    def exchange(self, first: int, slots: Sequence[DeviceSlot]) -> None:
        """Have its blocks from ``first`` on in these slots."""
        self.table[first : first + len(slots)] = slots

    def advance(self, computed: int) -> None:
        """So many leading tokens are computed."""
        self.computed = computed

    def store(self, end: int) -> None:
        """Blocks up to ``end`` can be reused by others."""
        self.stored = end

    def stop_storing(self) -> None:
        """Offer no block to others any more."""
        self.storing = False

    def rewind(self, left: int) -> list[DeviceSlot]:
        """Keep the first ``left`` tokens; the slots that hold none of them."""
        blocks, places = left // self.block_tokens, -(-left // self.block_tokens)
        assert places >= self.first, "a window has passed it"
        surplus = self.table[places:]
        del self.tokens[left:], self.table[places:], self.keys[blocks:]
        self.prompt_tokens = min(self.prompt_tokens, left)
        self.said = self.said[:places]  # forks share the list
        self.computed = min(self.computed, left)
        self.cached = min(self.cached, left)
        self.stored = min(self.stored, blocks)
        self.extra = [(at, content) for at, content in self.extra if at < left]
        return surplus

    def leave(self, first: int) -> list[DeviceSlot]:
        """Hold no blocks before ``first`` any more; their slots."""
        first = max(self.first, min(first, len(self.table)))
        passed = self.table[self.first : first]
        self.table[self.first : first] = [NO_SLOT] * len(passed)
        self.first = first
        return passed

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Copies still write its blocks, or read them."""
        self.waits.update(tickets)

    def landed(self, ticket: Ticket, *, ok: bool) -> None:
        """One of these is over; without ``ok`` a block did not arrive."""
        self.waits.discard(ticket)
        self.lost = self.lost or not ok

    def settle(self) -> None:
        """No copy touches its blocks any more."""
        self.waits.clear()

    def order(self, copy: BlockCopy) -> None:
        """Have the engine copy before it runs on."""
        self.copies.append(copy)

    def copied(self) -> list[BlockCopy]:
        """Its copies, which the engine has made."""
        copies, self.copies = self.copies, []
        return copies

    def close(self) -> None:
        """It was released."""
        self.closed = True


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
