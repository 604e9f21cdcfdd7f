"""Requests over the pools of a model, one per group: one prefix for all, a table of blocks each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from kvladder.errors import PoolError
from kvladder.gpu.pool.serving import PoolMatch, Serving, reserve
from kvladder.gpu.requests.groups import Group, served_by_all
from kvladder.gpu.requests.sequence import BlockCopy, Extra, KVSequence, Sequences
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.keys import BlockKey
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Request:
    """One running request: a sequence per group. Made and changed by ``Requests`` alone.

    ``parts[g]`` is the :class:`KVSequence` of group ``g``; all have the same tokens.
    """

    __slots__ = ("parts", "session")

    def __init__(self, parts: Sequence[KVSequence]) -> None:
        self.parts = tuple(parts)
        self.session: str | None = None
        """The session that it was said to belong to, see ``belongs``."""

    def belongs(self, session: str) -> None:
        """Note its session."""
        self.session = session

    @property
    def runs(self) -> list[Sequence[BlockKey]]:
        """By group, its whole blocks, as far as they are computed."""
        return [part.keys[: part.computed // part.block_tokens] for part in self.parts]

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids, those included whose KV is not there yet."""
        return self.parts[0].tokens

    @property
    def cached(self) -> int:
        """How many tokens of the prompt were served from the cache."""
        return self.parts[0].cached

    @property
    def computed(self) -> int:
        """How many leading tokens have their KV in the blocks."""
        return self.parts[0].computed

    @property
    def tables(self) -> list[list[DeviceSlot]]:
        """By group, the slot of each block; ``NO_SLOT`` (-1) before what a window still reads."""
        return [part.table for part in self.parts]

    @property
    def copies(self) -> list[tuple[int, BlockCopy]]:
        """``(group, copy)`` that the engine makes before it runs the request, then ``copied``.

        Of a state the whole block is copied, whatever the copy's ``tokens``.
        """
        return [(group, copy) for group, part in enumerate(self.parts) for copy in part.copies]

    @property
    def ready(self) -> bool:
        """Whether all cached bytes are in place, so that the engine may run it."""
        return all(part.ready for part in self.parts)

    @property
    def arriving(self) -> bool:
        """Whether blocks are still on their way from a tier: poll, and ask again."""
        return any(part.waits for part in self.parts)

    def require_ready(self) -> None:
        """Raise NotHeld if it was released, NotReady if its bytes are not in place."""
        for part in self.parts:
            part.require_ready()

    @property
    def lost(self) -> bool:
        """Whether to release the request and begin it anew.

        A block did not arrive, or blocks have had other names since it began.
        """
        return any(part.lost for part in self.parts)


class CachedPrefix:
    """What one group has cached of a prompt, whose first ``limit`` tokens may be served."""

    def __init__(self, group: Group, pool: Serving, part: KVSequence, limit: int) -> None:
        self.group = group
        self._pool, self._part, self._limit = pool, part, limit
        blocks = limit // group.block_tokens
        self._present = part.present(blocks)
        self._followed = pool.followed([part.root.key, *part.keys[:blocks]], part.root)
        """By block, whether one is known in its place that may be matched in part."""
        self._shared: dict[int, int] = {}
        self.holes = group.holes(self._present)

    def shared(self, block: int) -> int:
        """See ``Shared``."""
        if not self._followed[block]:
            return 0
        if block not in self._shared:
            end = min(self._limit, (block + 1) * self.group.block_tokens - 1)
            self._shared[block] = self._pool.shares(self._part.content(block, block, end))
        return self._shared[block]

    def reach(self, end: int) -> PoolMatch:
        """What serves so many tokens, which must be given to ``hold`` or ``forgo``."""
        first, last = self.group.first(end), end // self.group.block_tokens
        return self._pool.reach(self._part.content(first, last, end), first)

    def lacks(self, match: PoolMatch, end: int) -> None:
        """A tier that had what serves so many tokens gave no more than this."""
        block = match.first + len(match.nodes)
        if block < end // self.group.block_tokens:
            self._present[block] = False
            self.holes = self.group.holes(self._present)
        else:
            self._shared[block] = 0 if match.part is None else match.part.tokens


