"""A small engine over a block pool with checkable KV, and a small tier below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from typing import Any

from kvladder.gpu.pool.below import BlockBelow, Taken, Victim
from kvladder.gpu.pool.events import (
    Created,
    PoolEvent,
    PoolEvents,
    PoolRemoved,
    PoolStored,
    Updated,
)
from kvladder.gpu.pool.pool import BlockPool, Partial, PoolSettings
from kvladder.gpu.requests.requests import Request, Requests
from kvladder.gpu.requests.sequence import Extra, KVSequence, Sequences
from kvladder.gpu.sizing.groups import Group
from kvladder.gpu.tree.names import DeviceSlot, Ticket
from kvladder.keys import BlockKey, KeyScheme, namespace
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention

Kv = bytes | None
"""The KV that a model would compute for one token: it depends on all earlier tokens."""


Indexed = dict[BlockKey, tuple[BlockKey | None, str, int]]


def replay(events: list[PoolEvent], index: Indexed) -> None:
    """Apply events to ``{key: (parent, level, priority)}``."""
    for event in events:
        if isinstance(event, PoolStored):
            parent = event.parent
            for block in event.blocks:
                assert block.key not in index
                index[block.key] = (parent, event.level, block.priority)
                parent = block.key
        elif isinstance(event, PoolRemoved):
            del index[event.key]
        elif isinstance(event, Updated):
            parent, level, priority = index[event.key]
            if event.level is not None:
                assert event.level[0] == level
                level = event.level[1]
            if event.priority is not None:
                assert event.priority[0] == priority
                priority = event.priority[1]
            index[event.key] = (parent, level, priority)
        else:
            assert isinstance(event, Created)


def priority_of(pool: BlockPool, key: BlockKey) -> int | None:
    """The priority that a known block has now, or None."""
    pool._retainer.expire()
    node = pool._ledger.index.find(key)
    return None if node is None else pool._ledger.nodes.priority[node]


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Device:
    """KV of each token of each slot; None where nothing was written."""

    def __init__(self, slots: int, block_tokens: int) -> None:
        self.kv: list[list[Kv]] = [[None] * block_tokens for _ in range(slots)]


@dataclass(eq=False)
class Kept:
    """A block in the host level."""

    slot: int
    kv: list[Kv]
    priority: int
    stamp: int
    until_s: float = inf
    claims: int = 0
    retaken: bool = False
    """Whether it came back during its onboarding."""
    flying: bool = False
    salt: str = ""


@dataclass
class Host:
    """The stand-in for the tiers: some host slots; the least valuable block is evicted first.

    Copies are done at once, or with ``delayed`` when ``complete`` is called. Unless ``inclusive``
    an onboarded block leaves host. ``report`` informs the pool of removed blocks.
    """

    device: Device
    slots: int = 4
    rule: OffloadRule = field(default_factory=lambda: OffloadRule(min_priority=35))
    delayed: bool = False
    inclusive: bool = False
    name: str = "host"

    def __post_init__(self) -> None:
        self.pool: BlockPool | None = None
        self.blocks: dict[BlockKey, Kept] = {}
        self.free = list(range(self.slots))
        self.claimed: dict[BlockKey, list[Kept]] = {}
        """Blocks to be onboarded or disclaimed; they may have been removed since."""
        self.written: list[Kept] = []
        """Blocks still being copied here; they may have been removed since."""
        self.flights: dict[Ticket, Callable[[bool], None]] = {}
        self.offered: list[Victim] = []
        self.copied: list[Victim] = []
        """The offered blocks that were copied here."""
        self.brought: list[BlockKey] = []
        self.gone: list[BlockKey] = []
        """Removed blocks not yet reported to the pool."""
        self._stamp = 0
        self._tickets = 0

    @property
    def capacities(self) -> Mapping[str, int]:
        return {self.name: self.slots}

    def _ticket(self, work: Callable[[bool], None]) -> Ticket:
        self._tickets += 1
        self.flights[Ticket(self._tickets)] = work
        return Ticket(self._tickets)

    def complete(self, ticket: Ticket, *, ok: bool = True) -> None:
        """Complete a copy, or let it fail, and inform the pool."""
        assert self.pool is not None
        self.flights.pop(ticket)(ok)
        self.pool.landed(ticket, ok=ok)
        self.report()

    def report(self) -> None:
        """Report removed blocks to the pool."""
        assert self.pool is not None
        gone, self.gone = self.gone, []
        self.pool.forgotten([key for key in gone if key not in self.blocks])

    def _room(self, priority: int, stamp: int) -> int | None:
        """A slot, if need be that of a less valuable block."""
        if self.free:
            return self.free.pop(0)
        loose = {
            key: (held.priority, held.stamp)
            for key, held in self.blocks.items()
            if not held.claims and not held.flying
        }
        if not loose or min(loose.values()) > (priority, stamp):
            return None
        key = min(loose, key=loose.__getitem__)
        self.gone.append(key)
        return self.blocks.pop(key).slot

    def offload(self, group: int, victims: Sequence[Victim]) -> Sequence[Taken | None]:
        self._stamp += len(victims)
        self.offered += victims
        return [self._take(victim, self._stamp - at) for at, victim in enumerate(victims)]

    def _take(self, victim: Victim, stamp: int) -> Taken | None:
        kept = self.blocks.get(victim.key)
        if not self.rule.admits(victim.floor, victim.hits):
            self._forget(victim.key)
            return None
        if kept is not None:
            kept.retaken = True
            kept.priority, kept.until_s, kept.stamp = victim.priority, victim.until_s, stamp
            return Taken()
        slot = self._room(victim.priority, stamp)
        if slot is None:
            return None
        kept = Kept(slot, [], victim.priority, stamp, victim.until_s, salt=victim.salt)
        kept.flying = self.delayed
        self.blocks[victim.key] = kept
        self.copied.append(victim)

        def copy(ok: bool) -> None:
            kept.flying = False
            kept.kv = list(self.device.kv[victim.slot])
            if self.blocks.get(victim.key) is not kept:
                self.free.append(kept.slot)
            elif not ok:
                self._forget(victim.key)
            if kept in self.written:
                self.written.remove(kept)

        if self.delayed:
            self.written.append(kept)
            return Taken(self._ticket(copy))
        copy(True)
        return Taken()

    def _forget(self, key: BlockKey) -> None:
        kept = self.blocks.pop(key, None)
        self.gone.append(key)
        if kept is not None and not kept.claims and not kept.flying:
            self.free.append(kept.slot)

    def _unclaim(self, key: BlockKey, kept: Kept) -> None:
        self.claimed[key].remove(kept)
        kept.claims -= 1
        if self.blocks.get(key) is not kept and not kept.claims:
            self.free.append(kept.slot)

    def check(self) -> None:
        """Every slot is free or has a block in it, one that was removed but is still read too."""
        read = {kept.slot for held in self.claimed.values() for kept in held}
        slots = {kept.slot for kept in (*self.blocks.values(), *self.written)} | read
        assert sorted([*slots, *self.free]) == list(range(self.slots))

    def holds(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [key in self.blocks for key in keys]

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> int:
        for at, key in enumerate(keys):
            if key not in self.blocks or self.blocks[key].flying:
                return at
            assert salt == self.blocks[key].salt, "claimed under another salt than its own"
            self.blocks[key].claims += 1
            self.claimed.setdefault(key, []).append(self.blocks[key])
        return len(keys)

    def known(self, keys: Sequence[BlockKey]) -> Sequence[BlockBelow]:
        held = [self.claimed[key][-1] for key in keys]
        return [BlockBelow(kept.priority, kept.until_s) for kept in held]

    def disclaim(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._unclaim(key, self.claimed[key][-1])

    def onboard(
        self, group: int, keys: Sequence[BlockKey], slots: Sequence[DeviceSlot]
    ) -> Ticket | None:
        self.brought += keys
        claims = [self.claimed[key][-1] for key in keys]

        def copy(ok: bool) -> None:
            for key, slot, kept in zip(keys, slots, claims, strict=True):
                self.device.kv[slot] = list(kept.kv) if ok else [b"garbage"] * len(kept.kv)
                keeps = self.inclusive or kept.retaken
                if self.blocks.get(key) is kept and not (ok and keeps):
                    self._forget(key)
                self._unclaim(key, kept)

        if self.delayed:
            for slot in slots:  # the previous content is of no use
                self.device.kv[slot] = [b"on its way"] * len(self.device.kv[slot])
            return self._ticket(copy)
        copy(True)
        return None

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._forget(key)

    def clear(self) -> None:
        self.remove(list(self.blocks))


class OneGroup:
    """Requests over one pool; each consists of one sequence."""

    def __init__(self, pool: BlockPool, scheme: KeyScheme) -> None:
        group = Group("all", scheme.block_tokens)
        self.requests = Requests([group], [Sequences(pool, scheme)])

    def begin(self, tokens: Sequence[int], **options: Any) -> KVSequence:
        [sequence] = self.requests.begin(tokens, **options).parts
        return sequence

    def append(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        self.requests.append(Request([sequence]), tokens)

    def extend(self, sequence: KVSequence, end: int) -> None:
        self.requests.extend(Request([sequence]), end)

    def commit(self, sequence: KVSequence, computed: int) -> None:
        self.requests.commit(Request([sequence]), computed)

    def rewind(self, sequence: KVSequence, count: int) -> None:
        self.requests.rewind(Request([sequence]), count)

    def fork(self, sequence: KVSequence, count: int) -> list[KVSequence]:
        return [fork.parts[0] for fork in self.requests.fork(Request([sequence]), count)]

    def copied(self, sequence: KVSequence) -> None:
        self.requests.copied(Request([sequence]))

    def release(self, sequence: KVSequence, *, store: bool = True) -> None:
        self.requests.release(Request([sequence]), store=store)


class Engine:
    """Runs prompts over a pool, writes their KV, and checks the served KV."""

    def __init__(
        self,
        blocks: int = 8,
        *,
        host: int = 0,
        rule: OffloadRule | None = None,
        block_tokens: int = 4,
        partial: Partial = "take",
        events_max: int = 0,
        delayed: bool = False,
        inclusive: bool = False,
    ) -> None:
        self.clock = Clock()
        self.device = Device(blocks, block_tokens)
        self.host = Host(
            self.device,
            host,
            rule or OffloadRule(min_priority=35),
            delayed=delayed,
            inclusive=inclusive,
        )
        self.events = PoolEvents(events_max)
        self.pool = BlockPool(
            PoolSettings(blocks, block_tokens, partial=partial),
            now=self.clock,
            below=self.host if host else None,
            events=self.events,
        )
        self.host.pool = self.pool
        self.scheme = KeyScheme(namespace({"model": "tiny"}), block_tokens=block_tokens)
        self.sequences = OneGroup(self.pool, self.scheme)
        self.block_tokens = block_tokens

    def check(self) -> None:
        """Every invariant, and that ``free + used == total``."""
        self.host.report()
        self.pool.check()
        assert self.pool.free + self.pool.used == self.pool.blocks
        self.host.check()

    def kv(self, sequence: KVSequence, position: int) -> bytes:
        """Return the KV that the model computes for the token at ``position``."""
        words = sequence.tokens[: position + 1].tobytes()
        seen = [content for at, content in sorted(sequence.extra) if at <= position]
        return sha256(sequence.root.key + words + b"".join(seen)).digest()

    def begin(
        self,
        prompt: Sequence[int],
        *,
        retention: Retention | None = None,
        salt: str = "",
        lora: str = "",
        extra: Extra = (),
    ) -> KVSequence:
        """Begin a sequence and compute its prompt once its blocks have arrived."""
        sequence = self.sequences.begin(
            prompt, retention=retention, salt=salt, lora=lora, extra=extra
        )
        self.check()
        if not sequence.waits:
            self.compute(sequence)
        return sequence

    def poison(self) -> None:
        """Overwrite all slots that are neither held nor cached."""
        for slot in self.pool._ledger.free:
            self.device.kv[slot] = [b"stale"] * self.block_tokens

    def compute(self, sequence: KVSequence, end: int | None = None) -> None:
        """Perform pending copies, check the served KV, compute up to ``end``, and commit."""
        for copy in sequence.copies:
            assert copy.after is None or copy.after not in self.host.flights
            source, target = self.device.kv[copy.source], self.device.kv[copy.target]
            target[: copy.tokens] = source[: copy.tokens]
            assert all(kv is not None for kv in target[: copy.tokens])
        self.sequences.copied(sequence)
        self.verify(sequence)
        count = len(sequence.tokens)
        end = count if end is None else min(count, end)
        for position in range(sequence.computed, end):
            block, within = divmod(position, self.block_tokens)
            self.device.kv[sequence.table[block]][within] = self.kv(sequence, position)
        self.sequences.commit(sequence, end)
        self.verify(sequence)
        self.check()

    def verify(self, sequence: KVSequence) -> None:
        """Every token that counts as computed has its own KV."""
        for position in range(sequence.computed):
            block, within = divmod(position, self.block_tokens)
            held = self.device.kv[sequence.table[block]][within]
            assert held == self.kv(sequence, position), (position, held)

    def generate(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Append tokens one by one; compute each except the last, whose KV comes with the next."""
        for token in tokens:
            if sequence.computed < len(sequence.tokens):
                self.compute(sequence)
            self.sequences.append(sequence, [token])
            self.check()

    def release(self, sequence: KVSequence, *, store: bool = True) -> None:
        self.sequences.release(sequence, store=store)
        self.check()

    def run(
        self,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        *,
        retention: Retention | None = None,
        salt: str = "",
        lora: str = "",
        extra: Extra = (),
    ) -> int:
        """A whole request; how many tokens of its prompt were served."""
        sequence = self.begin(prompt, retention=retention, salt=salt, lora=lora, extra=extra)
        self.generate(sequence, generated)
        self.release(sequence)
        return sequence.cached

    def keys(self, tokens: Sequence[int], *, salt: str = "", lora: str = "") -> list[BlockKey]:
        return self.scheme.chain(tokens, parent=self.scheme.root(salt=salt, lora=lora))
