"""The block pool: device slots, what is cached in them, and who holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvladder.errors import ConfigError, NotHeld, PoolError
from kvladder.gpu.pool.below import Below
from kvladder.gpu.pool.commit import Committer, Content, token_ids
from kvladder.gpu.pool.events import PoolEvents, Stored, StoredBlock
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.pool.reserve import Match, Reservations
from kvladder.gpu.pool.retain import Retain, Retainer
from kvladder.gpu.pool.stats import PoolStats
from kvladder.gpu.requests.groups import SIZES, is_size
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, DeviceSlot, Root, Ticket
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.policy.numbers import settle, whole

ROOT = Root(BlockKey(bytes(KEY_BYTES)))
"""Where prefixes begin for callers who make their keys without a root."""

Partial = Literal["off", "take", "copy"]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What a pool is.

    Parameters
    ----------
    blocks:
        Device slots.
    block_tokens:
        Tokens per block, a power of two above 1.
    partial:
        What to do with a cached block of which a prompt shares only the beginning: nothing;
        ``take`` it over, if nobody uses it and nothing follows it; or ``copy`` what is shared into
        a block of its own.
    chained:
        Whether a block is only of use with all blocks before it, so that leaves are evicted
        first. False behind a sliding window, where partial matches must be off.
    level:
        Name of the device in events.
    group:
        Number of the pool among those of a model, for events.
    """

    blocks: int
    block_tokens: int
    partial: Partial = "take"
    chained: bool = True
    level: str = "gpu"
    group: int = 0

    def __post_init__(self) -> None:
        settle(self, "blocks", "block_tokens", "group")
        if self.blocks < 1:
            raise ConfigError(f"{self.blocks} blocks", path="gpu.blocks", hint="1 or more")
        if not is_size(self.block_tokens):
            raise ConfigError(f"{self.block_tokens} tokens", path="block.tokens", hint=SIZES)
        if self.partial not in ("off", "take", "copy"):
            raise ConfigError(f"{self.partial!r}", path="gpu.partial", hint="off, take or copy")
        if not self.chained and self.partial != "off":
            raise ConfigError("windows have no partial matches", path="gpu.partial", hint="off")


