"""Running sequences: the tokens of a request, and the blocks of one pool that hold their KV."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvladder.errors import ConfigError, NotHeld, NotReady
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.pool.retain import Retain
from kvladder.gpu.pool.serving import BlockCopy as BlockCopy
from kvladder.gpu.pool.serving import PoolMatch
from kvladder.gpu.pool.stats import RequestStats
from kvladder.gpu.tree.names import NO_SLOT, DeviceSlot, Root, Ticket
from kvladder.gpu.tree.names import Extra as Extra
from kvladder.keys import BlockKey, KeyScheme, namespace
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Sequences:
    """What the running sequences of one pool share. Calls come from the pool's thread.

    Parameters
    ----------
    pool:
        Whose blocks they use.
    scheme:
        Makes the keys; its blocks have the pool's size.
    """

    def __init__(self, pool: BlockPool, scheme: KeyScheme) -> None:
        if scheme.block_tokens != pool.settings.block_tokens:
            raise ConfigError(
                f"keys of {scheme.block_tokens} tokens for blocks of {pool.settings.block_tokens}",
                path="block.tokens",
            )
        self.pool = pool
        self.serving = pool.serving
        self.scheme = self._first = scheme
        self._root = Root(scheme.root())
        """Of most requests; to make its key takes long."""
        self._waiting: dict[Ticket, list[KVSequence]] = {}
        self.serving.observe(self._landed)

    def make(
        self,
        tokens: Sequence[int],
        retention: Retention | None,
        salt: str,
        lora: str,
        extra: Extra,
        prompt_tokens: int | None,
        *,
        storing: bool,
    ) -> KVSequence:
        """A sequence that has its keys and no blocks yet."""
        if not len(tokens):
            raise ValueError("no tokens: expected 1 or more")
        extra = [(whole(at, "offset"), content) for at, content in extra]
        root, ids = self._root, as_tokens(tokens)
        if salt != "" or lora != "":  # also what is no text, which has no key
            root = Root(self.scheme.root(salt=salt, lora=lora), salt, lora)
        prompt = len(ids) if prompt_tokens is None else whole(prompt_tokens, "prompt_tokens")
        if not 0 <= prompt <= len(ids):
            raise ValueError(f"prompt of {prompt}: expected 0 .. {len(ids)}")
        return KVSequence(self, ids, root, retention, extra, prompt, storing=storing)

    def rename(self, mark: str) -> None:
        """Name blocks by this mark, too; without one, as at first. Sequences of before are lost."""
        space = self._first.namespace
        if mark:
            space = namespace({"of": space.hex(), "mark": mark})
        self.scheme = KeyScheme(space, block_tokens=self._first.block_tokens)
        self._root = Root(self.scheme.root())

    def arriving(self, sequence: KVSequence) -> list[Ticket]:
        """The copies that still write blocks of a sequence, which is told when each is over."""
        sources = (copy.source for copy in sequence.copies)
        tickets = self.serving.arriving(chain(sequence.held, sources))
        for ticket in tickets:
            self._waiting.setdefault(ticket, []).append(sequence)
        return tickets

    def _landed(self, ticket: Ticket, ok: bool) -> None:
        for one in self._waiting.pop(ticket, ()):
            one.landed(ticket, ok=ok)
            one.unite()


class Growth(NamedTuple):
    """What a sequence needs to go on."""

    tokens: array[int]
    shared: list[int]
    """Blocks of its table that it may not write, each of which is replaced by a fresh slot."""
    taken: list[BlockKey]
    """The blocks that it takes over instead."""
    fresh: int
    """Slots to be allocated."""


class KVSequence:
    """One running sequence; ``Requests`` says what each call does, and alone makes it."""

    __slots__ = (
        "_failed", "_of", "_pool", "_said", "_scheme", "_serving", "block_tokens", "cached",
        "closed", "computed", "copies", "epoch", "extra", "first", "keys", "prompt_tokens",
        "retention", "root", "stats", "stored", "storing", "table", "tokens", "waits",
    )  # fmt: skip

    def __init__(
        self,
        of: Sequences,
        tokens: array[int],
        root: Root,
        retention: Retention | None,
        extra: Extra,
        prompt_tokens: int,
        *,
        storing: bool,
    ) -> None:
        self._of, self._pool, self._serving = of, of.pool, of.serving
        self._scheme = of.scheme
        self.block_tokens = of.scheme.block_tokens
        self.epoch = of.pool.epoch
        """Of its pool when it began, see ``BlockPool.epoch``."""
        self.tokens = tokens
        """All tokens, those included whose KV is not there yet."""
        self.root = root
        self.retention = retention
        self._said: list[int | None] = []
        """What the retention names for each block of the prompt."""
        if retention is not None:
            self._said = retention.explicit(self.block_tokens, prompt_tokens)
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
        self.keys = self._scheme.chain(tokens, parent=root.key, extra=extra)
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
        self._failed = False
        self.closed = False

    def copy(self) -> KVSequence:
        """Another sequence with the same state; the caller sees to the references."""
        other = KVSequence.__new__(KVSequence)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.tokens, other.keys, other.table = self.tokens[:], self.keys[:], self.table[:]
        other.copies, other.waits = [], set()
        return other

    @property
    def held(self) -> list[DeviceSlot]:
        """The slots it holds, one reference each, in order."""
        return self.table[self.first :] if self.first else self.table

    @property
    def renamed(self) -> bool:
        """Whether blocks have had other names since it began."""
        return self._scheme is not self._of.scheme

    @property
    def lost(self) -> bool:
        """Whether it can only be released: a block did not arrive, or names have changed."""
        return self._failed or self.renamed

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
            why = "names have changed" if self.renamed else "a block was lost on its way"
            raise NotReady(f"{why}: release the sequence and begin anew")
        if self.waits or self.copies:
            raise NotReady("blocks of the sequence are not in place yet")

    # ---- what its blocks are

    def _name(self, end: int) -> None:
        """Make the keys of those whole blocks before block ``end`` that have none yet."""
        have, size = len(self.keys), self.block_tokens
        if have < end:
            self.keys += self._scheme.chain(
                self.tokens[have * size : end * size],
                parent=self.keys[-1] if have else self.root.key,
                extra=self._extra(have * size, end * size),
            )

    def _tail_key(self, parent: BlockKey) -> BlockKey:
        """Of the block that is cut short, as far as it is computed."""
        begin, end = self.computed // self.block_tokens * self.block_tokens, self.computed
        extra = self._extra(begin, end)
        return self._scheme.tail(self.tokens[begin:end], parent=parent, extra=extra)

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
            self._extras(first, end),
        )

    def _extras(self, first: int, end: int) -> dict[int, Extra] | None:
        """Return the extras of each block by its position from block ``first`` on."""
        if not self.extra:
            return None
        extras: dict[int, list[tuple[int, bytes]]] = {}
        for offset, content in sorted(self.extra):
            block, within = divmod(offset, self.block_tokens)
            if first <= block <= end:
                extras.setdefault(block - first, []).append((within, content))
        return {position: tuple(held) for position, held in extras.items()}

    def _wanted(self, first: int, end: int, *, cached: bool = False) -> list[Retain | None] | None:
        """What it asks for its blocks; of ``cached`` ones only what it says itself."""
        if self.retention is None:
            return None
        asked = self.retention.of_blocks(
            range(first, end), block_tokens=self.block_tokens, prompt_tokens=self.prompt_tokens
        )
        wanted: list[Retain | None] = []
        for block, (priority, duration_s) in enumerate(asked, first):
            if block < len(self._said):
                silent = self._said[block] is None
                silent = silent and (cached or priority == PRIORITY_DEFAULT)
            else:
                silent = priority == PRIORITY_DEFAULT and duration_s is None
            wanted.append(None if silent else Retain(priority, duration_s))
        return wanted

    # ---- get blocks

    def present(self, blocks: int) -> list[bool]:
        """Whether each of its first ``blocks`` is on the device or in a tier."""
        return self._pool.present(self.keys[:blocks])

    def fill(self, match: PoolMatch, slots: Sequence[DeviceSlot]) -> None:
        """Begin with what was reserved for a match."""
        blocks = -(-len(self.tokens) // self.block_tokens)
        served = self._serving.place(match, slots, blocks, partial(self._wanted, cached=True))
        self.table, self.copies, self.stored, self.cached, self.stats = served
        self.computed = self.cached
        self.first = self.stored - self.stats.reused
        self.wait(self._of.arriving(self))

    def restore(self, match: PoolMatch, given: Sequence[DeviceSlot]) -> None:
        """Have other slots from now on: some that still hold its blocks, the rest to be filled."""
        here = self._serving.slots(match)
        self.table = [NO_SLOT] * self.first + [*here, *given]
        self.stored = self.first + len(here)
        self.wait(self._of.arriving(self))  # others may still be bringing theirs
        self.storing = self.storing and not self.outdated

    @property
    def outdated(self) -> bool:
        """Whether blocks were removed, or all of them, since it began.

        If its bytes come back from where no pool knew of them, nothing of it may be stored: what
        was removed may be among it.
        """
        return self.epoch != self._pool.epoch

    def stop_storing(self) -> None:
        """Offer no block to others any more."""
        self.storing = False

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Copies still write its blocks, or read them."""
        self.waits.update(tickets)

    def landed(self, ticket: Ticket, *, ok: bool) -> None:
        """One of these is over; without ``ok`` a block did not arrive."""
        self.waits.discard(ticket)
        self._failed = self._failed or not ok

    def unite(self) -> None:
        """Use the slots of others where theirs were complete before its own arrived."""
        if not (self.lost or self.closed):
            own = slice(self.first, self.stored)
            self.table[own] = self._serving.united(self.keys[own], self.table[own])

    def settle(self) -> None:
        """No copy touches its blocks any more."""
        self.waits.clear()

    def copied(self) -> None:
        """The engine made its copies, or ordered them before all it does from now on.

        May be called again, and after the sequence was released.
        """
        copies, self.copies = self.copies, []
        for copy in copies:
            self._pool.release([copy.source])
            self._pool.release([copy.target])

    # ---- run

    def growth(self, tokens: Sequence[int], end: int | None = None) -> Growth:
        """What ``grow`` will need; changes nothing.

        ``end`` is how many tokens there are to be slots for; None for all.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        ValueError
            What was given are no token ids.
        """
        self.require_ready()
        added = as_tokens(tokens)
        end = None if end is None else whole(end, "end")
        table, size, writable = self.table, self.block_tokens, self._serving.writable
        first = self.computed // size
        shared = [at for at in range(first, len(table)) if not writable(table[at])]
        count = len(self.tokens) + len(added)
        more = max(0, -(-(count if end is None else min(end, count)) // size) - len(table))
        if not shared:
            return Growth(added, [], [], more)
        keys = self._serving.takeable([table[at] for at in shared], more + len(shared))
        taken = [key for key in keys if key is not None]
        shared = [at for at, key in zip(shared, keys, strict=True) if key is None]
        return Growth(added, shared, taken, more + len(shared))

    def grow(self, growth: Growth, slots: list[DeviceSlot]) -> None:
        """Go on with these tokens, in the slots that ``growth`` asked for."""
        for key in growth.taken:
            if self._pool.knows(key):  # to take one over may forget those that follow it
                self._serving.take_over(key, force=True)
        for at in growth.shared:
            old, self.table[at] = self.table[at], slots.pop()
            filled = self.computed - at * self.block_tokens
            if filled > 0:
                self.copies.append(self._serving.copy(old, self.table[at], filled))
            else:
                self._pool.release([old])
        self.table.extend(slots)
        self.tokens.extend(growth.tokens)

    def require_computable(self, computed: int) -> None:
        """Raise as ``Requests.commit`` does."""
        self.require_ready()
        most = min(len(self.tokens), len(self.table) * self.block_tokens)
        if not self.computed <= computed <= most:
            raise ValueError(f"{computed} tokens computed: expected {self.computed} .. {most}")

    def commit(self, computed: int) -> None:
        """The KV of the first ``computed`` tokens is complete, as ``require_computable`` allows."""
        self.computed = computed
        first, end = self.stored, computed // self.block_tokens
        if end > first and self._stores():
            self._name(end)
            content = self.content(first, end, labels=self._serving.labels)
            wanted = self._wanted(first, end)
            slots = self._pool.commit(self.table[first:end], content, retain=wanted)
            if slots is None:  # what comes before was removed
                self.storing = False
            else:
                self.table[first:end] = slots
                self.stored = end

    def _stores(self) -> bool:
        return self.storing and self.epoch[0] == self._pool.epoch[0]

    def rewind(self, left: int) -> None:
        """Keep the first ``left`` tokens; blocks that hold none of them are released."""
        blocks, places = left // self.block_tokens, -(-left // self.block_tokens)
        assert places >= self.first, "a window has passed it"
        surplus = self.table[places:]
        del self.tokens[left:], self.table[places:], self.keys[blocks:]
        self.prompt_tokens = min(self.prompt_tokens, left)
        self._said = self._said[:places]  # forks share the list
        self.computed = min(self.computed, left)
        self.cached = min(self.cached, left)
        self.stored = min(self.stored, blocks)
        self.extra = [(at, content) for at, content in self.extra if at < left]
        self._pool.release(surplus)

    def leave(self, first: int) -> None:
        """It does not read blocks before ``first`` any more; others may."""
        first = min(first, len(self.table))
        if first > self.first:
            passed = self.table[self.first : first]
            self.table[self.first : first] = [NO_SLOT] * len(passed)
            self.first = first
            self._pool.release(passed)

    def fork(self) -> KVSequence:
        """Another sequence with the same tokens, which shares all of its blocks."""
        self._pool.retain(self.held)
        return self.copy()

    def release(self, *, store: bool) -> None:
        """It is over: its blocks may be reused, the last first.

        With ``store`` the block that is cut short is committed too, unless others write it, partial
        matches are off, or a known block covers it.
        """
        whole, rest = divmod(self.computed, self.block_tokens)
        partial = self._pool.settings.partial != "off" and rest and self.stored >= whole
        if store and partial and self.ready and self._stores():
            self._name(whole)
            slot, tail = self.table[whole], self.content(whole, whole, self.computed)
            if self._serving.writable(slot) and not self._serving.covers(tail):
                tail = Content([self._tail_key(tail.parent)], *tail[1:])
                self._pool.commit([slot], tail, retain=self._wanted(whole, whole + 1))
        self.closed = True
        self._pool.release(self.held)


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
