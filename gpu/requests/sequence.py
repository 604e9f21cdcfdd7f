"""Running sequences: a request's tokens, and the blocks of one pool that hold their KV."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvladder.errors import ConfigError, NotHeld, NotReady
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.finder import PoolMatch
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.pool.retain import Retain
from kvladder.gpu.pool.serving import BlockCopy as BlockCopy
from kvladder.gpu.pool.stats import RequestStats
from kvladder.gpu.tree.names import NO_SLOT, DeviceSlot, Root, Ticket
from kvladder.gpu.tree.names import Extra as Extra
from kvladder.keys import BlockKey, KeyScheme, namespace
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Sequences:
    """State that the running sequences of one pool share. Calls come from the pool's thread.

    Parameters
    ----------
    pool:
        The pool of their blocks.
    scheme:
        Makes the keys; its blocks have the pool's size.
    """

    def __init__(self, pool: BlockPool, scheme: KeyScheme) -> None:
        if scheme.block_tokens != pool.settings.block_tokens:
            raise ConfigError(
                f"keys of {scheme.block_tokens} tokens: expected {pool.settings.block_tokens}",
                path="block.tokens",
            )
        self.pool = pool
        self.finder, self.serving = pool.finder, pool.serving
        self.scheme = self._first = scheme
        self._root = Root(scheme.root())
        """Root of most requests, kept because its key is slow to compute."""
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
        """Return a sequence that has its keys but no blocks yet."""
        if not len(tokens):
            raise ValueError("no tokens: expected 1 or more")
        extra = [(whole(at, "offset"), content) for at, content in extra]
        root, ids = self._root, as_tokens(tokens)
        if salt != "" or lora != "":  # also for values that are no text, to reject them
            root = Root(self.scheme.root(salt=salt, lora=lora), salt, lora)
        prompt = len(ids) if prompt_tokens is None else whole(prompt_tokens, "prompt_tokens")
        if not 0 <= prompt <= len(ids):
            raise ValueError(f"prompt of {prompt} tokens: expected 0 .. {len(ids)}")
        return KVSequence(self, ids, root, retention, extra, prompt, storing=storing)

    def rename(self, mark: str) -> None:
        """Include this mark in blocks' names; an empty one restores the first names.

        Sequences that began before are ``lost``.
        """
        space = self._first.namespace
        if mark:
            space = namespace({"of": space.hex(), "mark": mark})
        self.scheme = KeyScheme(space, block_tokens=self._first.block_tokens)
        self._root = Root(self.scheme.root())

    def arriving(self, sequence: KVSequence) -> list[Ticket]:
        """Return the copies that still write a sequence's blocks; it is told when each ends."""
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
    """Resources that a sequence needs to continue."""

    tokens: array[int]
    shared: list[int]
    """Positions in its table of blocks that it may not write; each is replaced by a fresh slot."""
    taken: list[BlockKey]
    """Blocks that it takes over instead of replacing them."""
    fresh: int
    """Number of slots to allocate."""