class BlockPool:
    """Device slots with references, a prefix index, and prioritized LRU among what is cached.

    Every slot is free, held or evictable. Whoever is given a slot holds a reference to it and
    releases it; the blocks of a prefix are held together and released tail first. What is evicted
    goes to the tiers as far as they take it. Calls come from one thread and never wait.

    Parameters
    ----------
    settings:
        What the pool is.
    now:
        The clock, in seconds; retentions end by it.
    below:
        The tiers, or None.
    events:
        Where to report; the buffer may be shared by the pools of a model. None reports nothing.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        now: Callable[[], float],
        below: Below | None = None,
        events: PoolEvents | None = None,
    ) -> None:
        self.settings = settings
        self.events = PoolEvents() if events is None else events
        self.stats = PoolStats()
        labels = settings.partial != "off" or self.events.enabled
        family = settings.chained and (settings.partial != "off" or below is not None)
        self.ledger = Ledger(
            settings.blocks, chained=settings.chained, family=family, labels=labels
        )
        self.retainer = Retainer(self.ledger, self.events, group=settings.group, now=now)
        self.moves = Moves(
            self.ledger,
            below,
            self.events,
            self.stats,
            group=settings.group,
            level=settings.level,
            block_tokens=settings.block_tokens,
        )
        self.committer = Committer(
            self.ledger,
            self.moves,
            self.retainer,
            self.events,
            self.stats,
            group=settings.group,
            level=settings.level,
            block_tokens=settings.block_tokens,
        )
        self.reserve = Reservations(
            self.ledger, self.moves, self.retainer, self.committer, self.stats
        )
        self.resets = 0
        """How often the cache was reset; what began before is not stored after."""
        self._pins: dict[DeviceSlot, int] = {}
        capacities = {settings.level: settings.blocks}
        capacities.update({} if below is None else below.capacities)
        self.events.created(settings.group, settings.block_tokens, capacities)

    # ---- how full it is

    @property
    def blocks(self) -> int:
        """All slots."""
        return self.settings.blocks

    @property
    def free(self) -> int:
        """Slots that nobody holds, with or without a cached block in them."""
        return self.settings.blocks - len(self.ledger.refs)

    @property
    def used(self) -> int:
        """Slots that somebody holds, a copy under way included."""
        return len(self.ledger.refs)

    @property
    def cached(self) -> int:
        """Blocks on the device that can be reused, held or not."""
        return self.settings.blocks - self.ledger.index.node_at.count(NO_NODE)

    # ---- slots

    def allocate(self, count: int) -> list[DeviceSlot]:
        """Hand out ``count`` slots, evicting exactly as many blocks as are needed.

        The caller owns one reference to each. What is in them is undefined.

        Raises
        ------
        OutOfBlocks
            There are not that many that nobody holds; nothing was changed.
        BlocksBusy
            There will be when the offloads that were begun have landed.
        """
        if type(count) is not int:
            count = whole(count, "blocks")
        if count < 0:
            raise ValueError(f"{count} blocks: expected 0 or more")
        ledger = self.ledger
        if count > len(ledger.free):
            return self.reserve.room(count)
        self.stats.allocated += count
        return ledger.take(count)

    def release(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Give a reference to each of ``slots`` back, which are in the order of their prefix.

        What nobody references any more may be reused, the last slot first; a cached block stays
        until then. With ``front`` these are the next to go, the first of them first.

        Raises
        ------
        NotHeld
            A slot is not held, or named twice; nothing was changed.
        """
        self.ledger.release(slots, front=front)

    def retain(self, slots: Sequence[DeviceSlot]) -> None:
        """Add a reference to each of ``slots``, which the caller holds.

        Raises
        ------
        NotHeld
            A slot is not held; nothing was changed.
        """
        if not self.ledger.refs.all_held(slots):
            raise NotHeld("a slot is not held")
        self.ledger.retain(slots)

    def evict(self, count: int) -> int:
        """Have up to ``count`` cached blocks leave the device; how many did, or began to."""
        count = whole(count, "blocks")
        if count < 0:
            raise ValueError(f"{count} blocks: expected 0 or more")
        self.retainer.expire()
        victims = self.ledger.order.select(count)
        self.moves.evict(victims)
        return len(victims)

    # ---- blocks

    def match(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """The longest leading run of ``keys`` that is on the device; changes nothing.

        Blocks that are still on their way there do not count.
        """
        ledger = self.ledger
        slots = gather(ledger.nodes.slot, ledger.index.match(keys))
        return slots[: self._complete(slots)] if self.moves.arriving else slots

    def _complete(self, slots: Sequence[DeviceSlot]) -> int:
        """How many leading slots nothing writes any more."""
        arriving = self.moves.arriving
        return next((at for at, slot in enumerate(slots) if slot in arriving), len(slots))

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each of ``keys`` is on the device or in a tier; changes nothing."""
        find, slot = self.ledger.index.find, self.ledger.nodes.slot
        found = [(node := find(key)) is not None and slot[node] != NO_SLOT for key in keys]
        below = self.moves.below
        if below is not None and not all(found):
            absent = [at for at, here in enumerate(found) if not here]
            for at, level in zip(absent, below.where([keys[at] for at in absent]), strict=True):
                found[at] = level is not None
        return found

    def acquire(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """``match``, and one reference to each slot for the caller."""
        ledger = self.ledger
        nodes = ledger.index.match(keys)
        if self.moves.arriving:
            del nodes[self._complete(gather(ledger.nodes.slot, nodes)) :]
        self.reserve.settle(self.reserve.hold(Match(nodes, []), 0))
        return gather(ledger.nodes.slot, nodes)

    def commit(
        self,
        slots: Sequence[DeviceSlot],
        content: Content,
        *,
        retain: Sequence[Retain | None] | None = None,
    ) -> list[DeviceSlot]:
        """The bytes of these blocks are complete: from now on others may reuse them.

        The caller holds ``slots``, one per key, and all blocks before them. A content is cached
        once: where it was already, the caller's reference moves to the slot that has it, and its
        own slot is given back; but not while that slot is still being filled. The slots to use from
        now on are returned. If the block before them is not known (any more), nothing is stored.

        Raises
        ------
        NotHeld, PoolError, ValueError
            A slot is not held, or holds another block, or the arguments do not fit together;
            nothing was changed.
        """
        result = self.committer.commit(slots, content, retain)
        return list(slots) if result is None else result

    def pin(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """Keep the longest leading run of ``keys`` on the device from eviction, until ``unpin``."""
        slots = self.acquire(keys)
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1
        return slots

    def unpin(self, slots: Sequence[DeviceSlot]) -> None:
        """Undo one ``pin`` of each of ``slots``.

        Raises
        ------
        NotHeld
            A slot is not pinned, or named twice; nothing was changed.
        """
        if len(set(slots)) < len(slots) or not self._pins.keys() >= set(slots):
            raise NotHeld("a slot is not pinned")
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
        self.ledger.release(slots)

    def priority(self, key: BlockKey) -> int | None:
        """The priority that a known block has now, or None."""
        self.retainer.expire()
        node = self.ledger.index.find(key)
        return None if node is None else self.ledger.nodes.priority[node]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks here and in the tiers, and all that follow them.

        Who holds them keeps them, but nobody else finds them.
        """
        self.moves.purges += 1
        found = [node for key in keys if (node := self.ledger.index.find(key)) is not None]
        if found:
            self.moves.drop(found, "removed")
        if self.moves.below is not None:
            self.moves.below.remove(keys)
        self.moves.settle()

    def reset(self) -> None:
        """Forget everything that is cached here and in the tiers.

        Nothing of what was begun before will be stored, whoever holds it.
        """
        self.resets += 1
        self.moves.drop(self.ledger.index.known(), "removed")
        if self.moves.below is not None:
            self.moves.below.clear()
        self.moves.settle()

    def take_over(self, key: BlockKey, *, force: bool = False) -> DeviceSlot:
        """Whoever holds the slot of this leaf will write on in it: it is not cached here any more.

        The slot is the caller's own afterwards. With ``force`` it need not be a leaf: unless a tier
        has the block, all that follow it are forgotten.

        Raises
        ------
        NotHeld
            The block is not on the device, or is not held by one caller alone.
        PoolError
            Other blocks follow it.
        """
        index, rows = self.ledger.index, self.ledger.nodes
        node = index.find(key)
        slot = NO_SLOT if node is None else rows.slot[node]
        if node is None or self.ledger.refs[slot] != 1:
            raise NotHeld("the block is not held, or shared")
        if index.has_children(node) and not force:
            raise PoolError("other blocks follow this one")
        level = index.colder.get(node)
        if level is None:
            self.moves.drop([node], "taken")
        else:
            self.ledger.uncount(rows.parent[node])
            index.displace(node)
            self.events.moved(self.settings.group, key, self.settings.level, level)
        return slot

    # ---- what the tiers report, on the pool's thread

    def landed(self, ticket: Ticket, *, ok: bool = True) -> None:
        """A copy to or from the device is over; without ``ok`` its bytes did not arrive.

        Raises
        ------
        NotHeld
            No such copy is under way.
        """
        self.moves.landed(ticket, ok=ok)

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        """No tier holds these any more."""
        self.moves.forgotten(keys)

    def moved(self, keys: Sequence[BlockKey], level: str) -> None:
        """The tiers moved these to another of their levels."""
        self.moves.moved(keys, level)

    # ---- for people and tests

    def snapshot(self) -> list[Stored]:
        """The index as it is now, as events that make it from nothing, numbered like the last one.

        Parents come before their children. Tokens are empty where they are not kept.
        """
        index, rows, settings = self.ledger.index, self.ledger.nodes, self.settings
        made: list[Stored] = []
        for parent, root, siblings in index.families():
            for node in siblings:
                key = rows.key[node]
                assert key is not None
                on_device = rows.slot[node] != NO_SLOT
                made.append(
                    Stored(
                        self.events.last_id,
                        settings.group,
                        settings.level if on_device else index.colder[node],
                        parent,
                        (StoredBlock(key, token_ids(rows.tokens[node]), rows.priority[node]),),
                        root.salt,
                        root.lora,
                    )
                )
        return made

    def check(self) -> None:
        """Assert every invariant; O(n), for tests."""
        self.ledger.check()
        self.retainer.check()
        self.moves.check()
        assert self.free + self.used == self.blocks
        assert self._pins.keys() <= self.ledger.refs.held().keys()
        assert all(self.ledger.refs[slot] >= count for slot, count in self._pins.items())
        rows, leaving = self.ledger.nodes, self.moves.leaving
        kids = [0] * len(rows)
        for node in self.ledger.index.known():
            if rows.slot[node] != NO_SLOT and node not in leaving:
                kids[rows.parent[node]] += 1
        assert not self.settings.chained or kids[1:] == rows.kids[1:]
