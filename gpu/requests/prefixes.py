"""The cached prefix of a prompt: find it, hold it, put it into a sequence's table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.pool.reserve import Hold, Match
from kvladder.gpu.pool.retain import Retain
from kvladder.gpu.pool.stats import RequestStats
from kvladder.gpu.requests.sequence import BlockCopy, Extra, KVSequence, packed
from kvladder.gpu.tree.names import NO_SLOT, TOKEN_BYTES, DeviceSlot, NodeId
from kvladder.policy.eviction import PRIORITY_DEFAULT

HITS_MAX = 255


class _Part(NamedTuple):
    """A cached block of which a prompt shares the first ``tokens`` tokens."""

    node: NodeId
    tokens: int
    taken: bool
    """Whether the prompt writes on in its slot, instead of in a copy."""


class Found(NamedTuple):
    """What a prompt found cached."""

    match: Match
    part: _Part | None
    first: int = 0
    """Blocks before those that matched, which the sequence does not need."""

    def tokens(self, block_tokens: int) -> int:
        """How many tokens of the prompt this serves."""
        part = 0 if self.part is None else self.part.tokens
        return (self.first + len(self.match.nodes)) * block_tokens + part


class Prefixes:
    """The prompts of one pool's sequences, before they run."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._tokens = pool.settings.block_tokens

    def find(self, sequence: KVSequence, limit: int) -> Found:
        """The longest cached prefix within the first ``limit`` tokens; claims what tiers hold."""
        words = packed(sequence.tokens[:limit])
        blocks = limit // self._tokens
        content = Content(
            sequence.keys[:blocks],
            sequence.root,
            sequence.root.key,
            words,
            self.limits(sequence.extra, 0, blocks),
        )
        match = self.pool.reserve.reach(content)
        return Found(match, self._part(sequence, match, words))

    def find_span(self, sequence: KVSequence, first: int, end: int) -> Found:
        """The blocks from ``first`` up to ``end``, as far as they are cached; claims them."""
        size, keys, root = self._tokens, sequence.keys, sequence.root
        content = Content(
            keys[first:end],
            root,
            keys[first - 1] if first else root.key,
            packed(sequence.tokens[first * size : end * size]),
            self.limits(sequence.extra, first, end),
        )
        return Found(self.pool.reserve.reach(content), None, first)

    def fitting(self, found: Found, blocks: int) -> Found:
        """What of it there is room for in ``blocks`` blocks: the source of a copy takes one more.

        Where there is none the source is taken over, or what the prompt shares with it is not used.
        """
        match, part, first = found
        rows, pool = self.pool.ledger.nodes, self.pool
        if part is None or part.taken or rows.slot[part.node] == NO_SLOT:
            return found
        kept = [node for node in match.nodes if rows.slot[node] != NO_SLOT]
        if pool.reserve.fits([*kept, part.node], blocks - first - len(kept)):
            return found
        takeable = self._takeable(part.node)
        return found._replace(part=part._replace(taken=True) if takeable else None)

    def hold(self, found: Found, blocks: int) -> Hold:
        """Hold what was found, and room for the rest of ``blocks``; see ``Reservations.hold``."""
        match, part, first = found
        on_device = first + len(match.nodes) - len(match.claimed)
        also: list[NodeId] = []
        if part is not None:
            if self.pool.ledger.nodes.slot[part.node] == NO_SLOT:
                match = Match(match.nodes, [*match.claimed, part.node])
            else:
                also.append(part.node)
                on_device += part.taken
        return self.pool.reserve.hold(match, blocks - on_device, also=also)

    def limits(self, extra: Extra, first: int, end: int) -> dict[int, int] | None:
        """By position from block ``first`` on, how many tokens come before the first extra."""
        limits: dict[int, int] = {}
        for offset, _ in sorted(extra):
            block, within = divmod(offset, self._tokens)
            if first <= block < end:
                limits.setdefault(block - first, within)
        return limits or None

    def _part(self, sequence: KVSequence, match: Match, words: bytes) -> _Part | None:
        """The cached block that shares most of what follows the match, if it can be used."""
        pool, size = self.pool, self._tokens
        begin = len(match.nodes) * size
        if pool.settings.partial == "off" or begin * TOKEN_BYTES >= len(words):
            return None
        index = pool.ledger.index
        above = match.nodes[-1] if match.nodes else index.root(sequence.root, create=False)
        if above is None:
            return None
        query = words[begin * TOKEN_BYTES : (begin + size) * TOKEN_BYTES]
        limits = self.limits(sequence.extra, len(match.nodes), len(match.nodes) + 1)
        if limits is not None:
            query = query[: limits[0] * TOKEN_BYTES]
        best: _Part | None = None
        for node, shared, tokens in index.partial(above, query):
            if best is not None and shared <= best.tokens:
                break
            if tokens > (0 if best is None else best.tokens) and self._usable(node):
                best = _Part(node, tokens, pool.settings.partial == "take")
        if best is None or pool.ledger.nodes.slot[best.node] != NO_SLOT:
            return best
        key = pool.ledger.nodes.key[best.node]
        return best if key is not None and pool.moves.claim([key]) else None

    def _usable(self, node: NodeId) -> bool:
        pool = self.pool
        if node in pool.moves.leaving:
            return False
        if pool.ledger.nodes.slot[node] == NO_SLOT or pool.settings.partial == "copy":
            return True
        return self._takeable(node)

    def _takeable(self, node: NodeId) -> bool:
        """Whether nobody holds the block, which is on the device, and nothing follows it."""
        ledger = self.pool.ledger
        return node in ledger.order and not ledger.index.has_children(node)

    def fill(
        self,
        sequence: KVSequence,
        found: Found,
        slots: Iterable[DeviceSlot],
    ) -> None:
        """Put what was held and handed out into the table, and bring or copy what has to be."""
        match, part, first = found
        pool, rows, size = self.pool, self.pool.ledger.nodes, self._tokens
        fresh = iter(slots)
        claimed = set(match.claimed)
        places = [next(fresh) if n in claimed else rows.slot[n] for n in match.nodes]
        if match.claimed:
            targets = [places[i] for i, node in enumerate(match.nodes) if node in claimed]
            pool.moves.onboard(match.claimed, targets)
        if pool.moves.below is not None:
            for node in match.nodes:
                rows.hits[node] = min(rows.hits[node] + 1, HITS_MAX)
        if sequence.retention is not None and match.nodes:
            wanted = self.wanted(sequence, first, first + len(match.nodes), cached=True)
            pool.retainer.apply(match.nodes, wanted or [], new=())
        sequence.table, sequence.first = [NO_SLOT] * first + places, first
        if part is not None:
            self._take_part(sequence, part, fresh)
        sequence.table.extend(fresh)
        end = first + len(match.nodes)
        sequence.cached = found.tokens(size)
        sequence.computed = sequence.cached
        sequence.stored = end
        stats = RequestStats(
            reused=len(match.nodes),
            missed=-(-len(sequence.tokens) // size) - end,
            onboarded=len(match.claimed),
            partial_tokens=0 if part is None else part.tokens,
        )
        sequence.stats = stats
        pool.stats.reused += stats.reused
        pool.stats.missed += stats.missed
        pool.stats.partial += part is not None

    def _take_part(self, sequence: KVSequence, part: _Part, fresh: Iterable[DeviceSlot]) -> None:
        """Have the first tokens of a cached block in the sequence's next one."""
        pool = self.pool
        source, key = pool.ledger.nodes.slot[part.node], pool.ledger.nodes.key[part.node]
        assert key is not None
        if source == NO_SLOT:
            target = next(iter(fresh))
            pool.moves.onboard([part.node], [target], private=True)
        elif part.taken:
            target = pool.take_over(key)
        else:
            target = next(iter(fresh))
            self.copy(sequence, source, target, part.tokens)
        sequence.table.append(target)

    def copy(
        self, sequence: KVSequence, source: DeviceSlot, target: DeviceSlot, tokens: int
    ) -> None:
        """Have the engine copy; takes the caller's reference to the source over."""
        copy = BlockCopy(source, target, tokens, self.pool.moves.arriving.get(source))
        self.pool.retain([target])
        sequence.copies.append(copy)

    def wanted(
        self, sequence: KVSequence, first: int, end: int, *, cached: bool = False
    ) -> list[Retain | None] | None:
        """What the sequence asks for its blocks; of ``cached`` ones only what it says itself."""
        retention = sequence.retention
        if retention is None:
            return None
        asked = retention.of_blocks(
            range(first, end),
            block_tokens=self._tokens,
            prompt_tokens=sequence.prompt_tokens,
        )
        wanted: list[Retain | None] = []
        for block, (priority, duration_s) in enumerate(asked, first):
            if block < len(sequence.said):
                silent = sequence.said[block] is None
                silent = silent and (cached or priority == PRIORITY_DEFAULT)
            else:
                silent = priority == PRIORITY_DEFAULT and duration_s is None
            if silent:
                wanted.append(None)
            else:
                wanted.append(Retain(priority, duration_s))
        return wanted
