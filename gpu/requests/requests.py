"""Requests over a model's pools, one per group: one prefix for all, and a block table for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from kvladder.errors import PoolError
from kvladder.gpu.pool.finder import PoolMatch, PrefixFinder
from kvladder.gpu.pool.serving import Serving, reserve
from kvladder.gpu.requests.sequence import BlockCopy, Extra, KVSequence, Sequences
from kvladder.gpu.sizing.groups import Group, served_by_all
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.keys import BlockKey
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Request:
    """One running request: a sequence per group. Only ``Requests`` creates and changes it.

    ``parts[g]`` is the :class:`KVSequence` of group ``g``. All parts have the same tokens.
    """

    __slots__ = ("parts", "session")

    def __init__(self, parts: Sequence[KVSequence]) -> None:
        self.parts = tuple(parts)
        self.session: str | None = None
        """Session that it belongs to, set by ``belongs``."""

    def belongs(self, session: str) -> None:
        """Set its session."""
        self.session = session

    @property
    def runs(self) -> list[Sequence[BlockKey]]:
        """Keys of its whole computed blocks, by group."""
        return [part.keys[: part.computed // part.block_tokens] for part in self.parts]

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids, including those without KV so far."""
        return self.parts[0].tokens

    @property
    def cached(self) -> int:
        """Number of prompt tokens that were served from the cache."""
        return self.parts[0].cached

    @property
    def computed(self) -> int:
        """Number of leading tokens that have their KV in the blocks."""
        return self.parts[0].computed

    @property
    def tables(self) -> list[list[DeviceSlot]]:
        """Slot of each block, by group; ``NO_SLOT`` (-1) for blocks that a window has passed."""
        return [part.table for part in self.parts]

    @property
    def copies(self) -> list[tuple[int, BlockCopy]]:
        """Copies ``(group, copy)`` that the engine must make before it runs the request.

        It then calls ``copied``. For a state, the engine copies the whole block and ignores the
        copy's ``tokens``.
        """
        return [(group, copy) for group, part in enumerate(self.parts) for copy in part.copies]

    @property
    def ready(self) -> bool:
        """True if all cached bytes are in place, so that the engine may run it."""
        return all(part.ready for part in self.parts)

    @property
    def arriving(self) -> bool:
        """True if blocks are still being loaded from a tier: poll, and look again."""
        return any(part.waits for part in self.parts)

    def require_ready(self) -> None:
        """Raise NotHeld if it was released, or NotReady if its bytes are not in place."""
        for part in self.parts:
            part.require_ready()

    @property
    def lost(self) -> bool:
        """True if the caller must release the request and begin it again.

        A block did not arrive, or blocks were renamed since the request began.
        """
        return any(part.lost for part in self.parts)


class CachedPrefix:
    """Cached blocks of one group for a prompt; its first ``limit`` tokens may be served."""

    def __init__(self, group: Group, finder: PrefixFinder, part: KVSequence, limit: int) -> None:
        self.group = group
        self._finder, self._part, self._limit = finder, part, limit
        blocks = limit // group.block_tokens
        self._present = part.present(blocks)
        self._followed = finder.followed([part.root.key, *part.keys[:blocks]], part.root)
        """True for each block that a known block may match in part."""
        self._shared: dict[int, int] = {}
        self.holes = group.holes(self._present)

    def shared(self, block: int) -> int:
        """See ``Shared``."""
        if not self._followed[block]:
            return 0
        if block not in self._shared:
            end = min(self._limit, (block + 1) * self.group.block_tokens - 1)
            self._shared[block] = self._finder.shares(self._part.content(block, block, end))
        return self._shared[block]

    def reach(self, end: int) -> PoolMatch:
        """Return the match for ``end`` tokens; it must be passed to ``hold`` or ``forgo``."""
        first, last = self.group.first(end), end // self.group.block_tokens
        return self._finder.reach(self._part.content(first, last, end), first)

    def lacks(self, match: PoolMatch, end: int) -> None:
        """Note that a tier delivers no more than this match, less than the ``end`` it promised."""
        block = match.first + len(match.nodes)
        if block < end // self.group.block_tokens:
            self._present[block] = False
            self.holes = self.group.holes(self._present)
        else:
            self._shared[block] = 0 if match.part is None else match.part.tokens