class Requests:
    """Running requests of one model. Calls come from the pools' thread and never wait.

    An engine begins a request with its prompt, waits until it is ``ready``, makes its ``copies``
    and says ``copied``, computes what was not cached, says so by ``commit``, appends what it
    generates, and releases the request. What raises leaves all groups as they were, except that
    blocks nobody held may have been evicted.

    A prompt may be computed a part at a time: ``begin(room=n)``, then ``extend`` and ``commit``
    in turn. A window's pool then needs room for the window and one such part only.

    Parameters
    ----------
    groups, sequences:
        What each group is, and its sequences, in the same order. The pool of a window or a state
        is not ``chained``; of a state ``partial`` is off.
    reuse:
        Whether blocks are served to later requests, see ``CachePlan.no_reuse``.
    """

    def __init__(
        self, groups: Sequence[Group], sequences: Sequence[Sequences], *, reuse: bool = True
    ) -> None:
        assert len(groups) == len(sequences) > 0
        self.groups = tuple(groups)
        self.sequences = tuple(sequences)
        self._pools = [one.serving for one in sequences]
        self._listener: Callable[[Request], object] | None = None
        self.reuse = reuse
        self.step = lcm(*(group.block_tokens for group in groups))
        """After so many tokens blocks of all groups end."""
        self._single = len(groups) == 1 and groups[0].kind == "full"
        matched_whole: list[int] = []
        for group, one in zip(groups, sequences, strict=True):
            settings = one.pool.settings
            assert settings.block_tokens == group.block_tokens
            assert settings.chained == (group.kind == "full")
            assert settings.partial == "off" or group.kind != "state"
            if settings.partial == "off":
                matched_whole.append(group.block_tokens)
        self._grain = lcm(*matched_whole)
        """Cached prefixes of several groups, or of a window, end at multiples of so many tokens."""

        self.on_begin: Callable[[], object] | None = None
        """Called before a request begins."""
        self.lacking: list[int] = []
        """By group, tokens that all others could have served, counted since ``watch``.

        Those of a pool that evicted what other pools kept.
        """

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
    ) -> Request:
        """A request for this prompt, with slots for all of it and the cached prefix in place.

        The caller owns it until ``release``. The prefix is the longest that every group can serve:
        at most all tokens but the last, since the logits of that one are needed; ``cached_max``
        bounds it further.

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
        if self.on_begin is not None:
            self.on_begin()
        parts = [
            one.make(tokens, retention, salt, lora, extra, prompt_tokens, storing=self.reuse)
            for one in self.sequences
        ]
        count = len(parts[0].tokens)
        limit = count - 1 if cached_max is None else min(count - 1, whole(cached_max, "cached_max"))
        more = count if room is None else max(1, whole(room, "room"))
        matches, blocks = self._find(parts, max(0, limit) if self.reuse else 0, more)
        got = reserve(self._pools, matches, blocks)
        for part, (match, slots) in zip(parts, got, strict=True):
            part.fill(match, slots)
        return Request(parts)

    def _find(
        self, parts: Sequence[KVSequence], limit: int, more: int
    ) -> tuple[list[PoolMatch], list[int]]:
        """The longest prefix that all groups can serve, and have room for as far as it is copied.

        What only tiers hold is claimed. And by group, how many blocks there are for it and so many
        tokens ``more``.
        """
        while True:
            matches = [self._reach(parts[0], limit)] if self._single else self._match(parts, limit)
            end = matches[0].tokens(self.groups[0].block_tokens) + more
            end = min(end, len(parts[0].tokens))
            blocks = [-(-end // group.block_tokens) for group in self.groups]
            fitted = list(map(Serving.fitting, self._pools, matches, blocks))
            ends = [
                match.tokens(group.block_tokens)
                for match, group in zip(fitted, self.groups, strict=True)
            ]
            if self._single or ends == [
                match.tokens(group.block_tokens)
                for match, group in zip(matches, self.groups, strict=True)
            ]:
                return fitted, blocks
            # what is not copied into one group is of no use in any other
            for pool, match in zip(self._pools, fitted, strict=True):
                pool.forgo(match)
            limit = min(ends)

    def _reach(self, part: KVSequence, limit: int) -> PoolMatch:
        """The longest prefix of a single group that reads all tokens."""
        return self._pools[0].reach(part.content(0, limit // part.block_tokens, limit))

    def _match(self, parts: Sequence[KVSequence], limit: int) -> list[PoolMatch]:
        """The longest prefix that all groups can serve; what only tiers hold is claimed."""
        end = limit // self._grain * self._grain
        kept = [
            CachedPrefix(group, pool, part, end)
            for group, pool, part in zip(self.groups, self._pools, parts, strict=True)
        ]
        while True:
            holes = [one.holes for one in kept]
            shared, most = [one.shared for one in kept], end
            end = served_by_all(self.groups, holes, shared, most, self._grain)
            if self.lacking:
                self._blame(kept, most, end)
            found: list[PoolMatch] = []
            for one in kept:
                found.append(one.reach(end))
                if found[-1].tokens(one.group.block_tokens) < end:
                    one.lacks(found[-1], end)
                    break
            else:
                return found
            for pool, match in zip(self._pools, found, strict=False):
                pool.forgo(match)

    def rename(self, mark: str) -> None:
        """Name blocks by this mark, too, from now on; without one, as at first.

        What pools have cached is forgotten there; tiers keep it under the names that it has.
        Requests of before are ``lost``, and no block of theirs is stored any more.
        """
        for one in self.sequences:
            one.pool.reset(tiers=False)
            one.rename(mark)

    def watch(self) -> None:
        """Count what pools lack from now on."""
        self.lacking = [0] * len(self.groups)

    def _blame(self, kept: Sequence[CachedPrefix], most: int, end: int) -> None:
        """Count what is not served since one group alone lacks it."""
        for at in range(len(kept)):
            others = [one for number, one in enumerate(kept) if number != at]
            groups, holes = [one.group for one in others], [one.holes for one in others]
            shared = [one.shared for one in others]
            self.lacking[at] += served_by_all(groups, holes, shared, most, self._grain) - end

    def restore(self, parts: Sequence[KVSequence]) -> tuple[Request, list[int]]:
        """A request whose blocks are elsewhere, with as many slots as it had.

        And by group, how many of its first slots still hold its blocks: the others are to be
        filled.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            There is no room, or not yet; nothing is held.
        """
        both = list(zip(self._pools, parts, strict=True))
        matches = [pool.match(part.keys[part.first : part.stored]) for pool, part in both]
        got = reserve(self._pools, matches, [len(part.held) for part in parts])
        for part, (match, slots) in zip(parts, got, strict=True):
            part.restore(match, slots)
        return Request(parts), [len(match.nodes) for match in matches]

    def copied(self, request: Request) -> None:
        """The engine made the copies, or ordered them before all it does from now on."""
        for part in request.parts:
            part.copied()

    # ---- run

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """The request goes on with ``tokens``: there are slots to write their KV to.

        What others share or may reuse is not written: the block that is cut short becomes one of
        the request's own first, with a copy to be made of what is in it.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        OutOfBlocks, BlocksBusy
            There is no room, or not yet; nothing was changed.
        """
        self._grow(request, tokens, None)

    def extend(self, request: Request, end: int) -> None:
        """See to it that there are slots for the first ``end`` tokens; raises like ``append``."""
        self._grow(request, (), end)

    def _grow(self, request: Request, tokens: Sequence[int], end: int | None) -> None:
        growths = [part.growth(tokens, end) for part in request.parts]
        if len(growths) == 1:
            slots = [self.sequences[0].pool.allocate(growths[0].fresh)]
        else:
            nothing, fresh = [PoolMatch()] * len(growths), [growth.fresh for growth in growths]
            slots = [given for _, given in reserve(self._pools, nothing, fresh)]
        for part, growth, given in zip(request.parts, growths, slots, strict=True):
            part.grow(growth, given)

    def commit(self, request: Request, computed: int) -> None:
        """The KV of the first ``computed`` tokens is complete: whole blocks can be reused by all.

        Blocks that a window has passed leave the request; they stay cached. Slots of the tables
        change where others have the same content already, see ``BlockPool.commit``.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        ValueError
            ``computed`` is less than before, or more than there are tokens or slots for; nothing
            was changed.
        """
        computed = whole(computed, "computed")
        for part in request.parts:
            part.require_computable(computed)
        for part, group in zip(request.parts, self.groups, strict=True):
            part.commit(computed)
            part.leave(group.keeps(computed))

    def rewind(self, request: Request, count: int) -> None:
        """Take the last ``count`` tokens back; blocks that hold none of the others are released.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        ValueError
            There are not that many; nothing was changed.
        PoolError
            A window has passed what would be read then, or a state would have to be one that is
            no checkpoint; nothing was changed.
        """
        request.require_ready()
        count = whole(count, "count")
        left = len(request.tokens) - count
        if count < 0 or left < 0:
            raise ValueError(f"{count} tokens: expected 0 .. {len(request.tokens)}")
        for part, group in zip(request.parts, self.groups, strict=True):
            if left >= part.computed:
                continue
            if group.first(left) < part.first:
                raise PoolError(f"{group.name} keeps nothing from before token {left} any more")
            if group.kind == "state" and left % group.block_tokens:
                raise PoolError(f"{group.name} has no state after {left} tokens")
        for part in request.parts:
            part.rewind(left)

    def fork(self, request: Request, count: int) -> list[Request]:
        """``count`` more requests with the same tokens, which share all of its blocks.

        The caller owns each. Whoever first appends to a block that is cut short gets one of its
        own, the last to do so keeps the shared one.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        PoolError
            There is a state, and tokens that are not computed: whoever computed them would change
            it under the others. Nothing was changed.
        """
        request.require_ready()
        states = any(group.kind == "state" for group in self.groups)
        if states and request.computed < len(request.tokens):
            raise PoolError("not all of its tokens are computed, and it has a state")
        count = whole(count, "forks")
        if count < 0:
            raise ValueError(f"{count} forks: expected 0 or more")
        return [Request([part.fork() for part in request.parts]) for _ in range(count)]

    def listen(self, listener: Callable[[Request], object]) -> None:
        """Have ``listener`` told of each request that is about to be released, with its blocks."""
        self._listener = listener

    def release(self, request: Request, *, store: bool = True) -> None:
        """The request is over: its blocks may be reused, the last first.

        With ``store`` the block that is cut short is kept for others too, as far as it is
        computed, unless partial matches are off. Copies that were not reported stay under way.

        Raises
        ------
        NotHeld
            It was released before.
        """
        for part in request.parts:
            part.require_open()
        if self._listener is not None:
            self._listener(request)
        for part in request.parts:
            part.release(store=store)
