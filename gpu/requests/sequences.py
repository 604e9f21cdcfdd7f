"""Begin, grow, fork, rewind and release sequences over one block pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvladder.errors import ConfigError
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.requests.prefixes import Found, Prefixes
from kvladder.gpu.requests.sequence import Extra, KVSequence, as_tokens, packed
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, TOKEN_BYTES, DeviceSlot, Root, Ticket
from kvladder.keys import BlockKey, KeyScheme
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Growth(NamedTuple):
    """What a sequence needs to go on."""

    tokens: array[int]
    shared: list[int]
    """Blocks of its table that it may not write, each of which is replaced by a fresh slot."""
    taken: BlockKey | None
    """The block that it takes over instead."""
    fresh: int
    """Slots to be allocated."""


class Sequences:
    """Running sequences over one pool.

    An engine begins a sequence with its prompt, computes what was not cached, says so by
    ``commit``, appends what it generates, and releases the sequence. Calls come from the pool's
    thread and never wait.

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
        self.scheme = scheme
        self._tokens = scheme.block_tokens
        self._waiting: dict[Ticket, list[KVSequence]] = {}
        self.prefixes = Prefixes(pool)
        self._labels = pool.ledger.index.labels
        pool.moves.observers.append(self._landed)

    # ---- begin

    def begin(
        self,
        tokens: Sequence[int],
        *,
        retention: Retention | None = None,
        salt: str = "",
        lora: str = "",
        extra: Extra = (),
        cached_max: int | None = None,
        room: int | None = None,
        prompt_tokens: int | None = None,
    ) -> KVSequence:
        """A sequence for this prompt, with slots for all of it and the cached prefix in place.

        The caller owns it until ``release``. At most all tokens but the last are served, since
        the logits of that one are needed; ``cached_max`` bounds them further.

        Parameters
        ----------
        tokens:
            The prompt, 1 token or more.
        retention:
            Priorities of its blocks. What it says of cached blocks replaces what they had.
        salt, lora, extra:
            What tells its content from that of others with the same tokens.
        room:
            Slots for so many tokens behind the cached ones; None for all. ``extend`` gets more.
        prompt_tokens:
            How many of the tokens are the prompt; the others were generated. None for all.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            There is no room, or not yet; nothing is held.
        ValueError
            There are no tokens, or an argument is out of its range; nothing was changed.
        """
        sequence = self.make(tokens, retention, salt, lora, extra, prompt_tokens)
        count, size = len(sequence.tokens), self._tokens
        limit, room = limits(count, cached_max, room)
        found = self.prefixes.find(sequence, limit)
        end = min(count, found.tokens(size) + room)
        found = self.prefixes.fitting(found, -(-end // size))
        hold = self.prefixes.hold(found, -(-end // size))
        self.fill(sequence, found, self.pool.reserve.settle(hold))
        return sequence

    def fill(self, sequence: KVSequence, found: Found, slots: Sequence[DeviceSlot]) -> None:
        """Put what ``Prefixes.hold`` held and its settlement gave into a new sequence."""
        self.prefixes.fill(sequence, found, slots)
        self.wait_for(sequence)

    def make(
        self,
        tokens: Sequence[int],
        retention: Retention | None,
        salt: str,
        lora: str,
        extra: Extra,
        prompt_tokens: int | None,
    ) -> KVSequence:
        """A sequence that has its keys and no blocks yet."""
        if not len(tokens):
            raise ValueError("no tokens: expected 1 or more")
        extra = [(whole(at, "offset"), content) for at, content in extra]
        root = Root(self.scheme.root(salt=salt, lora=lora), salt, lora)
        sequence = KVSequence(as_tokens(tokens), root, retention=retention, extra=extra)
        sequence.keys = self.scheme.chain(sequence.tokens, parent=root.key, extra=extra)
        if prompt_tokens is not None:
            prompt_tokens = whole(prompt_tokens, "prompt_tokens")
            if not 0 <= prompt_tokens <= len(sequence.tokens):
                raise ValueError(f"prompt of {prompt_tokens}: expected 0 .. {len(sequence.tokens)}")
            sequence.prompt_tokens = prompt_tokens
        if retention is not None:
            sequence.said = retention.explicit(self._tokens, sequence.prompt_tokens)
        sequence.resets, sequence.purges = self.pool.resets, self.pool.moves.purges
        return sequence

    def wait_for(self, sequence: KVSequence) -> None:
        """Have a sequence wait for those of its blocks that are still on their way here."""
        arriving = self.pool.moves.arriving
        sources = (copy.source for copy in sequence.copies)
        for slot in (*sequence.held, *sources) if arriving else ():
            ticket = arriving.get(slot)
            if ticket is not None and ticket not in sequence.waits:
                sequence.waits.add(ticket)
                self._waiting.setdefault(ticket, []).append(sequence)

    def _landed(self, ticket: Ticket, ok: bool) -> None:
        for sequence in self._waiting.pop(ticket, ()):
            sequence.waits.discard(ticket)
            sequence.lost = sequence.lost or not ok
            if self.pool.moves.supplanted and not (sequence.lost or sequence.closed):
                self._share(sequence)

    def _share(self, sequence: KVSequence) -> None:
        """Have blocks that were complete elsewhere before they arrived on the device once only."""
        pool, table = self.pool, sequence.table
        for at in range(sequence.first, sequence.stored):
            if table[at] in pool.moves.supplanted:
                found = pool.ledger.index.match(sequence.keys[at : at + 1])
                if found and pool.ledger.nodes.slot[found[0]] not in pool.moves.arriving:
                    table[at] = pool.committer.share(found[0], table[at])

    def copied(self, sequence: KVSequence) -> None:
        """The engine made the sequence's copies, or ordered them before all it does from now on.

        May be called again, and after the sequence was released.
        """
        copies, sequence.copies = sequence.copies, []
        for copy in copies:
            self.pool.release([copy.source])
            self.pool.release([copy.target])

    # ---- run

    def append(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """The sequence goes on with ``tokens``: there are slots to write their KV to.

        What others share or may reuse is not written: the block that is cut short becomes one of
        the sequence's own first, with a copy to be made of what is in it.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        OutOfBlocks, BlocksBusy
            There is no room, or not yet; nothing was changed.
        """
        growth = self.growth(sequence, tokens)
        self.grow(sequence, growth, self.pool.allocate(growth.fresh))

    def extend(self, sequence: KVSequence, end: int) -> None:
        """See to it that there are slots for the first ``end`` tokens; raises like ``append``."""
        growth = self.growth(sequence, (), end)
        self.grow(sequence, growth, self.pool.allocate(growth.fresh))

    def growth(self, sequence: KVSequence, tokens: Sequence[int], end: int | None = None) -> Growth:
        """What ``append`` will need; changes nothing, and raises as it does.

        ``end`` is how many tokens there are to be slots for; None for all.
        """
        sequence.require_ready()
        added = as_tokens(tokens)
        end = None if end is None else whole(end, "end")
        table, size = sequence.table, self._tokens
        first = sequence.computed // size
        shared = [at for at in range(first, len(table)) if not self._own(table[at])]
        count = len(sequence.tokens) + len(added)
        more = max(0, -(-(count if end is None else min(end, count)) // size) - len(table))
        taken = None
        if len(shared) == 1:
            fits = self.pool.reserve.fits((), more + 1)
            taken = self._takeable(table[shared[0]], fits=fits)
        if taken is not None:
            shared = []
        return Growth(added, shared, taken, more + len(shared))

    def grow(self, sequence: KVSequence, growth: Growth, slots: list[DeviceSlot]) -> None:
        """Append with the slots that ``growth`` asked for."""
        table, size = sequence.table, self._tokens
        if growth.taken is not None and growth.taken in self.pool.ledger.index:
            self.pool.take_over(growth.taken, force=True)
        for at in growth.shared:
            old, table[at] = table[at], slots.pop()
            filled = sequence.computed - at * size
            if filled > 0:
                self.prefixes.copy(sequence, old, table[at], filled)
            else:
                self.pool.release([old])
        table.extend(slots)
        sequence.tokens.extend(growth.tokens)

    def _own(self, slot: DeviceSlot) -> bool:
        """Whether a held slot may be written: nobody else holds or finds it."""
        ledger = self.pool.ledger
        return ledger.refs[slot] == 1 and ledger.index.node_at[slot] == NO_NODE

    def _takeable(self, slot: DeviceSlot, *, fits: bool) -> BlockKey | None:
        """The key of the block in ``slot`` if whoever holds it is to take it over.

        Where a copy ``fits`` others keep a block that is to be copied, or that others follow.
        """
        ledger = self.pool.ledger
        node = ledger.index.node_at[slot]
        if node == NO_NODE or ledger.refs[slot] > 1:
            return None
        copied = self.pool.settings.partial == "copy" or ledger.index.has_children(node)
        return None if copied and fits else ledger.nodes.key[node]

    def commit(self, sequence: KVSequence, computed: int) -> None:
        """The KV of the first ``computed`` tokens is complete: whole blocks can be reused by all.

        Slots of the table change where others have the same content already, see
        ``BlockPool.commit``.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        ValueError
            ``computed`` is less than before, or more than there are tokens or slots for; nothing
            was changed.
        """
        computed = self.computable(sequence, computed)
        sequence.computed = computed
        first, end = sequence.stored, computed // self._tokens
        if end > first and self._stores(sequence):
            self._extend_keys(sequence, end)
            self._store(sequence, first, end)

    def computable(self, sequence: KVSequence, computed: int) -> int:
        """``computed`` as an int, if ``commit`` does not raise."""
        sequence.require_ready()
        computed = whole(computed, "computed")
        most = min(len(sequence.tokens), len(sequence.table) * self._tokens)
        if not sequence.computed <= computed <= most:
            raise ValueError(f"{computed} tokens computed: expected {sequence.computed} .. {most}")
        return computed

    def _stores(self, sequence: KVSequence) -> bool:
        return sequence.storing and sequence.resets == self.pool.resets

    def outdated(self, sequence: KVSequence) -> bool:
        """Whether blocks were removed, or all of them, since the sequence began.

        If its bytes come back from where no pool knew of them, nothing of it may be stored: what
        was removed may be among it.
        """
        pool = self.pool
        return (sequence.resets, sequence.purges) != (pool.resets, pool.moves.purges)

    def _extend_keys(self, sequence: KVSequence, end: int) -> None:
        """Name the whole blocks before ``end`` that have no key yet."""
        have, size = len(sequence.keys), self._tokens
        if have < end:
            begin = have * size
            sequence.keys += self.scheme.chain(
                sequence.tokens[begin : end * size],
                parent=sequence.keys[-1] if have else sequence.root.key,
                extra=_shifted(sequence.extra, begin, end * size),
            )

    def _store(self, sequence: KVSequence, first: int, end: int) -> None:
        """Commit the whole blocks from ``first`` to ``end``."""
        size = self._tokens
        content = Content(
            sequence.keys[first:end],
            sequence.root,
            sequence.keys[first - 1] if first else sequence.root.key,
            packed(sequence.tokens[first * size : end * size]) if self._labels else b"",
            self.prefixes.limits(sequence.extra, first, end),
        )
        wanted = self.prefixes.wanted(sequence, first, end)
        slots = self.pool.committer.commit(sequence.table[first:end], content, wanted)
        if slots is None:  # what comes before was removed
            sequence.storing = False
        else:
            sequence.table[first:end] = slots
            sequence.stored = end

    def rewind(self, sequence: KVSequence, count: int) -> None:
        """Take the last ``count`` tokens back; blocks that hold none of the others are released.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        ValueError
            There are not that many; nothing was changed.
        """
        sequence.require_ready()
        count = whole(count, "count")
        left = len(sequence.tokens) - count
        if count < 0 or left < 0:
            raise ValueError(f"{count} tokens: expected 0 .. {len(sequence.tokens)}")
        del sequence.tokens[left:]
        blocks = left // self._tokens
        assert -(-left // self._tokens) >= sequence.first, "a window has passed it"
        surplus = sequence.table[-(-left // self._tokens) :]
        del sequence.table[-(-left // self._tokens) :], sequence.keys[blocks:]
        self.pool.release(surplus)
        sequence.prompt_tokens = min(sequence.prompt_tokens, left)
        sequence.said = sequence.said[: -(-left // self._tokens)]  # forks share the list
        sequence.computed = min(sequence.computed, left)
        sequence.cached = min(sequence.cached, left)
        sequence.stored = min(sequence.stored, blocks)
        sequence.extra = [(at, content) for at, content in sequence.extra if at < left]

    def leave(self, sequence: KVSequence, first: int) -> None:
        """The sequence does not read blocks before ``first`` any more; others may."""
        table, end = sequence.table, min(first, len(sequence.table))
        if end > sequence.first:
            self.pool.release(table[sequence.first : end])
            table[sequence.first : end] = [NO_SLOT] * (end - sequence.first)
            sequence.first = end

    def fork(self, sequence: KVSequence, count: int) -> list[KVSequence]:
        """``count`` more sequences with the same tokens, which share all of its blocks.

        The caller owns each. Whoever first appends to a block that is cut short gets one of its
        own, the last to do so keeps the shared one.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        """
        sequence.require_ready()
        count = whole(count, "forks")
        if count < 0:
            raise ValueError(f"{count} forks: expected 0 or more")
        forks: list[KVSequence] = []
        for _ in range(count):
            self.pool.retain(sequence.held)
            forks.append(sequence.copy())
        return forks

    def release(self, sequence: KVSequence, *, store: bool = True) -> None:
        """The sequence is over: its blocks may be reused, the last first.

        With ``store`` the block that is cut short is kept for others too, as far as it is
        computed, unless partial matches are off. Copies that were not reported stay under way.

        Raises
        ------
        NotHeld
            It was released before.
        """
        sequence.require_open()
        if store and sequence.ready and self._stores(sequence):
            self._store_tail(sequence)
        sequence.closed = True
        self.pool.release(sequence.held)

    def _store_tail(self, sequence: KVSequence) -> None:
        """Commit the block that is cut short, unless others write it or something covers it."""
        pool, size = self.pool, self._tokens
        whole, count = divmod(sequence.computed, size)
        if pool.settings.partial == "off" or not count or sequence.stored < whole:
            return
        slot = sequence.table[whole]
        self._extend_keys(sequence, whole)
        parent = sequence.keys[whole - 1] if whole else sequence.root.key
        above = pool.ledger.index.above(parent, sequence.root)
        begin = whole * size
        tokens = sequence.tokens[begin : begin + count]
        limits = self.prefixes.limits(sequence.extra, whole, whole + 1)
        useful = count if limits is None else min(count, limits[0])
        if above is None or not useful or not self._own(slot):
            return
        words = packed(tokens)
        for _, _, covered in pool.ledger.index.partial(above, words[: useful * TOKEN_BYTES]):
            if covered >= useful:
                return
        key = self.scheme.tail(
            tokens, parent=parent, extra=_shifted(sequence.extra, begin, begin + count)
        )
        content = Content([key], sequence.root, parent, words, limits)
        pool.commit([slot], content, retain=self.prefixes.wanted(sequence, whole, whole + 1))


def limits(count: int, cached_max: int | None, room: int | None) -> tuple[int, int]:
    """How many of ``count`` tokens may be served, and for how many behind them there is room."""
    most = count - 1 if cached_max is None else min(count - 1, whole(cached_max, "cached_max"))
    return max(0, most), count if room is None else max(1, whole(room, "room"))


def _shifted(extra: Extra, begin: int, end: int) -> Extra:
    """Those of ``extra`` at tokens ``[begin, end)``, counted from ``begin``."""
    return [(at - begin, content) for at, content in extra if begin <= at < end]