class Requests:
    """Running requests of one model. Calls come from the pools' thread and never wait.

    An engine begins a request with its prompt. It waits until the request is ``ready``, makes its
    ``copies`` and calls ``copied``. It computes the tokens that were not cached, calls ``commit``
    for them, appends the tokens that it generates, and in the end releases the request. A call that
    raises leaves all groups unchanged, except that idle blocks may have been evicted.

    A prompt may be computed in parts: ``begin(room=n)``, then ``extend`` and ``commit`` in turn. A
    window's pool then needs room only for the window and one such part.

    Parameters
    ----------
    groups, sequences:
        The groups and their sequences, in the same order. The pool of a window or a state is not
        ``chained``; the pool of a state has ``partial`` off.
    reuse:
        True if blocks are served to later requests, see ``CachePlan.no_reuse``.
    """

    def __init__(
        self, groups: Sequence[Group], sequences: Sequence[Sequences], *, reuse: bool = True
    ) -> None:
        assert len(groups) == len(sequences) > 0
        self.groups = tuple(groups)
        self.sequences = tuple(sequences)
        self._pools = [one.serving for one in sequences]
        self._finders = [one.finder for one in sequences]
        self._listener: Callable[[Request], object] | None = None
        self.reuse = reuse
        self.step = lcm(*(group.block_tokens for group in groups))
        """Blocks of all groups end together at multiples of this many tokens."""
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
        """Granularity in tokens of the cached prefixes of several groups, or of a window."""

        self.on_begin: Callable[[], object] | None = None
        """Called before a request begins."""
        self.lacking: list[int] = []
        """Tokens that only this group could not serve, by group, counted since ``watch``.

        Its pool evicted blocks that the other pools kept.
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
        """Return a request for this prompt, with its cached prefix and slots for all its tokens.

        The caller owns it until ``release``. The prefix is the longest that every group can serve.
        It never includes the last token, since the logits of that token are needed; ``cached_max``
        limits it further.

        Parameters
        ----------
        tokens:
            The prompt, 1 token or more.
        retention:
            Priorities of its blocks. They replace the priorities of cached blocks.
        salt, lora, extra:
            Identity of the content beyond its tokens.
        room:
            Tokens behind the cached ones that get slots; None for all. ``extend`` gets more.
        prompt_tokens:
            How many of the tokens are the prompt; the others were generated. None for all.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            There is no room, or none yet; nothing is held.
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
        """Return matches for the longest prefix that all groups can serve, and blocks by group.

        A block that must be copied is used only if there is room for the copy. Blocks that only
        tiers hold are claimed. The block counts cover the prefix and ``more`` tokens behind it.
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
            # A part that one group cannot copy is of no use in the others: search again below it.
            for finder, match in zip(self._finders, fitted, strict=True):
                finder.forgo(match)
            limit = min(ends)

    def _reach(self, part: KVSequence, limit: int) -> PoolMatch:
        """Return the longest match of a single group of full attention."""
        return self._finders[0].reach(part.content(0, limit // part.block_tokens, limit))

    def _match(self, parts: Sequence[KVSequence], limit: int) -> list[PoolMatch]:
        """Return the longest match that all groups can serve; blocks only in tiers are claimed."""
        end = limit // self._grain * self._grain
        kept = [
            CachedPrefix(group, finder, part, end)
            for group, finder, part in zip(self.groups, self._finders, parts, strict=True)
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
            for finder, match in zip(self._finders, found, strict=False):
                finder.forgo(match)

    def rename(self, mark: str) -> None:
        """Include this mark in the names of blocks from now on; an empty one restores the first.

        Pools forget their cached blocks. Tiers keep theirs under the old names. Requests that began
        before are ``lost``, and none of their blocks is stored any more.
        """
        for one in self.sequences:
            one.pool.reset(tiers=False)
            one.rename(mark)

    def watch(self) -> None:
        """Reset ``lacking``, and count from now on."""
        self.lacking = [0] * len(self.groups)

    def _blame(self, kept: Sequence[CachedPrefix], most: int, end: int) -> None:
        """Count, for each group, the tokens that could be served if it lacked nothing."""
        for at in range(len(kept)):
            others = [one for number, one in enumerate(kept) if number != at]
            groups, holes = [one.group for one in others], [one.holes for one in others]
            shared = [one.shared for one in others]
            self.lacking[at] += served_by_all(groups, holes, shared, most, self._grain) - end

    def restore(self, parts: Sequence[KVSequence]) -> tuple[Request, list[int]]:
        """Return a request with slots again after its blocks were moved elsewhere.

        Also return, by group, how many of its first slots still hold its blocks. The caller fills
        the others.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            There is no room, or none yet; nothing is held.
        """
        both = zip(self._finders, parts, strict=True)
        matches = [finder.match(part.keys[part.first : part.stored]) for finder, part in both]
        got = reserve(self._pools, matches, [len(part.held) for part in parts])
        for part, (match, slots) in zip(parts, got, strict=True):
            part.restore(match, slots)
        return Request(parts), [len(match.nodes) for match in matches]

    def copied(self, request: Request) -> None:
        """Report that the copies were made, or are ordered before the engine's later work."""
        for part in request.parts:
            part.copied()

    # ---- run

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Add ``tokens`` to the request, and slots to write their KV to.

        Shared and reusable blocks are never written. If the request's last block is one and is only
        partly filled, the request first gets a block of its own, and a copy to make.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        OutOfBlocks, BlocksBusy
            There is no room, or none yet; nothing was changed.
        """
        self._grow(request, tokens, None)

    def extend(self, request: Request, end: int) -> None:
        """Get slots for the first ``end`` tokens, as far as they lack; raise like ``append``."""
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
        """Report that the KV of the first ``computed`` tokens is complete.

        Other requests can reuse these whole blocks. The request releases blocks that a window has
        passed, which stay cached. Where the same content is cached already, the table changes to
        that slot, see ``BlockPool.commit``.

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
        """Remove the last ``count`` tokens, and release blocks that are empty then.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        ValueError
            There are fewer tokens; nothing was changed.
        PoolError
            A window has passed blocks that would be read then, or there is no checkpoint of a
            state at that point; nothing was changed.
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
                what = f"{group.name} no longer holds the blocks needed after {left} tokens"
                raise PoolError(what)
            if group.kind == "state" and left % group.block_tokens:
                raise PoolError(f"{group.name} has no state after {left} tokens")
        for part in request.parts:
            part.rewind(left)

    def fork(self, request: Request, count: int) -> list[Request]:
        """Return ``count`` more requests with the same tokens, which share all of its blocks.

        The caller owns each. If the last block is partly filled, each request that appends to it
        gets a copy, and the last of them keeps the shared block.

        Raises
        ------
        NotHeld, NotReady
            The request was released, or is not ready.
        PoolError
            There is a state, and tokens that are not computed: computing them would change the
            shared state. Nothing was changed.
        """
        request.require_ready()
        states = any(group.kind == "state" for group in self.groups)
        if states and request.computed < len(request.tokens):
            raise PoolError(
                "a request with a state can fork only when all of its tokens are computed"
            )
        count = whole(count, "forks")
        if count < 0:
            raise ValueError(f"{count} forks: expected 0 or more")
        return [Request([part.fork() for part in request.parts]) for _ in range(count)]

    def listen(self, listener: Callable[[Request], object]) -> None:
        """Call ``listener`` with each request before it is released, while it has its blocks."""
        self._listener = listener

    def release(self, request: Request, *, store: bool = True) -> None:
        """End the request: its blocks may be evicted, the last first.

        With ``store`` the computed part of a partly filled last block stays cached too, unless
        partial matches are off. Copies not yet reported by ``copied`` stay in flight.

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