class KVSequence:
    """One running sequence. Only ``Requests`` creates it; see there for what the calls do."""

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
        """Epoch of its pool when it began, see ``BlockPool.epoch``."""
        self.tokens = tokens
        """All tokens, including those without KV so far."""
        self.root = root
        self.retention = retention
        self._said: list[int | None] = []
        """Priority that the retention states explicitly for each block of the prompt."""
        if retention is not None:
            self._said = retention.explicit(self.block_tokens, prompt_tokens)
        self.extra = extra
        self.prompt_tokens = prompt_tokens
        self.table: list[DeviceSlot] = []
        """Slot of each block; tokens that wait for ``extend`` have none.

        ``NO_SLOT`` for blocks before ``first``.
        """
        self.first = 0
        """Number of leading blocks that it does not hold, because a window has passed them."""
        self.cached = 0
        """Number of prompt tokens that were served from the cache."""
        self.computed = 0
        """Number of leading tokens that have their KV in the blocks."""
        self.keys = self._scheme.chain(tokens, parent=root.key, extra=extra)
        """Keys of its whole blocks; behind the prompt only those of stored blocks."""
        self.stored = 0
        """Number of leading blocks that others can reuse."""
        self.copies: list[BlockCopy] = []
        """Copies that must be made before the sequence runs."""
        self.waits: set[Ticket] = set()
        """Copies that still write its blocks."""
        self.stats = RequestStats(0, 0)
        self.storing = storing
        """True if its full blocks are offered to others."""
        self._failed = False
        self.closed = False

    def copy(self) -> KVSequence:
        """Return another sequence with the same state. The caller must add the references."""
        other = KVSequence.__new__(KVSequence)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.tokens, other.keys, other.table = self.tokens[:], self.keys[:], self.table[:]
        other.copies, other.waits = [], set()
        return other

    @property
    def held(self) -> list[DeviceSlot]:
        """Slots that it holds, one reference each, in order."""
        return self.table[self.first :] if self.first else self.table

    @property
    def renamed(self) -> bool:
        """True if blocks were renamed since it began."""
        return self._scheme is not self._of.scheme

    @property
    def lost(self) -> bool:
        """True if it can only be released: a block did not arrive, or blocks were renamed."""
        return self._failed or self.renamed

    @property
    def ready(self) -> bool:
        """True if all cached bytes are in place, so that the engine may run it."""
        return not (self.waits or self.copies or self.lost or self.closed)

    def require_open(self) -> None:
        """Raise NotHeld if it was released."""
        if self.closed:
            raise NotHeld("the sequence was released")

    def require_ready(self) -> None:
        """Raise NotHeld if it was released, or NotReady if its bytes are not in place."""
        self.require_open()
        if self.lost:
            why = "block names have changed" if self.renamed else "a block did not arrive"
            raise NotReady(f"{why}: release the sequence and start over")
        if self.waits or self.copies:
            raise NotReady("blocks of the sequence are not in place yet")

    # ---- names of its blocks

    def _name(self, end: int) -> None:
        """Compute the missing keys of the whole blocks before block ``end``."""
        have, size = len(self.keys), self.block_tokens
        if have < end:
            self.keys += self._scheme.chain(
                self.tokens[have * size : end * size],
                parent=self.keys[-1] if have else self.root.key,
                extra=self._extra(have * size, end * size),
            )

    def _tail_key(self, parent: BlockKey) -> BlockKey:
        """Return the key of the computed part of a partly filled block."""
        begin, end = self.computed // self.block_tokens * self.block_tokens, self.computed
        extra = self._extra(begin, end)
        return self._scheme.tail(self.tokens[begin:end], parent=parent, extra=extra)

    def _extra(self, begin: int, end: int) -> Extra:
        """Return the extras at tokens ``[begin, end)``, with offsets from ``begin``."""
        return [(at - begin, content) for at, content in self.extra if begin <= at < end]

    def content(
        self, first: int, end: int, tokens: int | None = None, *, labels: bool = True
    ) -> Content:
        """Return its blocks ``[first, end)``, which must have keys, as content for a pool.

        With ``labels``, it includes the token ids up to that end, or up to token ``tokens``.
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
        """Return the extras of each block, by its position counted from block ``first``."""
        if not self.extra:
            return None
        extras: dict[int, list[tuple[int, bytes]]] = {}
        for offset, content in sorted(self.extra):
            block, within = divmod(offset, self.block_tokens)
            if first <= block <= end:
                extras.setdefault(block - first, []).append((within, content))
        return {position: tuple(held) for position, held in extras.items()}

    def _wanted(self, first: int, end: int, *, cached: bool = False) -> list[Retain | None] | None:
        """Return the retention that it asks for each block ``[first, end)``, or None for none.

        For ``cached`` blocks, only priorities that the retention states explicitly count.
        """
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
        """Return whether each of its first ``blocks`` is on the device or in a tier."""
        return self._pool.present(self.keys[:blocks])

    def fill(self, match: PoolMatch, slots: Sequence[DeviceSlot]) -> None:
        """Begin with the match and slots that were reserved."""
        blocks = -(-len(self.tokens) // self.block_tokens)
        served = self._serving.place(match, slots, blocks, partial(self._wanted, cached=True))
        self.table, self.copies, self.stored, self.cached, self.stats = served
        self.computed = self.cached
        self.first = self.stored - self.stats.reused
        self.wait(self._of.arriving(self))

    def restore(self, match: PoolMatch, given: Sequence[DeviceSlot]) -> None:
        """Use other slots from now on: the matched ones still hold its blocks, others are empty."""
        here = self._of.finder.slots(match)
        self.table = [NO_SLOT] * self.first + [*here, *given]
        self.stored = self.first + len(here)
        self.wait(self._of.arriving(self))  # matched blocks may still be loading for others
        self.storing = self.storing and not self.outdated

    @property
    def outdated(self) -> bool:
        """True if blocks were removed, or the pool was reset, since it began.

        If its bytes then come back from a place that pools do not track, none may be stored:
        removed blocks may be among them.
        """
        return self.epoch != self._pool.epoch

    def stop_storing(self) -> None:
        """Stop offering blocks to others."""
        self.storing = False

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Add copies that still write or read its blocks."""
        self.waits.update(tickets)

    def landed(self, ticket: Ticket, *, ok: bool) -> None:
        """Note that one of these copies has ended; without ``ok`` a block did not arrive."""
        self.waits.discard(ticket)
        self._failed = self._failed or not ok

    def unite(self) -> None:
        """Use the slots of equal blocks that were complete before its own arrived."""
        if not (self.lost or self.closed):
            own = slice(self.first, self.stored)
            self.table[own] = self._serving.united(self.keys[own], self.table[own])

    def settle(self) -> None:
        """Note that no copy touches its blocks any more."""
        self.waits.clear()

    def copied(self) -> None:
        """Note that its copies were made, or are ordered before all of the engine's later work.

        May be called again, and after the sequence was released.
        """
        copies, self.copies = self.copies, []
        for copy in copies:
            self._pool.release([copy.source])
            self._pool.release([copy.target])

    # ---- run

    def growth(self, tokens: Sequence[int], end: int | None = None) -> Growth:
        """Return what ``grow`` will need; changes nothing.

        ``end`` is the number of tokens that need slots; None for all.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        ValueError
            ``tokens`` are not token ids.
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
        """Add the tokens of ``growth``, with the slots that it asked for."""
        for key in growth.taken:
            if self._pool.knows(key):  # taking over an earlier block may have dropped this one
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
        """Store the whole blocks of the first ``computed`` tokens, which are complete.

        ``require_computable`` must have allowed it.
        """
        self.computed = computed
        first, end = self.stored, computed // self.block_tokens
        if end > first and self._stores():
            self._name(end)
            content = self.content(first, end, labels=self._of.finder.labels)
            wanted = self._wanted(first, end)
            slots = self._pool.commit(self.table[first:end], content, retain=wanted)
            if slots is None:  # the block before was removed
                self.storing = False
            else:
                self.table[first:end] = slots
                self.stored = end

    def _stores(self) -> bool:
        return self.storing and self.epoch[0] == self._pool.epoch[0]

    def rewind(self, left: int) -> None:
        """Keep only the first ``left`` tokens; release the blocks that hold none of them."""
        blocks, places = left // self.block_tokens, -(-left // self.block_tokens)
        assert places >= self.first, "expected no released block to be kept"
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
        """Release the blocks before ``first``, which it does not read any more."""
        first = min(first, len(self.table))
        if first > self.first:
            passed = self.table[self.first : first]
            self.table[self.first : first] = [NO_SLOT] * len(passed)
            self.first = first
            self._pool.release(passed)

    def fork(self) -> KVSequence:
        """Return another sequence with the same tokens, which shares all of its blocks."""
        self._pool.retain(self.held)
        return self.copy()

    def release(self, *, store: bool) -> None:
        """End the sequence: its blocks may be evicted, the last first.

        With ``store`` a partly filled last block is committed too. It is not if others hold it,
        partial matches are off, or a known block covers it.
        """
        whole, rest = divmod(self.computed, self.block_tokens)
        partial = self._pool.settings.partial != "off" and rest and self.stored >= whole
        if store and partial and self.ready and self._stores():
            self._name(whole)
            slot, tail = self.table[whole], self.content(whole, whole, self.computed)
            if self._serving.writable(slot) and not self._of.finder.covers(tail):
                tail = Content([self._tail_key(tail.parent)], *tail[1:])
                self._pool.commit([slot], tail, retain=self._wanted(whole, whole + 1))
        self.closed = True
        self._pool.release(self.held)


def packed(tokens: array[int]) -> bytes:
    """Return token ids as 4 big-endian bytes each, so that bytes sort like the ids."""
    words = tokens[:]
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def as_tokens(tokens: Sequence[int]) -> array[int]:
    """Return token ids as an array; raise ValueError unless each is in ``0 .. 2**32 - 1``."""
    if isinstance(tokens, bytes | bytearray):
        hint = "a sequence of integers, such as a list or a NumPy array"
        kind = type(tokens).__name__
        raise ValueError(f"token ids as {kind}: expected {hint}")  # noqa: TRY004 - as all others
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are integers in 0 .. 2**32 - 1: {error}") from None
