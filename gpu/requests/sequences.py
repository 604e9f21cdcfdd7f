"""Make, grow, fork, rewind and release sequences over one block pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvladder.errors import ConfigError
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.pool.serving import Match
from kvladder.gpu.requests.sequence import Extra, KVSequence, as_tokens
from kvladder.gpu.tree.names import DeviceSlot, Root, Ticket
from kvladder.keys import BlockKey, KeyScheme
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Growth(NamedTuple):
    """What a sequence needs to go on."""

    tokens: array[int]
    shared: list[int]
    """Blocks of its table that it may not write, each of which is replaced by a fresh slot."""
    taken: list[BlockKey]
    """The blocks that it takes over instead."""
    fresh: int
    """Slots to be allocated."""


class Sequences:
    """Running sequences over one pool; ``Requests`` says what each call does.

    Calls come from the pool's thread and never wait.

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
        self._serving = pool.serving
        self._tokens = scheme.block_tokens
        self._waiting: dict[Ticket, list[KVSequence]] = {}
        self._serving.observe(self._landed)

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
        root, ids = Root(self.scheme.root(salt=salt, lora=lora), salt, lora), as_tokens(tokens)
        prompt = len(ids) if prompt_tokens is None else whole(prompt_tokens, "prompt_tokens")
        if not 0 <= prompt <= len(ids):
            raise ValueError(f"prompt of {prompt}: expected 0 .. {len(ids)}")
        return KVSequence(
            ids,
            root,
            self._tokens,
            self.pool.epoch,
            self.scheme.chain(ids, parent=root.key, extra=extra),
            retention=retention,
            extra=extra,
            prompt_tokens=prompt,
            storing=storing,
        )

    def fill(self, sequence: KVSequence, match: Match, slots: Sequence[DeviceSlot]) -> None:
        """Put what was reserved for a match into a new sequence."""
        blocks = -(-len(sequence.tokens) // self._tokens)
        wanted = partial(sequence.wanted, cached=True)
        sequence.serve(self._serving.place(match, slots, blocks, wanted))
        self._wait(sequence)

    def restore(self, sequence: KVSequence, match: Match, given: Sequence[DeviceSlot]) -> None:
        """Put what was reserved into a sequence that had its blocks elsewhere."""
        sequence.restore(self._serving.slots(match), given)
        self._wait(sequence)  # others may still be bringing theirs
        if self.outdated(sequence):
            sequence.stop_storing()

    def _wait(self, sequence: KVSequence) -> None:
        """Have a sequence wait for those of its blocks that are still on their way here."""
        sources = (copy.source for copy in sequence.copies)
        tickets = self._serving.arriving(chain(sequence.held, sources))
        for ticket in tickets:
            self._waiting.setdefault(ticket, []).append(sequence)
        sequence.wait(tickets)

    def _landed(self, ticket: Ticket, ok: bool) -> None:
        for one in self._waiting.pop(ticket, ()):
            one.landed(ticket, ok=ok)
            if not (one.lost or one.closed):
                whole = slice(one.first, one.stored)
                one.exchange(one.first, self._serving.united(one.keys[whole], one.table[whole]))

    def copied(self, sequence: KVSequence) -> None:
        """The engine made the sequence's copies, or ordered them before all it does from now on.

        May be called again, and after the sequence was released.
        """
        for copy in sequence.copied():
            self.pool.release([copy.source])
            self.pool.release([copy.target])

    # ---- run

    def growth(self, sequence: KVSequence, tokens: Sequence[int], end: int | None = None) -> Growth:
        """What ``grow`` will need; changes nothing.

        ``end`` is how many tokens there are to be slots for; None for all.

        Raises
        ------
        NotHeld, NotReady
            The sequence was released, or is not ready.
        ValueError
            What was given are no token ids.
        """
        sequence.require_ready()
        added = as_tokens(tokens)
        end = None if end is None else whole(end, "end")
        table, size, writable = sequence.table, self._tokens, self._serving.writable
        first = sequence.computed // size
        shared = [at for at in range(first, len(table)) if not writable(table[at])]
        count = len(sequence.tokens) + len(added)
        more = max(0, -(-(count if end is None else min(end, count)) // size) - len(table))
        keys = self._serving.takeable([table[at] for at in shared], more + len(shared))
        taken = [key for key in keys if key is not None]
        shared = [at for at, key in zip(shared, keys, strict=True) if key is None]
        return Growth(added, shared, taken, more + len(shared))

    def grow(self, sequence: KVSequence, growth: Growth, slots: list[DeviceSlot]) -> None:
        """Append with the slots that ``growth`` asked for."""
        for key in growth.taken:
            if self.pool.knows(key):  # to take one over may forget those that follow it
                self._serving.take_over(key, force=True)
        for at in growth.shared:
            old, new = sequence.table[at], slots.pop()
            sequence.exchange(at, [new])
            filled = sequence.computed - at * self._tokens
            if filled > 0:
                sequence.order(self._serving.copy(old, new, filled))
            else:
                self.pool.release([old])
        sequence.grow(growth.tokens, slots)

    def commit(self, sequence: KVSequence, computed: int) -> None:
        """The KV of the first ``computed`` tokens is complete, as ``computable`` allows."""
        sequence.advance(computed)
        first, end = sequence.stored, computed // self._tokens
        if end > first and self._stores(sequence):
            sequence.name(self.scheme, end)
            content = sequence.content(first, end, labels=self._serving.labels)
            wanted = sequence.wanted(first, end)
            slots = self.pool.commit(sequence.table[first:end], content, retain=wanted)
            if slots is None:  # what comes before was removed
                sequence.stop_storing()
            else:
                sequence.exchange(first, slots)
                sequence.store(end)

    def computable(self, sequence: KVSequence, computed: int) -> None:
        """Raise as ``Requests.commit`` does."""
        sequence.require_ready()
        most = min(len(sequence.tokens), len(sequence.table) * self._tokens)
        if not sequence.computed <= computed <= most:
            raise ValueError(f"{computed} tokens computed: expected {sequence.computed} .. {most}")

    def _stores(self, sequence: KVSequence) -> bool:
        return sequence.storing and sequence.epoch[0] == self.pool.epoch[0]

    def outdated(self, sequence: KVSequence) -> bool:
        """Whether blocks were removed, or all of them, since the sequence began.

        If its bytes come back from where no pool knew of them, nothing of it may be stored: what
        was removed may be among it.
        """
        return sequence.epoch != self.pool.epoch

    def rewind(self, sequence: KVSequence, left: int) -> None:
        """Keep the first ``left`` tokens; blocks that hold none of them are released."""
        self.pool.release(sequence.rewind(left))

    def leave(self, sequence: KVSequence, first: int) -> None:
        """The sequence does not read blocks before ``first`` any more; others may."""
        if first > sequence.first:
            self.pool.release(sequence.leave(first))

    def fork(self, sequence: KVSequence) -> KVSequence:
        """Another sequence with the same tokens, which shares all of its blocks."""
        self.pool.retain(sequence.held)
        return sequence.copy()

    def release(self, sequence: KVSequence, *, store: bool) -> None:
        """The sequence is over: its blocks may be reused, the last first.

        With ``store`` the block that is cut short is committed too, unless others write it, partial
        matches are off, or a known block covers it.
        """
        whole, rest = divmod(sequence.computed, self._tokens)
        partial = self.pool.settings.partial != "off" and rest and sequence.stored >= whole
        if store and partial and sequence.ready and self._stores(sequence):
            sequence.name(self.scheme, whole)
            slot, tail = sequence.table[whole], sequence.tail(self.scheme)
            if self._serving.writable(slot) and not self._serving.covers(tail):
                self.pool.commit([slot], tail, retain=sequence.wanted(whole, whole + 1))
        sequence.close()
        self.pool.release(sequence.held)
